//! What `nvshare-checkpoint` is asked and answers: one packet each, over the `SOCK_SEQPACKET` socket that is its standard input.
//! A request comes with a pidfd of the process. Numbers are little-endian. Another request may follow an answer.
//!
//! Whoever asks waits as long as it likes. Hanging up takes a request back as far as that is possible: the process is never left
//! locked, so it then runs, or it is asleep, if its checkpoint had begun already.

use std::time::Duration;

/// The version of these packets. Both sides are installed together.
const VERSION: u8 = 1;
/// `CUuuid`
pub type Uuid = [u8; 16];
/// How long it waits for a request, the first one or another, before it ends.
pub const IDLE: Duration = Duration::from_secs(10);
/// The most GPUs that a process can be moved between.
pub const MAX_PAIRS: usize = 64;
/// The length of the longest request.
pub const MAX_REQUEST: usize = HEADER + MAX_PAIRS * 32;
const HEADER: usize = 12;
/// The length of an answer.
pub const ANSWER: usize = 8;

/// What to do with a process. Each may be asked for again, whatever came of it the last time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Lock it and checkpoint it.
    Sleep,
    /// Restore it and unlock it.
    Wake,
    /// Unlock it if it is locked, as after a helper that was killed.
    Settle,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub operation: Operation,
    /// The user that a process which is to sleep must be of.
    pub uid: u32,
    /// How long to wait for calls and work of the process to end, in milliseconds; not 0, which would be for ever.
    pub lock_timeout_ms: u32,
    /// For each GPU that the process sees, the one to restore it on; none for where it was.
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

    /// `None` if that is no request, or one of another version.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let (header, pairs) = packet.split_at_checked(HEADER)?;
        let word = |at: usize| Some(u32::from_le_bytes(header.get(at..at + 4)?.try_into().ok()?));
        let operation = match header[1] {
            0 => Operation::Sleep,
            1 => Operation::Wake,
            2 => Operation::Settle,
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

/// In which state the process is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Runs,
    Asleep,
    /// It never runs again: its restore has failed for good.
    Lost,
    /// It has ended, or it is not the process that was meant.
    Gone,
    /// Its state could not be found out, or not be changed.
    Unknown,
}

/// Which call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    None,
    /// Loading and initialising the driver, of which one before 570 lacks the calls.
    Driver,
    State,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
    /// The process is another user's: it is not taken off its GPUs.
    User,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub outcome: Outcome,
    pub failed: Step,
    /// The driver's error of that step; 0 for none, or where the step is no call of the driver.
    pub error: u32,
}

impl Answer {
    pub fn encode(self) -> [u8; ANSWER] {
        let mut packet = [VERSION, self.outcome as u8, self.failed as u8, 0, 0, 0, 0, 0];
        packet[4..].copy_from_slice(&self.error.to_le_bytes());
        packet
    }

    /// `None` if that is no answer, or one of another version.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let packet: &[u8; ANSWER] = packet.try_into().ok()?;
        let [VERSION, outcome, failed, _, error @ ..] = *packet else { return None };
        let outcomes = [Outcome::Runs, Outcome::Asleep, Outcome::Lost, Outcome::Gone, Outcome::Unknown];
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
    fn packets_survive_the_way() {
        for operation in [Operation::Sleep, Operation::Wake, Operation::Settle] {
            let pairs = vec![([1; 16], [2; 16]), ([3; 16], [4; 16])];
            let request = Request { operation, uid: 1000, lock_timeout_ms: 2000, pairs };
            let packet = request.encode();
            assert_eq!(Request::decode(&packet), Some(request));
            assert!((0..packet.len()).all(|len| Request::decode(&packet[..len]).is_none()));
        }
        for outcome in [Outcome::Runs, Outcome::Asleep, Outcome::Lost, Outcome::Gone, Outcome::Unknown] {
            let answer = Answer { outcome, failed: Step::Unlock, error: 401 };
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        }
        assert_eq!(Answer::decode(&[VERSION, 5, 0, 0, 0, 0, 0, 0]), None);
    }

    #[test]
    fn a_lock_without_a_timeout_is_refused() {
        let request = Request { operation: Operation::Sleep, uid: 0, lock_timeout_ms: 0, pairs: Vec::new() };
        assert_eq!(Request::decode(&request.encode()), None);
    }
}
