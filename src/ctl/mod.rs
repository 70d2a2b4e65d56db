//! What `nvsharectl` does, a file a command.
//!
//! - [`arguments`]: the command line.
//! - [`status`]: who uses which GPU, as a table or as JSON.
//! - [`rules`]: setting rules, and printing them.
//! - [`settings`]: reading and changing settings, reloading the configuration file.
//! - [`lock`]: running one command with a GPU's lock held.
//! - [`run`]: running one command under nvshare; [`place`]: the GPUs that it is to see.
//! - [`simulate`]: what the scheduler would do with a described mix of programs.
//! - [`debug`]: saving a debug bundle; [`replay`]: what one shows.
//! - [`preload`]: having every program of the machine load the library.
//! - [`cdi`]: bringing GPUs and nvshare into containers.
//! - `connect`: finding the scheduler. `password`: calls for which one may be asked. `errors`: what can go wrong, and the exit codes. `table`: aligned columns.

pub mod arguments;
pub mod cdi;
mod connect;
pub mod debug;
mod errors;
pub mod lock;
mod password;
pub mod place;
pub mod preload;
pub mod replay;
pub mod rules;
pub mod run;
pub mod settings;
pub mod simulate;
pub mod status;
mod table;

pub use connect::Target;
pub use errors::CtlError;

/// Runs what talks to the scheduler.
pub fn block_on<T>(work: impl Future<Output = Result<T, CtlError>>) -> Result<T, CtlError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    runtime.map_err(|e| CtlError::Failed(format!("cannot start: {e}")))?.block_on(work)
}
