//! Who may run, and whose memory is on the GPU: a pure state machine.
//!
//! `Machine::handle(now, Event) -> Vec<Command>`; `Machine::deadline()` says when it wants the next [`Event::Tick`].
//! No I/O, no clock, no async: the daemon feeds it real events, tests and simulations feed it made-up ones in virtual
//! time. The same events give the same commands.
//!
//! - [`api`]: the vocabulary: ids, [`Event`], [`Command`], [`Settings`].
//! - `machine`: the state, and which part of it an event goes to.
//! - `settle`: the steps that bring one GPU to rest after something changed there: memory first, then the lock.
//! - `memory`: how many bytes each client may have mapped on a GPU, and who gives bytes up.
//! - `lock`: who holds a GPU's lock, and who waits for it.
//! - `quota`: how much each client may allocate.
//! - `fairness`: in what order clients are served, and how much of the time each gets.
//! - `policy`: how long a turn lasts and how requests of one owner are ranked: first come first served, or by attained service.
//! - `placement`: which GPU a program gets that does not choose one.
//! - [`thrash`]: detects programs that push each other's memory off a GPU.
//! - `timers`: when to look at what again.
//! - [`view`]: a copy of the state for status and metrics.
//! - `encoding`: serde for types of `nvshare-wire` and for maps whose keys are not strings.

pub mod api;
mod effects;
mod encoding;
mod fairness;
mod lock;
mod machine;
mod memory;
mod placement;
mod policy;
mod quota;
mod rules;
mod settle;
pub mod thrash;
mod timers;
pub mod view;

pub use api::*;
pub use machine::Machine;
pub use view::{AttachmentView, ClientView, GpuView, HolderView, LockState, Turns, WaiterView};
