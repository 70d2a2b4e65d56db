//! The commands of `nvsharectl`, one file each.
//!
//! - [`arguments`]: the command line.
//! - [`status`]: GPUs and programs as a table. `beside`: programs that use a GPU without nvshare.
//! - [`top`]: GPUs and programs on the whole terminal.
//! - [`rules`]: setting and printing rules.
//! - [`settings`]: reading and changing settings, reloading the configuration file.
//! - [`driver`]: making the scheduler release the driver.
//! - [`pressure`]: the fraction of time in which programs were kept from GPUs.
//! - [`why`]: the reasons why a program waits.
//! - [`report`]: GPU usage of users, units and containers.
//! - [`pause`]: pausing and resuming programs.
//! - [`hibernate`]: saving programs to disk, restoring and listing them.
//! - [`moves`]: moving programs to other GPUs.
//! - [`lock`]: running a command while holding a GPU's lock.
//! - [`room`]: keeping memory of a GPU free.
//! - [`games`]: keeping memory of a GPU free while games run.
//! - [`run`]: running a command under nvshare.
//! - [`place`]: choosing the GPUs that the command sees.
//! - `run_progress`: showing why the command waits for its first turn.
//! - [`simulate`]: simulating a described mix of programs under each policy.
//! - [`debug`]: saving a debug bundle.
//! - [`replay`]: analysing a debug bundle.
//! - [`timeline`]: drawing a timeline.
//! - `send`: moving a program to another host. `all`, `shutdown`: saving all programs, and restoring them.
//! - [`adopt`]: making a service share GPUs, with a rule for a server.
//! - [`preload`]: loading the library into every program of the machine.
//! - [`cdi`]: GPUs and nvshare in containers.
//! - `connect`: finding the scheduler. `password`: calls for which polkit may ask for a password.
//!   `errors`: errors and exit codes. `systemd`: asking systemd about services. `table`: aligned
//!   columns. `program_state`: a program's state in few words. `progress`: the progress of long
//!   operations.

pub mod adopt;
mod all;
pub mod arguments;
mod beside;
#[cfg(feature = "cdi")]
pub mod cdi;
mod connect;
pub mod debug;
pub mod driver;
mod errors;
pub mod games;
pub mod hibernate;
pub mod lock;
pub mod moves;
mod password;
pub mod pause;
pub mod place;
pub mod preload;
pub mod pressure;
mod program_state;
mod progress;
pub mod replay;
pub mod report;
pub mod room;
pub mod rules;
pub mod run;
mod run_progress;
mod send;
pub mod settings;
mod shutdown;
pub mod simulate;
pub mod status;
mod systemd;
mod table;
pub mod timeline;
#[cfg(feature = "top")]
pub mod top;
pub mod why;

pub use connect::Target;
pub use errors::CtlError;

/// Runs a future that talks to the scheduler.
pub fn block_on<T>(work: impl Future<Output = Result<T, CtlError>>) -> Result<T, CtlError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    runtime.map_err(|e| CtlError::Failed(format!("cannot start: {e}")))?.block_on(work)
}

/// Awaits optional work. Never returns if there is none, so that a `select!` waits for its other branches.
async fn or_never<T>(work: Option<impl Future<Output = T>>) -> T {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}
