//! What the environment says, read once when the program initialises CUDA.
//!
//! | variable | meaning |
//! |---|---|
//! | `NVSHARE_DEBUG` | trace to stderr; `0` or empty means off, as for the others |
//! | `NVSHARE_DISABLE` | do nothing |
//! | `NVSHARE_ENABLE_SINGLE_OVERSUB` | let one program exceed the GPU; implies engine `managed` |
//! | `NVSHARE_ENGINE` | `swap`, `managed` or `none` |
//! | `NVSHARE_SOCKET` | the scheduler's socket |
//! | `NVSHARE_GANG` | programs with the same text are one gang |

use nvshare_wire::client::Engine;
use std::{env, sync::OnceLock};

pub const DEFAULT_SOCKET: &str = "/run/nvshare/scheduler.sock";

#[derive(Debug)]
pub struct Settings {
    pub debug: bool,
    pub disabled: bool,
    /// Somebody wants nvshare for this very program, so a word to them is welcome: it was named in `LD_PRELOAD`.
    pub asked_for: bool,
    pub oversubscribe: bool,
    /// The engine asked for, where one was.
    pub engine: Option<Engine>,
    pub socket: std::path::PathBuf,
    pub gang: u64,
}

pub fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(Settings::from_environment)
}

impl Settings {
    fn from_environment() -> Self {
        let oversubscribe = flag("NVSHARE_ENABLE_SINGLE_OVERSUB");
        let engine = match env::var("NVSHARE_ENGINE").as_deref() {
            Ok("swap") => Some(Engine::Swap),
            Ok("managed") => Some(Engine::Managed),
            Ok("none") => Some(Engine::None),
            _ => None,
        };
        Self {
            debug: flag("NVSHARE_DEBUG"),
            disabled: flag("NVSHARE_DISABLE"),
            asked_for: env::var_os("LD_PRELOAD").is_some_and(|l| l.to_string_lossy().contains("nvshare")),
            oversubscribe,
            engine: if oversubscribe { Some(Engine::Managed) } else { engine },
            socket: env::var_os("NVSHARE_SOCKET").filter(|s| !s.is_empty()).unwrap_or(DEFAULT_SOCKET.into()).into(),
            gang: env::var_os("NVSHARE_GANG").filter(|s| !s.is_empty()).map_or(0, |s| hash(s.as_encoded_bytes())),
        }
    }
}

/// Set, and neither empty nor `0`.
fn flag(name: &str) -> bool {
    env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0")
}

/// FNV-1a: the same key for the same text in every process; never 0, which means none.
fn hash(bytes: &[u8]) -> u64 {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    hash.max(1)
}
