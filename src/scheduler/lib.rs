//! Decides which clients run on which GPU, and which clients' memory is on each GPU. The crate is a
//! pure state machine.
//!
//! `Machine::handle(now, Event) -> Vec<Command>` handles one event. `Machine::deadline()` returns
//! the time of the next [`Event::Tick`]. The crate performs no I/O, reads no clock and uses no
//! async. The daemon passes real events; tests and simulations pass invented events in virtual
//! time. The same events produce the same commands.
//!
//! - [`api`]: ids, [`Event`], [`Command`] and [`Settings`].
//! - `machine`: the state, the dispatch of events to components, and the ordered steps that update
//!   one GPU after a change: memory first, then the lock.
//! - `sharing`: grants and releases of locks, and the memory for them.
//! - `requests`: where a request waits, from its arrival to its grant.
//! - `presence`: what follows from a change of a client's sleep.
//! - `model`: decisions that read several components.
//! - `gpu`: the clients that have attached a GPU, the memory that each client may have mapped
//!   there, and the holders of the lock.
//! - `queue`: the queue of requests for each GPU's lock.
//! - `quota`: how much each client may allocate.
//! - `fairness`: the order in which clients are served, and each client's share of GPU time.
//! - `policy`: the length of turns, and the order of one owner's requests, either first come, first
//!   served or least attained service.
//! - `placement`: the choice of a GPU for programs that do not choose one.
//! - `sleep`: the clients that are off their GPUs, and each client's progress on its way off or
//!   back.
//! - `client`: records of a client that do not depend on a GPU.
//! - `entity`: the unit of queueing and granting: a client or a gang.
//! - `rules`: the limits that rules and environments set for each client.
//! - `effects`: commands, GPUs to settle and wake-ups that follow from a decision.
//! - `timers`: wake-ups, one per reason.
//! - [`view`]: types for status and metrics.
//! - [`explain`]: why a client does not run, and when it is expected to.
//! - `encoding`: serde for maps whose keys are not strings.

pub mod api;
mod client;
mod effects;
mod encoding;
mod entity;
pub mod explain;
mod fairness;
mod gpu;
mod machine;
mod model;
mod placement;
mod policy;
mod presence;
mod queue;
mod quota;
mod requests;
mod rules;
mod sharing;
mod sleep;
mod timers;
pub mod view;

pub use api::*;
pub use explain::{Ahead, Explanation, HolderAhead, Obstacle, Reason};
pub use machine::Machine;
pub use model::standstill::Standstill;
pub use view::{Activity, AttachmentView, ClientView, GpuView, HolderView, LockState, RoomView, Turns, WaiterView};
