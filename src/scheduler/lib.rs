//! Who may run, and whose memory is on the GPU: a pure state machine.
//!
//! `Machine::handle(now, Event) -> Vec<Command>`; `Machine::deadline()` says when it wants the next [`Event::Tick`].
//! No I/O, no clock, no async: the daemon feeds it real events, tests and simulations feed it made-up ones in virtual
//! time. The same events give the same commands.
//!
//! - [`api`]: the vocabulary: ids, [`Event`], [`Command`], [`Settings`].
//! - `machine`: the state, and which part of it an event goes to.
//! - `settle`: brings one GPU to rest after something changed there: bytes first, then the lock.
//! - `bytes`: giving bytes to clients and taking them back; over `memory::ledger`, which counts them.
//! - `doubt`: bytes that are gone by nothing but a client's word.
//! - `drains`: how long clients take to give a GPU back.
//! - `encoding`: serde for types of `nvshare-wire` and for maps whose keys are not strings.
//! - `gangs`: clients that run together or not at all.
//! - `groups`: clients that may together have no more than a rule says.
//! - `hopes`: wishes that are refused only after another measurement.
//! - `limits`: who is promised how much, as far as the memory of GPUs and host goes; over `promise`, which counts it.
//! - `locks`: requests, the line, grants, revokes, releases.
//! - `newcomers`: those who are about to create a context.
//! - `order`: who stands before whom: users first, then their clients.
//! - `own`: what clients say themselves that they may have.
//! - `patience`: those who do not answer: stuck, undrainable, stopped, slow.
//! - `placement`: which GPU a program gets that does not choose one.
//! - `policy`: all judgement: how long a turn lasts, who stands before whom.
//! - `rivals`: gangs that are in each other's way.
//! - `shares`: parts of a GPU's time that rules give; over `usage`, which counts it.
//! - `shortfall`: mappings that fail, and what follows from that.
//! - `squeeze`: room for what the driver takes for itself.
//! - `stays`: memory that cannot leave its GPU for a while.
//! - [`thrash`]: tells when clients that run at the same moment push each other's memory off a GPU.
//! - `timers`: when to look at what again.
//! - `together`: clients that run at the same moment.
//! - `traffic`: what follows from memory that is seen to move.
//! - [`view`]: what status shows.
//! - `weigh`: what everybody's limit is to be.
//! - `wishes`: allocations that wait for a higher limit.

pub mod api;
mod bytes;
mod doubt;
mod drains;
mod encoding;
mod gangs;
mod groups;
mod hopes;
mod limits;
mod locks;
mod machine;
mod memory;
mod newcomers;
mod order;
mod own;
mod patience;
mod placement;
mod policy;
mod promise;
mod rivals;
mod settle;
mod shares;
mod shortfall;
mod squeeze;
mod stays;
pub mod thrash;
mod timers;
mod together;
mod traffic;
mod usage;
pub mod view;
mod weigh;
mod wishes;

pub use api::*;
pub use machine::Machine;
pub use view::{ClientView, GpuView, HolderView, LockState, SeatView, Turns, WaiterView};
