//! [`Host`]: what the daemon manages for programs and users beside the scheduler's decisions. Its
//! components do not change each other. `SwapFiles` reads the figures of host memory.

use super::foreign::ForeignCheckpoints;
use super::hibernation::Departures;
use super::host_use::HostFigures;
use super::model::Model;
use super::moves::Moves;
use super::placement::Placements;
use super::rooms::Rooms;
use super::sharing::Sharing;
use super::sleep::Sleep;
use super::swap_files::SwapFiles;
use crate::daemon::checkpoint::{HelperAnswer, Outcome};
use crate::identity::Tenant;
use crate::scheduler::{ClientId, Event};
use crate::sys::foreign::Foreign;
use crate::sys::pidfd;
use nvshare_wire::client::CheckpointStep;

#[derive(Debug, Default)]
pub struct Host {
    pub figures: HostFigures,
    pub files: SwapFiles,
    pub sharing: Sharing,
    pub placements: Placements,
    pub sleep: Sleep,
    pub foreign: ForeignCheckpoints,
    pub departures: Departures,
    pub moves: Moves,
    /// Memory that is kept free at users' requests.
    pub rooms: Rooms,
}

impl Host {
    /// Forgets a client that has disconnected, apart from what other clients still depend on.
    pub fn forget_client(&mut self, client: ClientId, tenant: &Tenant) {
        self.files.leave(client, tenant);
        self.moves.leave(client);
        self.sleep.leave(client);
        self.departures.forget(client);
    }

    /// Inspects a client's process, which another program may have locked or checkpointed.
    pub fn inspect(&mut self, model: &Model, client: ClientId) {
        self.foreign.inspect(model, &self.sleep, client);
    }

    /// Handles a measurement after which the state of a client's process may have changed.
    pub fn measured(&mut self, model: &Model, client: ClientId) {
        self.foreign.measured(model, &self.sleep, client);
    }

    /// Handles the result of an inspection. Returns the events for the scheduler.
    pub fn inspected(&mut self, model: &mut Model, client: ClientId, answer: &HelperAnswer) -> Vec<Event> {
        if answer.outcome == Outcome::Unknown {
            model.look_again(client);
        }
        self.foreign.inspected(model, &self.sleep, client, answer.outcome)
    }

    /// Handles a client that changes the CUDA state of the process to which the pidfd refers. Returns the
    /// request for room, if the client needs any.
    ///
    /// Without a free descriptor, the pidfd does not arrive, or cannot be read. The message is not answered
    /// then, because a restore would begin without room. The client sends it again.
    pub fn foreign_checkpoint(
        &mut self,
        model: &Model,
        client: ClientId,
        pidfd: Option<&Foreign>,
        (step, ticket): (CheckpointStep, u32),
    ) -> Option<Event> {
        let pid = pidfd::process(pidfd?).ok()?;
        let target = pid.and_then(|pid| model.neighbour(client, pid));
        self.foreign.receive(model, &self.sleep, client, target, (step, ticket))
    }
}
