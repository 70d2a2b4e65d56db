//! Which client a command or an event concerns.

use nvshare_sched::*;

/// The client that is told, if any is.
pub fn addressee(command: &Command) -> Option<ClientId> {
    match command {
        Command::Measure { .. } | Command::Thrashing { .. } => None,
        Command::Attached { client, .. }
        | Command::MappingFailed { client, .. }
        | Command::Limit { client, .. }
        | Command::Denied { client, .. }
        | Command::Allowance { client, .. }
        | Command::Grant { client, .. }
        | Command::Revoke { client, .. }
        | Command::Contended { client, .. }
        | Command::Waiting { client, .. }
        | Command::Undrainable { client, .. }
        | Command::EvictionBlocked { client, .. }
        | Command::Reserved { client, .. }
        | Command::Prepare { client, .. }
        | Command::Probe { client }
        | Command::Placed { client, .. }
        | Command::Unplaced { client, .. } => Some(*client),
    }
}

pub(crate) fn event_of(event: &Event) -> Option<ClientId> {
    match event {
        Event::Connected { client, .. }
        | Event::Disconnected { client }
        | Event::EnvLimits { client, .. }
        | Event::Attached { client, .. }
        | Event::Detached { client, .. }
        | Event::Memory { client, .. }
        | Event::LimitRequested { client, .. }
        | Event::ReservationRequested { client, .. }
        | Event::Utilization { client, .. }
        | Event::Held { client, .. }
        | Event::Requested { client, .. }
        | Event::Cancelled { client, .. }
        | Event::Released { client, .. }
        | Event::Stuck { client, .. }
        | Event::Stopped { client, .. }
        | Event::PlacementRequested { client, .. }
        | Event::PlacementTaken { client, .. } => Some(*client),
        Event::Groups { groups } => groups.keys().next().copied(),
        Event::Labels { labels } => labels.keys().next().copied(),
        Event::Tick
        | Event::Configure(_)
        | Event::GpuFound { .. }
        | Event::GpuLink { .. }
        | Event::ContextSizes { .. }
        | Event::GpuOverhead { .. }
        | Event::Measured { .. }
        | Event::Traffic { .. }
        | Event::HostMemory { .. } => None,
    }
}
