//! Settings from the environment, read once when the program initialises CUDA. In a setuid program,
//! none are set.
//!
//! | variable | meaning |
//! |---|---|
//! | `NVSHARE_DEBUG` | trace to stderr; `0` or empty means off, as for the other flags |
//! | `NVSHARE_DISABLE` | do nothing |
//! | `NVSHARE_REQUIRED` | without a scheduler, `cuInit` fails with `CUDA_ERROR_SYSTEM_NOT_READY` (802) |
//! | `NVSHARE_ENABLE_SINGLE_OVERSUB` | let one program exceed the GPU; implies engine `managed` |
//! | `NVSHARE_ENGINE` | `swap`, `managed` or `none` |
//! | `NVSHARE_SOCKET` | the scheduler's socket |
//! | `NVSHARE_GANG` | programs with the same text are one gang; `0` or empty: no gang (`launcher`, `lookup::nccl`) |
//! | `NVSHARE_MEMORY_MAX` | the most memory that the program can allocate on a GPU |
//! | `NVSHARE_MOVABLE_POOLS` | `0`: pools are left to the driver, and their memory does not move |
//! | `NVSHARE_WEIGHT` and others | further limits, interpreted by the scheduler (`limits`) |

use crate::{
    env::{amount::Amount, launcher, limits},
    sys::{c::environment, once::OnceBox},
};
use alloc::{boxed::Box, vec::Vec};
use core::ffi::CStr;
use nvshare_wire::{ClientMessage, client::Engine};

pub const DEFAULT_SOCKET: &[u8] = b"/run/nvshare/scheduler.sock";

#[derive(Debug)]
pub struct Settings {
    pub debug: bool,
    pub disabled: bool,
    pub required: bool,
    /// True if the user named this library in `LD_PRELOAD` for this program. The user then expects a line
    /// on stderr.
    pub asked_for: bool,
    pub oversubscribe: bool,
    /// The engine that the user requests, if any.
    pub engine: Option<Engine>,
    pub socket: &'static [u8],
    pub gang: u64,
    /// The user says that the program is in no gang.
    pub refuses_gangs: bool,
    pub memory_max: Option<Amount>,
    /// The limits of the environment, as messages to the scheduler.
    pub limits: Vec<ClientMessage>,
    /// Whether this library serves memory pools, so that their memory can move.
    pub movable_pools: bool,
    /// Whether compute-sanitizer has started the program, by the variables that it sets.
    pub has_sanitizer: bool,
    /// True if `NVSHARE_MEMORY_MAX` is set, but is not an amount.
    pub memory_max_is_unread: bool,
}

pub fn get() -> &'static Settings {
    static SETTINGS: OnceBox<Settings> = OnceBox::new();
    SETTINGS.get_or_init(|| Box::new(Settings::from_environment()))
}

impl Settings {
    fn from_environment() -> Self {
        let oversubscribe = flag(c"NVSHARE_ENABLE_SINGLE_OVERSUB");
        let engine = match environment(c"NVSHARE_ENGINE") {
            Some(b"swap") => Some(Engine::Swap),
            Some(b"managed") => Some(Engine::Managed),
            Some(b"none") => Some(Engine::None),
            _ => None,
        };
        let text = |name| environment(name).filter(|value| !value.is_empty());
        let memory_max = text(c"NVSHARE_MEMORY_MAX").map(Amount::parse);
        Self {
            debug: flag(c"NVSHARE_DEBUG"),
            disabled: flag(c"NVSHARE_DISABLE"),
            required: flag(c"NVSHARE_REQUIRED"),
            asked_for: environment(c"LD_PRELOAD").is_some_and(|list| list.windows(7).any(|part| part == b"nvshare")),
            oversubscribe,
            engine: if oversubscribe { Some(Engine::Managed) } else { engine },
            // A copy, because the environment may change while the program runs.
            socket: text(c"NVSHARE_SOCKET").map_or(DEFAULT_SOCKET, |path| path.to_vec().leak()),
            gang: launcher::gang(environment),
            refuses_gangs: launcher::refuses_gangs(environment),
            memory_max: memory_max.flatten(),
            memory_max_is_unread: memory_max == Some(None),
            limits: limits::read(),
            has_sanitizer: has_sanitizer(),
            movable_pools: environment(c"NVSHARE_MOVABLE_POOLS").is_none() || flag(c"NVSHARE_MOVABLE_POOLS"),
        }
    }
}

/// Whether the library must leave the program alone, even before the program initialises CUDA.
pub fn is_disabled() -> bool {
    flag(c"NVSHARE_DISABLE")
}

fn has_sanitizer() -> bool {
    let ports = [c"NV_SANITIZER_INJECTION_PORT_BASE", c"NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN"];
    let file = environment(c"CUDA_INJECTION64_PATH").and_then(|path| path.rsplit(|byte| *byte == b'/').next());
    ports.iter().any(|name| environment(name).is_some()) || file.is_some_and(|file| file.starts_with(b"libsanitizer-"))
}

/// Whether the variable is set, and neither empty nor `0`.
fn flag(name: &CStr) -> bool {
    environment(name).is_some_and(|value| !value.is_empty() && value != b"0")
}
