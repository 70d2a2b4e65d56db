//! What the environment says, read once when the program initialises CUDA. A setuid program has no such environment.
//!
//! | variable | meaning |
//! |---|---|
//! | `NVSHARE_DEBUG` | trace to stderr; `0` or empty means off, as for the others |
//! | `NVSHARE_DISABLE` | do nothing |
//! | `NVSHARE_REQUIRED` | without a scheduler, `cuInit` fails with `CUDA_ERROR_SYSTEM_NOT_READY` (802) |
//! | `NVSHARE_ENABLE_SINGLE_OVERSUB` | let one program exceed the GPU; implies engine `managed` |
//! | `NVSHARE_ENGINE` | `swap`, `managed` or `none` |
//! | `NVSHARE_SOCKET` | the scheduler's socket |
//! | `NVSHARE_GANG` | programs with the same text are one gang; `0` or empty: they are in none (`launcher`) |
//! | `NVSHARE_MEMORY_MAX` | the most memory that the program can allocate on a GPU |
//! | `NVSHARE_WEIGHT` and others | what it may have besides, for the scheduler to read (`limits`) |

use crate::{
    env::{amount::Amount, launcher, limits::EnvLimits},
    sys::{c::environment, sync::OnceLock},
};
use core::ffi::CStr;
use nvshare_wire::client::Engine;

pub const DEFAULT_SOCKET: &[u8] = b"/run/nvshare/scheduler.sock";

#[derive(Debug)]
pub struct Settings {
    pub debug: bool,
    pub disabled: bool,
    pub required: bool,
    /// Somebody wants nvshare for this very program, so a word to them is welcome: it was named in `LD_PRELOAD`.
    pub asked_for: bool,
    pub oversubscribe: bool,
    /// The engine asked for, where one was.
    pub engine: Option<Engine>,
    pub socket: &'static [u8],
    pub gang: u64,
    pub memory_max: Option<Amount>,
    /// What the program may have, as it is said to a scheduler.
    pub limits: EnvLimits,
    /// That says something which is no amount.
    pub memory_max_is_unread: bool,
}

pub fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(Settings::from_environment)
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
            // The environment may change while the program runs.
            socket: text(c"NVSHARE_SOCKET").map_or(DEFAULT_SOCKET, |path| path.to_vec().leak()),
            gang: launcher::gang(environment),
            memory_max: memory_max.flatten(),
            memory_max_is_unread: memory_max == Some(None),
            limits: EnvLimits::read(),
        }
    }
}

/// Set, and neither empty nor `0`.
fn flag(name: &CStr) -> bool {
    environment(name).is_some_and(|value| !value.is_empty() && value != b"0")
}
