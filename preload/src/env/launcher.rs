//! The gang of a program whose job has several processes that wait for each other. Launchers
//! (torchrun, Open MPI, Slurm, and any other that sets PyTorch's variables) give all processes of
//! one job the same environment variables. The values of these variables together identify the job.

use core::ffi::CStr;

/// The variables of one launcher: the variable with the number of processes, and the variables that
/// together identify the job.
struct Launcher {
    size: &'static CStr,
    names: &'static [&'static CStr],
}

/// The launchers, in the order in which they are tried.
const LAUNCHERS: [Launcher; 4] = [
    // torchrun also sets MASTER_ADDR and MASTER_PORT. All three are used, because the id can be "none".
    Launcher { size: c"WORLD_SIZE", names: &[c"TORCHELASTIC_RUN_ID", c"MASTER_ADDR", c"MASTER_PORT"] },
    Launcher { size: c"WORLD_SIZE", names: &[c"MASTER_ADDR", c"MASTER_PORT"] },
    Launcher { size: c"OMPI_COMM_WORLD_SIZE", names: &[c"PMIX_NAMESPACE"] },
    Launcher { size: c"SLURM_STEP_NUM_TASKS", names: &[c"SLURM_JOB_ID", c"SLURM_STEP_ID"] },
];

/// Returns the key of the gang that the environment names; 0 for no gang.
pub fn gang(environment: impl Fn(&CStr) -> Option<&'static [u8]>) -> u64 {
    if let Some(text) = environment(c"NVSHARE_GANG") {
        return if is_none(text) { 0 } else { hash(text.iter().chain(&[0])) };
    }
    let is_several = |size: &CStr| environment(size).and_then(number).is_some_and(|size| size > 1);
    let all = |launcher: &Launcher| launcher.names.iter().all(|name| environment(name).is_some_and(|v| !v.is_empty()));
    let launcher = LAUNCHERS.iter().find(|launcher| is_several(launcher.size) && all(launcher));
    let texts = launcher.into_iter().flat_map(|launcher| launcher.names.iter().filter_map(|name| environment(name)));
    // NUL separates the texts, because texts contain no NUL.
    launcher.map_or(0, |_| hash(texts.flat_map(|text| text.iter().chain(&[0]))))
}

/// Whether the user says that the program is in no gang.
pub fn refuses_gangs(environment: impl Fn(&CStr) -> Option<&'static [u8]>) -> bool {
    environment(c"NVSHARE_GANG").is_some_and(is_none)
}

fn is_none(text: &[u8]) -> bool {
    matches!(text, b"" | b"0")
}

fn number(text: &[u8]) -> Option<u32> {
    core::str::from_utf8(text).ok()?.parse().ok()
}

/// Hashes with FNV-1a, which gives the same key for the same bytes in every process. Never 0, which
/// means no gang.
pub fn hash<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> u64 {
    let hash =
        bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    hash.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &'static [(&'static CStr, &'static str)]) -> u64 {
        gang(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_bytes()))
    }

    #[test]
    fn processes_of_one_job_form_a_gang() {
        let torch = of(&[(c"MASTER_ADDR", "a"), (c"MASTER_PORT", "29500"), (c"WORLD_SIZE", "2"), (c"RANK", "0")]);
        let other = of(&[(c"MASTER_ADDR", "a"), (c"MASTER_PORT", "29500"), (c"WORLD_SIZE", "2"), (c"RANK", "1")]);
        assert!(torch != 0 && torch == other);
        let port = of(&[(c"MASTER_ADDR", "a"), (c"MASTER_PORT", "29501"), (c"WORLD_SIZE", "2")]);
        assert!(port != 0 && port != torch);
        assert_ne!(of(&[(c"PMIX_NAMESPACE", "prterun-1"), (c"OMPI_COMM_WORLD_SIZE", "8")]), 0);
        assert_ne!(of(&[(c"SLURM_JOB_ID", "5"), (c"SLURM_STEP_ID", "0"), (c"SLURM_STEP_NUM_TASKS", "4")]), 0);
        let parts = [
            of(&[(c"MASTER_ADDR", "ab"), (c"MASTER_PORT", "c"), (c"WORLD_SIZE", "2")]),
            of(&[(c"MASTER_ADDR", "a"), (c"MASTER_PORT", "bc"), (c"WORLD_SIZE", "2")]),
        ];
        assert_ne!(parts[0], parts[1]);
    }

    #[test]
    fn a_single_process_is_in_no_gang() {
        for alone in [
            of(&[]),
            of(&[(c"MASTER_ADDR", "a"), (c"MASTER_PORT", "29500"), (c"WORLD_SIZE", "1")]),
            of(&[(c"MASTER_ADDR", "a"), (c"MASTER_PORT", "29500")]),
            of(&[(c"MASTER_ADDR", "a"), (c"MASTER_PORT", ""), (c"WORLD_SIZE", "2")]),
            of(&[(c"PMIX_NAMESPACE", "x"), (c"OMPI_COMM_WORLD_SIZE", "many")]),
        ] {
            assert_eq!(alone, 0);
        }
    }

    #[test]
    fn nvshare_gang_overrides_the_launchers_variables() {
        assert_ne!(of(&[(c"NVSHARE_GANG", "mine")]), 0);
        for none in ["", "0"] {
            let none: &'static str = none;
            let value = |name: &CStr| match name {
                name if name == c"NVSHARE_GANG" => Some(none.as_bytes()),
                name if name == c"WORLD_SIZE" => Some(b"2".as_slice()),
                _ => Some(b"x".as_slice()),
            };
            assert_eq!(gang(value), 0);
            assert!(refuses_gangs(value));
        }
        assert!(!refuses_gangs(|_| None) && !refuses_gangs(|_| Some(b"mine".as_slice())));
    }
}
