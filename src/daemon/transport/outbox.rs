//! Messages for a client whose socket is full. A stopped client may read nothing for hours, so a newer
//! message replaces an older one that it supersedes.

use std::collections::VecDeque;
use std::sync::Arc;

use nvshare_wire::SchedulerMessage;

use crate::daemon::tenants::{Budget, Share, What};

/// Maximum number of queued messages. A stopped client accumulates fewer. Only a client that keeps
/// sending and never reads exceeds the limit.
const MAX_QUEUED: usize = 1024;

/// The messages, each with its charge against the tenant's budget of unread bytes.
#[derive(Debug, Default)]
pub struct Outbox(VecDeque<(SchedulerMessage, Share)>);

/// The error if the queue is full, or the tenant has too many unread bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

impl Outbox {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn push(&mut self, message: SchedulerMessage, budget: &Arc<Budget>) -> Result<(), Full> {
        self.0.retain(|(older, _)| !replaces(&message, older));
        if self.0.len() >= MAX_QUEUED {
            return Err(Full);
        }
        let share = budget.take(What::Queued, size_of::<SchedulerMessage>() as u32).ok_or(Full)?;
        self.0.push_back((message, share));
        Ok(())
    }

    pub fn front(&self) -> Option<&SchedulerMessage> {
        self.0.front().map(|(message, _)| message)
    }

    pub fn pop(&mut self) {
        self.0.pop_front();
    }
}

/// True if `newer` supersedes `older`. A grant is never superseded.
fn replaces(newer: &SchedulerMessage, older: &SchedulerMessage) -> bool {
    use SchedulerMessage::{Allowance, Contended, Denied, GpuRules, Limit, Prepare, Reserved, Revoke, Waiting};
    match (newer, older) {
        (Allowance { slot: new, .. }, Allowance { slot: old, .. }) => new == old,
        (Limit { slot: new, .. }, Limit { slot: old, .. }) => new == old,
        (GpuRules { uuid: new, .. }, GpuRules { uuid: old, .. }) => new == old,
        (Reserved { slot: new, .. }, Reserved { slot: old, .. }) => new == old,
        (Prepare { slot: new, .. }, Prepare { slot: old, .. }) => new == old,
        (Denied { slot: new, what: a, .. }, Denied { slot: old, what: b, .. }) => new == old && a == b,
        (Contended { gpus: new, .. }, Contended { gpus: old, .. }) => new == old,
        // The library has a separate timeout for each reason, so each reason is sent once.
        (Waiting { gpus: new, why: a }, Waiting { gpus: old, why: b }) => new == old && a == b,
        (Revoke { gpus: new }, Revoke { gpus: old }) => new == old,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::tenants::Budgets;
    use crate::identity::Tenant;

    fn budget() -> Arc<Budget> {
        Budgets::new(1).of(&Tenant::User(1))
    }

    #[test]
    fn only_the_newest_state_is_kept() {
        let (mut outbox, budget) = (Outbox::default(), budget());
        for seq in 0..100_000 {
            outbox.push(SchedulerMessage::Allowance { slot: seq % 2, seq, bytes: 0 }, &budget).expect("room");
            outbox.push(SchedulerMessage::Contended { gpus: 1, waiters: seq, grace_us: 0 }, &budget).expect("room");
        }
        assert_eq!(outbox.0.len(), 3);
        assert_eq!(
            outbox.0.back().map(|(message, _)| message),
            Some(&SchedulerMessage::Contended { gpus: 1, waiters: 99_999, grace_us: 0 })
        );
    }

    #[test]
    fn reasons_to_wait_do_not_replace_each_other() {
        use nvshare_wire::scheduler::WaitReason;
        let (mut outbox, budget) = (Outbox::default(), budget());
        for why in [WaitReason::Context, WaitReason::Memory, WaitReason::Memory] {
            outbox.push(SchedulerMessage::Waiting { gpus: 1, why }, &budget).expect("room");
        }
        assert_eq!(outbox.0.len(), 2);
    }

    #[test]
    fn grants_are_never_dropped_and_the_queue_is_bounded() {
        let (mut outbox, budget) = (Outbox::default(), budget());
        for _ in 0..MAX_QUEUED {
            outbox.push(SchedulerMessage::Grant { gpus: 1 }, &budget).expect("room");
        }
        assert_eq!(outbox.push(SchedulerMessage::Grant { gpus: 1 }, &budget), Err(Full));
    }

    #[test]
    fn a_tenants_unread_messages_are_bounded() {
        let budget = budget();
        let mut outboxes: Vec<Outbox> = Vec::new();
        let fill = |outbox: &mut Outbox| {
            (0..MAX_QUEUED).all(|_| outbox.push(SchedulerMessage::Grant { gpus: 1 }, &budget).is_ok())
        };
        while outboxes.len() < 1000 {
            let mut outbox = Outbox::default();
            let is_full = !fill(&mut outbox);
            outboxes.push(outbox);
            if is_full {
                break;
            }
        }
        assert!((10..1000).contains(&outboxes.len()), "{}", outboxes.len());
        outboxes.clear();
        assert!(fill(&mut Outbox::default()), "it is there again");
    }
}
