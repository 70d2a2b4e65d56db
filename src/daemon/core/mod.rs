//! The scheduler's state machine and the state that its decisions depend on, all on one thread.
//! When a call returns, the resulting messages have been sent to all clients concerned.
//!
//! `routing` is [`Core`], which consists of five components. It passes each event to the component that
//! owns the matter, and it alone changes several of them.
//!
//! - `model`: the state machine, and the records of clients and GPUs. `clients`, `gpus`, `measure`, `rules`
//!   and `gangs` change it. `groups`: the groups that rules define. `hours`: the GPU time of programs whose
//!   rules have `gpu-hours`. `settings`: the configuration's settings, adapted to the driver.
//! - `io`: the timer, and the signals and values for other tasks.
//! - `observe`: reads the model, and changes no other component. `log`, `event_log` and `refusals`: log lines;
//!   `counts`: counters; `usage`: usage of tenants, units
//!   and containers, for the records on disk; `pressure`: the share of time for which clients are stalled
//!   on GPUs; `unproven`: programs that were refused for lack of a GPU's device file; `recording`: the host
//!   and the processes, as recordings and bundles describe them.
//! - `host`: what the daemon manages for programs and users. `host_use`: figures of host memory;
//!   `swap_files`: the RAM and the swap file space of each client; `sharing`: messages about shared memory,
//!   and `shared_memory`, the registry of that memory; `placement`: the GPUs that clients may see;
//!   `sleep`: suspend of the host, and sleep of programs; `hibernation`: clients that leave, so that their
//!   processes can be saved to disk; `paused`: the paused processes; `foreign`: processes
//!   that other programs checkpoint; `moves`: moves of programs between GPUs; `other_hosts`: moves of
//!   programs from the GPUs of another host; `rooms`: memory that is kept free for programs that are not clients.
//! - `containers`: [`pods`] and [`claims`], names and rules from Kubernetes; `units` limits the number of
//!   units of a tenant; `lock_files`: files that clients lock while no scheduler runs.
//!
//! [`View`] (`view`) is a copy of the state, for all readers. `views`: the parts that D-Bus shows;
//! `explain`: sentences about why a program does not run; [`describe`]: what pages show; [`timeline`]: the flight recorder's timeline for
//! one user; [`bundle`]: debug bundles.

pub mod bundle;
pub mod claims;
mod clients;
mod containers;
mod counts;
pub mod describe;
mod event_log;
mod explain;
mod foreign;
mod gangs;
mod gpus;
mod groups;
mod hibernation;
mod host;
mod host_use;
mod hours;
mod io;
mod lock_files;
mod log;
mod measure;
mod model;
mod moves;
mod observe;
mod other_hosts;
mod paused;
mod placement;
pub mod pods;
mod pressure;
mod recording;
mod refusals;
mod rooms;
mod routing;
mod rules;
mod settings;
mod shared_memory;
mod sharing;
mod sleep;
mod swap_files;
pub mod timeline;
mod units;
mod unproven;
mod usage;
mod view;
mod views;

pub use clients::MAX_DEVICES;
pub use counts::{Counted, Waits, Workload, container_name};
pub use hibernation::{ABSENCE, Candidate, Departure};
pub use io::{Published, SAMPLE_QUIET, replace};
pub use measure::EXIT_TIME;
pub use model::{Arrival, Holders, LockFiles, NamedGpu};
pub use placement::may_lock;
pub use pressure::GroupStall;
pub use rooms::{PendingRoom, RoomRequest, check as check_room};
pub use routing::Core;
pub use sleep::{Checkpoint, CheckpointRequest};
pub use view::{ClientView, View};
