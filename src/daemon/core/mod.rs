//! The scheduler's state machine and the state that its decisions depend on, all on one thread.
//! When a call returns, the resulting messages have been sent to all clients concerned.
//!
//! - `state`: [`Core`], which owns everything; `dispatch`: passes events to the state machine and
//!   carries out its commands.
//! - `clients`: clients connect, send messages and disconnect.
//! - `unproven`: programs that were refused for lack of a GPU's device file.
//! - `rules`: the rules of clients; `placement`: the GPUs that clients may see.
//! - `sharing`: passes messages about shared memory; [`shared_memory`]: the registry of that memory.
//! - [`pods`] and [`claims`]: names and rules from Kubernetes.
//! - `gpus`: GPUs that appear and disappear; `measure`: measurements of GPU and host memory.
//! - `event_log` and `refusals`: log lines; `counts`: counters; `metrics`: the figures derived from the
//!   counters.
//! - `units`: limits the number of units of a tenant.
//! - `usage`: usage of tenants, units and containers, for the records on disk.
//! - `hours`: GPU time of programs whose rules have `gpu-hours`.
//! - `lock_files`: files that clients lock while no scheduler runs.
//! - `pressure`: the share of time for which clients are stalled on GPUs.
//! - `sleep`: suspend of the host, and sleep of programs; `moves`: moves of programs between GPUs.
//! - `paused`: the paused processes; `saved`: orders that outlive the daemon.
//! - `swap_files`: the RAM and the swap file space of each client.
//! - `rooms`: memory that is kept free for programs that are not clients.
//! - `explain`: sentences about why a program does not run; `timeline`: the flight recorder's timeline
//!   for one user.
//! - [`View`] (`view`): a copy of the state, for all readers; [`views`]: the parts that D-Bus shows;
//!   [`bundle`]: debug bundles.

pub mod bundle;
pub mod claims;
mod clients;
mod counts;
mod dispatch;
mod event_log;
mod explain;
mod gpus;
mod hours;
mod lock_files;
mod measure;
mod metrics;
mod moves;
mod paused;
mod placement;
pub mod pods;
mod pressure;
mod refusals;
mod rooms;
mod rules;
mod saved;
mod shared_memory;
mod sharing;
mod sleep;
mod state;
mod swap_files;
pub mod timeline;
mod units;
mod unproven;
mod usage;
mod view;
pub mod views;

pub use clients::MAX_DEVICES;
pub use gpus::Present;
pub use measure::EXIT_TIME;
pub use rooms::{PendingRoom, RoomRequest};
pub use saved::Saving;
pub use sleep::{Checkpoint, CheckpointRequest};
pub use state::{Arrival, Core, LockFiles, SAMPLE_QUIET};
pub use view::View;
