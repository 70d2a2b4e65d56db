//! Determines from environment variables which party chooses a program's GPUs. The library and
//! `nvsharectl run` share this module. The scheduler makes the placement decision.

use crate::{ClientMessage, Text, message::byte_enum};
use core::ffi::CStr;

/// The variable that tells the driver which GPUs a process sees.
pub const VISIBLE: &CStr = c"CUDA_VISIBLE_DEVICES";

/// The maximum number of bytes of the list in one message.
pub const PART: usize = 192;

byte_enum! {
    /// The party that chooses a program's GPUs.
    pub enum Chooser {
        /// No variable chooses. The program uses the first GPU that it sees, or all GPUs.
        Nobody = 0,
        /// `CUDA_VISIBLE_DEVICES` is set. An earlier
        /// [`VisibleDevices`](ClientMessage::VisibleDevices) sent its list.
        List = 1,
        /// The program chooses its GPU by the rank that its launcher assigned.
        Rank = 2,
    }
}

/// Variables in which launchers pass each process its rank on the host. The process chooses its GPU
/// by this rank. Some launchers set a rank even for a single process. For such a launcher, the
/// second list names the variables that contain the number of processes, and the rank counts only
/// if that number is greater than 1.
const RANKS: [(&CStr, &[&CStr]); 3] = [
    (c"LOCAL_RANK", &[]),
    (c"OMPI_COMM_WORLD_LOCAL_RANK", &[]),
    (c"SLURM_LOCALID", &[c"SLURM_STEP_NUM_TASKS", c"SLURM_NTASKS"]),
];

pub fn chooser<T: AsRef<[u8]>>(environment: impl Fn(&CStr) -> Option<T>) -> Chooser {
    let several = |name: &&CStr| {
        let count = environment(name);
        let count = count.as_ref().and_then(|text| core::str::from_utf8(text.as_ref()).ok()?.parse::<u32>().ok());
        count.is_some_and(|count| count > 1)
    };
    let is_set = |name: &CStr| environment(name).is_some_and(|text| !text.as_ref().is_empty());
    // A set but empty list chooses no GPU.
    if environment(VISIBLE).is_some() {
        Chooser::List
    } else if RANKS.iter().any(|(rank, sizes)| is_set(rank) && (sizes.is_empty() || sizes.iter().any(several))) {
        Chooser::Rank
    } else {
        Chooser::Nobody
    }
}

/// Whether a list names any GPU. The driver ignores the first unknown name and all names after it.
pub fn names_any(list: &[u8]) -> bool {
    matches!(list.trim_ascii_start().first(), Some(b'0'..=b'9' | b'G' | b'M'))
}

/// The messages that carry the list. Names of GPUs are ASCII.
pub fn parts(list: &[u8]) -> impl Iterator<Item = ClientMessage> {
    list.chunks(PART).map(|part| ClientMessage::VisibleDevices { text: ascii(part) })
}

/// Converts a part to text, with a question mark for each byte that is not printable ASCII.
pub(crate) fn ascii(part: &[u8]) -> Text<PART> {
    let mut ascii = [0; PART];
    for (to, from) in ascii.iter_mut().zip(part) {
        *to = if from.is_ascii() && !from.is_ascii_control() { *from } else { b'?' };
    }
    Text::new(core::str::from_utf8(ascii.get(..part.len()).unwrap_or_default()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &'static [(&'static CStr, &'static str)]) -> Chooser {
        chooser(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| *value))
    }

    #[test]
    fn a_list_takes_precedence_over_a_rank() {
        for variables in [&[(VISIBLE, "0")], &[(VISIBLE, "")]] {
            assert_eq!(of(variables), Chooser::List, "{variables:?}");
        }
        assert_eq!(of(&[(c"LOCAL_RANK", "0"), (VISIBLE, "1")]), Chooser::List);
        assert_eq!(of(&[(c"LOCAL_RANK", "0")]), Chooser::Rank);
        assert_eq!(of(&[(c"OMPI_COMM_WORLD_LOCAL_RANK", "3")]), Chooser::Rank);
        assert_eq!(of(&[(c"SLURM_LOCALID", "0"), (c"SLURM_NTASKS", "4")]), Chooser::Rank);
        assert_eq!(of(&[(c"SLURM_LOCALID", "0"), (c"SLURM_STEP_NUM_TASKS", "2")]), Chooser::Rank);
    }

    #[test]
    fn a_single_process_without_a_list_chooses_no_gpu() {
        assert_eq!(of(&[]), Chooser::Nobody);
        assert_eq!(of(&[(c"LOCAL_RANK", "")]), Chooser::Nobody);
        assert_eq!(of(&[(c"SLURM_LOCALID", "0")]), Chooser::Nobody);
        assert_eq!(of(&[(c"SLURM_LOCALID", "0"), (c"SLURM_NTASKS", "1")]), Chooser::Nobody);
    }

    #[test]
    fn an_empty_or_invalid_list_names_no_gpu() {
        assert!([" 0,1", "GPU-8", "MIG-8"].iter().all(|list| names_any(list.as_bytes())));
        assert!(!["", " ", "-1", "none"].iter().any(|list| names_any(list.as_bytes())));
    }

    #[test]
    fn a_list_of_any_length_is_sent_completely() {
        for list in [String::new(), "0".into(), "GPU-0123,".repeat(100), "é,\n1".into()] {
            let parts = parts(list.as_bytes()).map(|part| match part {
                ClientMessage::VisibleDevices { text } => text.as_str().to_owned(),
                other => panic!("{other:?}"),
            });
            assert_eq!(parts.collect::<String>(), list.replace('é', "??").replace('\n', "?"));
        }
    }
}
