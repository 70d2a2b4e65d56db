//! Clients whose processes programs other than the helper lock and checkpoint, for example vLLM's sleep
//! mode or `cuda-checkpoint`. Such a client is in [`Stage::Foreign`] until its process runs again.
//!
//! The client gets no turn, and its locks no longer count. The memory that it has after its restore
//! stays charged. Other clients use that memory only if the restore will wait for room
//! ([`Foreign::Lent`]), because a restore without room fails permanently. Otherwise the room stays
//! reserved, and so does the room for the client's context.
//!
//! The daemon reports each change ([`Event::ForeignCheckpoint`]). It does not know the state of a process
//! that is being restored, so no such event arrives between `Command::RestoreAllowed` and the end of the
//! restore.

use super::{Sleep, Stage, Step};
use crate::api::*;

/// The stages of a client whose process another program has locked or checkpointed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Foreign {
    /// The process is on its GPUs.
    Locked,
    /// The process is off its GPUs, and its room stays reserved.
    Reserved,
    /// The process is off its GPUs, and other clients use its room.
    Lent,
    /// The program that will restore the process waits for room, like a client in
    /// [`Stage::Waking`].
    Waking(u64),
    /// The program may restore the process.
    Restoring,
}

impl Sleep {
    /// Whether another program has locked or checkpointed the client's process.
    pub fn is_foreign(&self, client: ClientId) -> bool {
        matches!(self.state_of(client), Stage::Foreign(_))
    }

    /// Handles the present state of a process that another program may have locked or checkpointed.
    /// While the helper has the process, its own answers describe it.
    pub fn foreign(&mut self, client: ClientId, state: ForeignState) -> Step {
        let before = self.state_of(client);
        if !matches!(before, Stage::Awake | Stage::Preparing | Stage::Foreign(_)) {
            return Step::Nothing;
        }
        let is_new = !matches!(before, Stage::Foreign(_));
        if is_new && state == ForeignState::Runs {
            return Step::Nothing;
        }
        let entry = self.clients.entry(client).or_default();
        let stage = match state {
            ForeignState::Runs => {
                entry.runs();
                return Step::Runs;
            }
            ForeignState::Lost => {
                (entry.state, entry.due) = (Stage::Lost, None);
                entry.answer_move(Some(MoveObstacle::Sleep(SleepObstacle::Failed)));
                return Step::IsLost;
            }
            ForeignState::Locked => Foreign::Locked,
            ForeignState::Checkpointed { restore_waits: false } => Foreign::Reserved,
            ForeignState::Checkpointed { restore_waits: true } => Foreign::Lent,
        };
        entry.answer_move(Some(MoveObstacle::Sleep(SleepObstacle::Foreign)));
        entry.owes_answer |= entry.state == Stage::Preparing;
        (entry.state, entry.due) = (Stage::Foreign(stage), None);
        Step::IsKept(stage)
    }

    /// Handles a program that wants to restore a client that it has checkpointed.
    pub fn restore_requested(&mut self, client: ClientId, number: u64) -> Step {
        let Some(entry) = self.clients.get_mut(&client) else { return Step::AllowRestore };
        match entry.state {
            Stage::Foreign(Foreign::Lent) => {
                entry.state = Stage::Foreign(Foreign::Waking(number));
                Step::Nothing
            }
            Stage::Foreign(Foreign::Waking(_)) => Step::Nothing,
            _ => Step::AllowRestore, // the room is reserved, or the driver refuses the restore
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClientId = ClientId(1);
    const CHECKPOINTED: ForeignState = ForeignState::Checkpointed { restore_waits: false };
    const LENT: ForeignState = ForeignState::Checkpointed { restore_waits: true };

    fn phase(sleep: &Sleep) -> SleepPhase {
        sleep.view(A).phase
    }

    #[test]
    fn a_client_that_another_program_has_locked_runs_once_it_is_unlocked() {
        let mut sleep = Sleep::default();
        assert_eq!(sleep.foreign(A, ForeignState::Runs), Step::Nothing, "that is no news");
        for (state, stage, shown) in [
            (ForeignState::Locked, Foreign::Locked, SleepPhase::Locked),
            (CHECKPOINTED, Foreign::Reserved, SleepPhase::Checkpointed),
            (ForeignState::Locked, Foreign::Locked, SleepPhase::Locked),
            (LENT, Foreign::Lent, SleepPhase::Lent),
        ] {
            assert_eq!(sleep.foreign(A, state), Step::IsKept(stage));
            assert_eq!((phase(&sleep), sleep.is_held_off(A), sleep.is_foreign(A)), (shown, true, true));
        }
        assert_eq!(sleep.foreign(A, ForeignState::Runs), Step::Runs);
        assert!(!sleep.is_held_off(A) && !sleep.is_foreign(A));
    }

    #[test]
    fn a_restore_waits_for_room_only_if_the_room_is_lent() {
        let mut sleep = Sleep::default();
        assert_eq!(sleep.restore_requested(A, 1), Step::AllowRestore);
        sleep.foreign(A, CHECKPOINTED);
        assert_eq!((sleep.restore_requested(A, 2), sleep.waking()), (Step::AllowRestore, vec![]));
        sleep.foreign(A, LENT);
        assert_eq!((sleep.restore_requested(A, 3), sleep.waking()), (Step::Nothing, vec![A]));
        assert_eq!((sleep.restore_requested(A, 4), phase(&sleep)), (Step::Nothing, SleepPhase::Waking));
        assert_eq!(sleep.has_room(A), Step::AllowRestore);
        assert_eq!((sleep.waking(), phase(&sleep)), (vec![], SleepPhase::Restoring));
        // The restore has failed, or the program that wanted it has ended.
        assert_eq!((sleep.foreign(A, LENT), phase(&sleep)), (Step::IsKept(Foreign::Lent), SleepPhase::Lent));
    }

    #[test]
    fn the_helpers_own_operations_are_not_mistaken_for_other_programs() {
        let mut sleep = Sleep::default();
        sleep.want(A, true);
        sleep.prepare(Time::ZERO, A);
        sleep.ready(Time::ZERO, A, None);
        assert_eq!(sleep.foreign(A, ForeignState::Locked), Step::Nothing);
        sleep.answered(Time::ZERO, A, SleepOutcome::Asleep, 1);
        assert_eq!((sleep.foreign(A, LENT), phase(&sleep)), (Step::Nothing, SleepPhase::Asleep));
    }

    /// It may stay locked for any time.
    #[test]
    fn a_locked_client_is_not_moved() {
        let (mut sleep, to) = (Sleep::default(), Move { from: GpuId(Uuid([1; 16])), to: GpuId(Uuid([2; 16])) });
        let obstacle = Some(MoveObstacle::Sleep(SleepObstacle::Foreign));
        assert_eq!(sleep.want_move(A, to), None);
        sleep.foreign(A, ForeignState::Locked);
        assert_eq!(sleep.take_answer(A), Some((to, obstacle)));
        assert_eq!(sleep.want_move(A, to), obstacle);
    }

    #[test]
    fn a_client_locked_while_it_prepares_is_asked_again_after_it_has_answered() {
        let mut sleep = Sleep::default();
        sleep.want(A, true);
        sleep.prepare(Time::ZERO, A);
        assert_eq!(sleep.foreign(A, ForeignState::Locked), Step::IsKept(Foreign::Locked));
        assert_eq!(sleep.foreign(A, ForeignState::Runs), Step::Runs, "it is told that it is awake");
        assert!(!sleep.is_to_prepare(A), "it owes an answer");
        assert_eq!(sleep.ready(Time::ZERO, A, None), Step::Nothing);
        assert!(sleep.is_to_prepare(A));
    }
}
