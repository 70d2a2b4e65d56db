//! Leaving the scheduler, so that CRIU can save this sleeping process to disk.
//!
//! CRIU cannot save one end of a connected `SOCK_SEQPACKET` socket. So the scheduler sends `Leave`, and
//! the client closes its connection. The client connects again after it has run for `AWAY`. Before
//! that time is over, the process is stopped and saved. If it cannot be saved, and when it was
//! restored, it runs again and connects as any sleeping client whose connection was lost. So the
//! client need not know what happened. Rejected: a file or a message that ends the absence, because it
//! would have to survive in each place where the process may be restored.

use super::{
    ClientThread,
    sleep::{Away, Sleep},
};
use crate::connection;
use nvshare_wire::{ClientMessage, client::LeaveAnswer};

impl ClientThread {
    /// Closes the connection of a sleeping client.
    pub(super) fn leave(&mut self) {
        // A swap file is open in a descriptor table of its own, which CRIU does not save.
        if self.tier.has_files() {
            return self.refuse_to_leave(LeaveAnswer::SwapFile);
        }
        // If the message cannot be sent, the scheduler does not expect this client to leave.
        if connection::send(&ClientMessage::Leaving { answer: LeaveAnswer::Leaves }) {
            self.on_disconnect_asleep("the process is being saved to disk");
            if let Sleep::Prepared(prepared) = &mut self.sleep {
                (prepared.away, prepared.lost_at) = (Some(Away::begin()), None);
            }
        }
    }

    pub(super) fn refuse_to_leave(&self, answer: LeaveAnswer) {
        connection::send(&ClientMessage::Leaving { answer });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        client::thread::{RETRY_LATE, RETRY_SOON, fake::Client},
        connection::presence,
        sys::time::Instant,
    };
    use core::time::Duration;
    use nvshare_wire::SchedulerMessage;

    fn asleep() -> Client {
        let mut client = Client::new(1);
        client.sent();
        client.fall_asleep(1, |_| {});
        client.step_until(|client| client.sent().contains(&ClientMessage::SleepReady {}));
        client
    }

    #[test]
    fn a_sleeping_client_closes_its_connection_and_stays_asleep() {
        let mut client = asleep();
        client.receive(SchedulerMessage::Leave {});
        assert_eq!(client.sent(), [ClientMessage::Leaving { answer: LeaveAnswer::Leaves }]);
        assert!(client.thread.socket.is_none() && !connection::is_connected());
        presence::want();
        assert_eq!(client.step(), RETRY_SOON);
        assert!(client.thread.is_off_its_gpus() && presence::is_away());
    }

    #[test]
    fn only_time_in_which_the_process_runs_counts_as_absence() {
        let mut client = asleep();
        client.receive(SchedulerMessage::Leave {});
        let steps_left = |client: &mut Client, since| match &mut client.thread.sleep {
            Sleep::Prepared(prepared) => prepared.away.as_mut().map(|away| {
                away.since = since;
                away.steps_left
            }),
            _ => None,
        };
        for left in (1..=10).rev() {
            // The process was stopped for an hour, and then runs again.
            let stopped = Instant::ago(Duration::from_secs(3600));
            assert_eq!(steps_left(&mut client, stopped), Some(left));
            client.step();
        }
        let Sleep::Prepared(prepared) = &client.thread.sleep else { panic!("the client is asleep") };
        assert!(prepared.away.is_none(), "the client connects again");
        assert!(
            prepared.lost_at.is_some_and(|lost| lost.elapsed() < RETRY_LATE),
            "its wait for a scheduler begins now"
        );
    }

    #[test]
    fn a_client_that_is_awake_refuses_to_leave() {
        let mut client = Client::new(1);
        client.sent();
        client.receive(SchedulerMessage::Leave {});
        assert_eq!(client.sent(), [ClientMessage::Leaving { answer: LeaveAnswer::Awake }]);
        assert!(connection::is_connected());
    }
}
