//! Tests of a client's stages.

use super::*;
use SleepOperation::{Settle, Sleep as Checkpoint, Wake};

const A: ClientId = ClientId(1);
const B: ClientId = ClientId(2);

fn at(seconds: u64) -> Time {
    Duration::from_secs(seconds)
}

fn phase(sleep: &Sleep) -> SleepPhase {
    sleep.view(A).phase
}

/// A client that has been put to sleep.
fn asleep(paused: bool) -> Sleep {
    let mut sleep = Sleep::default();
    sleep.want(A, paused);
    assert!(sleep.is_to_prepare(A));
    assert_eq!(sleep.prepare(at(0), A), Step::Prepare);
    assert_eq!(sleep.ready(at(1), A, None), Step::Call(Checkpoint));
    assert_eq!(sleep.answered(at(2), A, SleepOutcome::Asleep, 1), Step::Sleeps);
    assert!(sleep.is_away(A) && sleep.is_held_off(A));
    sleep
}

#[test]
fn a_sleeping_client_wakes_to_run() {
    let mut sleep = asleep(false);
    assert_eq!(sleep.wake(at(10), A, false, 2), Step::Wakes);
    assert_eq!((sleep.waking(), sleep.has_room(A)), (vec![A], Step::Call(Wake)));
    assert_eq!(sleep.answered(at(12), A, SleepOutcome::Runs, 3), Step::Runs);
    assert!(!sleep.is_held_off(A) && sleep.due(A).is_none());
    assert_eq!(
        sleep.view(A),
        SleepView {
            phase: SleepPhase::Awake,
            paused: false,
            drained: false,
            obstacle: None,
            moving: None,
            woken: Some(Woken { by: WakeReason::Call, took: at(2) })
        }
    );
}

#[test]
fn a_paused_client_sleeps_until_it_is_resumed() {
    let mut sleep = asleep(true);
    assert_eq!(sleep.wake(at(10), A, false, 2), Step::Nothing);
    assert_eq!(phase(&sleep), SleepPhase::Asleep);
    assert_eq!(sleep.wake(at(10), A, true, 3), Step::Wakes);
    sleep.want(A, true);
    assert_eq!((phase(&sleep), sleep.waking()), (SleepPhase::Asleep, vec![]), "it has not begun to come back");
}

#[test]
fn an_earlier_schedulers_sleep_is_settled_first() {
    let mut sleep = Sleep::default();
    assert_eq!(sleep.found(A), Step::Call(Settle));
    assert!(sleep.is_held_off(A) && !sleep.is_away(A));
    assert_eq!(sleep.answered(at(1), A, SleepOutcome::Asleep, 1), Step::Sleeps);
    assert_eq!(sleep.wake(at(10), A, false, 2), Step::Wakes);
    let mut sleep = Sleep::default();
    sleep.found(A);
    assert_eq!(sleep.wake(at(10), A, false, 1), Step::Nothing, "it is being found out");
    assert_eq!(sleep.answered(at(1), A, SleepOutcome::Asleep, 2), Step::Wakes);
    let mut sleep = Sleep::default();
    sleep.found(A);
    assert_eq!(sleep.answered(at(1), A, SleepOutcome::Runs, 1), Step::Runs);
    assert!(!sleep.is_held_off(A) && !sleep.is_to_prepare(A));
}

#[test]
fn every_sleep_phase_can_return_to_running() {
    let mut sleep = Sleep::default();
    sleep.want(A, true);
    assert_eq!(sleep.wake(at(10), A, true, 1), Step::Stays, "nothing has begun");
    sleep.want(A, true);
    sleep.prepare(at(0), A);
    assert_eq!(sleep.wake(at(10), A, true, 2), Step::Nothing, "its answer is on its way");
    assert_eq!(sleep.ready(at(1), A, None), Step::Runs);
    sleep.want(A, true);
    sleep.prepare(at(2), A);
    sleep.ready(at(3), A, None);
    assert_eq!(sleep.wake(at(10), A, true, 3), Step::Nothing, "a checkpoint cannot be taken back");
    assert_eq!(sleep.answered(at(4), A, SleepOutcome::Asleep, 4), Step::Wakes);
}

#[test]
fn a_client_paused_during_its_restore_sleeps_again() {
    let mut sleep = asleep(false);
    sleep.wake(at(10), A, false, 2);
    sleep.has_room(A);
    sleep.want(A, true);
    assert_eq!(sleep.answered(at(4), A, SleepOutcome::Runs, 3), Step::Runs);
    assert!(sleep.is_to_prepare(A) && sleep.is_held_off(A) && sleep.view(A).obstacle.is_none());
}

#[test]
fn only_a_paused_client_is_asked_again_after_a_refusal() {
    for paused in [false, true] {
        let mut sleep = Sleep::default();
        sleep.want(A, paused);
        sleep.prepare(at(0), A);
        assert_eq!(sleep.refused(at(1), A, SleepObstacle::Managed), Step::Stays);
        assert_eq!(sleep.view(A).obstacle, Some(SleepObstacle::Managed));
        assert_eq!((sleep.is_to_prepare(A), sleep.due(A)), (false, paused.then_some(at(2))), "not at once");
        assert_eq!(sleep.look(at(2), A, 1), Step::Nothing);
        assert_eq!((sleep.is_to_prepare(A), sleep.is_held_off(A)), (paused, paused));
    }
}

#[test]
fn a_late_answer_does_not_answer_a_later_request() {
    let mut sleep = Sleep::default();
    sleep.want(A, true);
    sleep.prepare(at(0), A);
    assert_eq!(sleep.look(at(39), A, 1), Step::Nothing);
    assert_eq!(sleep.look(at(40), A, 1), Step::Runs);
    assert!(!sleep.is_to_prepare(A), "it owes an answer");
    assert_eq!(sleep.look(at(41), A, 1), Step::Nothing);
    assert!(!sleep.is_to_prepare(A), "it still does");
    assert_eq!(sleep.ready(at(50), A, None), Step::Nothing);
    assert!(sleep.is_to_prepare(A));
    assert_eq!(sleep.prepare(at(50), A), Step::Prepare);
}

#[test]
fn an_unknown_outcome_is_settled_until_it_is_known() {
    let mut sleep = Sleep::default();
    sleep.want(A, false);
    sleep.prepare(at(0), A);
    sleep.ready(at(0), A, None);
    assert_eq!(sleep.answered(at(1), A, SleepOutcome::Unknown, 1), Step::Call(Settle), "at once");
    assert!(sleep.is_held_off(A) && !sleep.is_away(A));
    assert_eq!(sleep.answered(at(1), A, SleepOutcome::Unknown, 1), Step::Nothing);
    assert_eq!(sleep.answered(at(1), A, SleepOutcome::Runs, 1), Step::Nothing, "nobody was asked");
    assert_eq!(sleep.look(at(2), A, 1), Step::Call(Settle));
    assert_eq!(sleep.answered(at(3), A, SleepOutcome::Unknown, 1), Step::Nothing);
    assert_eq!((sleep.look(at(4), A, 1), sleep.look(at(5), A, 1)), (Step::Nothing, Step::Call(Settle)));
    assert_eq!(sleep.answered(at(6), A, SleepOutcome::Runs, 1), Step::Runs);
    assert_eq!(sleep.view(A).obstacle, Some(SleepObstacle::Failed));
}

#[test]
fn a_failed_restore_is_retried_unless_the_failure_is_final() {
    let mut sleep = asleep(false);
    sleep.wake(at(10), A, false, 2);
    sleep.has_room(A);
    assert_eq!(sleep.answered(at(10), A, SleepOutcome::Asleep, 3), Step::Sleeps);
    assert_eq!((phase(&sleep), sleep.look(at(11), A, 4)), (SleepPhase::Asleep, Step::Wakes));
    sleep.has_room(A);
    assert_eq!(sleep.answered(at(12), A, SleepOutcome::Lost, 5), Step::IsLost);
    assert_eq!((sleep.wake(at(10), A, true, 6), phase(&sleep)), (Step::Nothing, SleepPhase::Lost));
}

#[test]
fn room_is_given_in_order_of_waking() {
    let mut sleep = asleep(false);
    sleep.want(B, false);
    sleep.prepare(at(0), B);
    sleep.ready(at(0), B, None);
    sleep.answered(at(0), B, SleepOutcome::Asleep, 2);
    sleep.wake(at(10), B, false, 3);
    sleep.wake(at(10), A, false, 4);
    assert_eq!(sleep.waking(), [B, A]);
    sleep.forget(B);
    assert_eq!((sleep.waking(), sleep.is_held_off(B)), (vec![A], false));
}
