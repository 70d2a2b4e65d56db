//! Limits of GPU memory that the driver itself enforces, for whole control groups (NVIDIA's r615 and later): what rules
//! allow also holds for programs that do not load the library, or get around it.
//!
//! - `wanted`: what is to be set for whom; no more than a calculation.
//! - `call`: the driver, by NVML's function for it.
//! - `keeper`: brings what the driver has to what is wanted, in the thread that talks to NVML.
//! - `left`: what was set, in a file, so that a daemon that was killed leaves nothing behind for good.

mod call;
mod keeper;
mod left;
mod wanted;

pub use call::{Call, Driver, Refusal};
pub use keeper::Keeper;
pub use left::are_left;
pub use wanted::{Gpu, Program, Wanted, wanted};
