//! Requests to `nvshare-checkpoint` and its answers. Each request and each answer is one packet
//! over the `SOCK_SEQPACKET` socket that is the program's standard input. A request carries a pidfd
//! of the process. Numbers are little-endian. After an answer, the caller may send another request.
//!
//! The caller may wait for any length of time. Closing the socket cancels a request if its
//! checkpoint has not begun. The process is never left locked: either it runs, or it sleeps because
//! its checkpoint had already begun.

use std::time::Duration;

/// The version of these packets. Both sides are installed together, so only one version is
/// supported.
const VERSION: u8 = 1;
/// `CUuuid`
pub type Uuid = [u8; 16];
/// Time that the helper waits for a request before it exits.
pub const IDLE: Duration = Duration::from_secs(10);
/// Maximum number of GPU pairs in a request.
pub const MAX_PAIRS: usize = 64;
/// Maximum length of a request in bytes.
pub const MAX_REQUEST: usize = HEADER + MAX_PAIRS * 32;
const HEADER: usize = 12;
/// The length of an answer in bytes.
pub const ANSWER: usize = 8;

/// An operation on a process. Every operation may be repeated after any outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Locks the process and checkpoints it.
    Sleep,
    /// Restores the process and unlocks it.
    Wake,
    /// Unlocks the process if it is locked, for example by a helper that was killed.
    Settle,
    /// Reads the state of the process, which another program may have locked, and changes nothing.
    Inspect,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub operation: Operation,
    /// The uid that a process must have to be put to sleep.
    pub uid: u32,
    /// Maximum time to wait until the calls and the work of the process end, in milliseconds. Must
    /// not be 0, which the driver interprets as no timeout.
    pub lock_timeout_ms: u32,
    /// The old and the new GPU for each GPU that the process sees. An empty list restores the
    /// process on its old GPUs.
    pub pairs: Vec<(Uuid, Uuid)>,
}

impl Request {
    pub fn encode(&self) -> Vec<u8> {
        let mut packet = vec![VERSION, self.operation as u8, self.pairs.len() as u8, 0];
        packet.extend(self.uid.to_le_bytes());
        packet.extend(self.lock_timeout_ms.to_le_bytes());
        self.pairs.iter().for_each(|(old, new)| packet.extend(old.iter().chain(new)));
        packet
    }

    /// Decodes a request. Returns `None` if the packet is not a request of this version.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let (header, pairs) = packet.split_at_checked(HEADER)?;
        let word = |at: usize| Some(u32::from_le_bytes(header.get(at..at + 4)?.try_into().ok()?));
        let operation = match header[1] {
            0 => Operation::Sleep,
            1 => Operation::Wake,
            2 => Operation::Settle,
            3 => Operation::Inspect,
            _ => return None,
        };
        let (pairs, rest) = pairs.as_chunks::<32>();
        let is_right = header[0] == VERSION && rest.is_empty() && pairs.len() == usize::from(header[2]);
        let lock_timeout_ms = word(8)?;
        if !is_right || pairs.len() > MAX_PAIRS || lock_timeout_ms == 0 {
            return None;
        }
        let pair = |pair: &[u8; 32]| {
            let (mut old, mut new) = ([0; 16], [0; 16]);
            old.copy_from_slice(&pair[..16]);
            new.copy_from_slice(&pair[16..]);
            (old, new)
        };
        Some(Self { operation, uid: word(4)?, lock_timeout_ms, pairs: pairs.iter().map(pair).collect() })
    }
}

/// The state of the process after the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Runs,
    Asleep,
    /// The restore has failed permanently, and the process never runs again.
    Lost,
    /// The process has ended, or the pidfd does not refer to a process that the helper can see.
    Gone,
    /// The state of the process cannot be read or changed.
    Unknown,
    /// The process is locked. Only [`Operation::Inspect`] has this outcome.
    Locked,
}

/// The call that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    None,
    /// Loading and initializing the driver. Drivers before 570 lack the calls.
    Driver,
    State,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
    /// The process belongs to another user, so it is not checkpointed.
    User,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply {
    pub outcome: Outcome,
    pub failed: Step,
    /// The driver's error in the failed step. 0 means that there was no error, or that the step is
    /// not a call of the driver.
    pub error: u32,
}

impl Reply {
    pub fn encode(self) -> [u8; ANSWER] {
        let mut packet = [VERSION, self.outcome as u8, self.failed as u8, 0, 0, 0, 0, 0];
        packet[4..].copy_from_slice(&self.error.to_le_bytes());
        packet
    }

    /// Decodes an answer. Returns `None` if the packet is not an answer of this version.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let packet: &[u8; ANSWER] = packet.try_into().ok()?;
        let [VERSION, outcome, failed, _, error @ ..] = *packet else { return None };
        let outcomes =
            [Outcome::Runs, Outcome::Asleep, Outcome::Lost, Outcome::Gone, Outcome::Unknown, Outcome::Locked];
        let outcome = *outcomes.get(usize::from(outcome))?;
        let steps = [
            Step::None,
            Step::Driver,
            Step::State,
            Step::Lock,
            Step::Checkpoint,
            Step::Restore,
            Step::Unlock,
            Step::User,
        ];
        Some(Self { outcome, failed: *steps.get(usize::from(failed))?, error: u32::from_le_bytes(error) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_round_trip() {
        for operation in [Operation::Sleep, Operation::Wake, Operation::Settle, Operation::Inspect] {
            let pairs = vec![([1; 16], [2; 16]), ([3; 16], [4; 16])];
            let request = Request { operation, uid: 1000, lock_timeout_ms: 2000, pairs };
            let packet = request.encode();
            assert_eq!(Request::decode(&packet), Some(request));
            assert!((0..packet.len()).all(|len| Request::decode(&packet[..len]).is_none()));
        }
        let unfinished = [Outcome::Unknown, Outcome::Locked];
        for outcome in [Outcome::Runs, Outcome::Asleep, Outcome::Lost, Outcome::Gone].into_iter().chain(unfinished) {
            let answer = Reply { outcome, failed: Step::Unlock, error: 401 };
            assert_eq!(Reply::decode(&answer.encode()), Some(answer));
        }
        assert_eq!(Reply::decode(&[VERSION, 6, 0, 0, 0, 0, 0, 0]), None);
    }

    #[test]
    fn a_lock_without_a_timeout_is_refused() {
        let request = Request { operation: Operation::Sleep, uid: 0, lock_timeout_ms: 0, pairs: Vec::new() };
        assert_eq!(Request::decode(&request.encode()), None);
    }
}
