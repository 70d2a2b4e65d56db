//! The properties of a GPU, queried once, before the program has a context there.

use super::identity::Identity;
use crate::{
    driver::{self, library::Library, types::*},
    env::{settings, trace::trace},
    memory::engine::{self, Engine},
};
use nvshare_wire::{Text, Uuid, client as wire};

/// The library that compute-sanitizer injects into programs.
static SANITIZER: Library = Library::new(c"libsanitizer-collection.so");

#[derive(Debug)]
pub struct Info {
    pub identity: Identity,
    pub name: Text<64>,
    pub total: u64,
    pub engine: Option<Engine>,
    pub reason: wire::EngineReason,
    /// The limit set by the program's environment; `u64::MAX` for none.
    pub env_max: u64,
}

impl Info {
    pub fn engine_kind(&self) -> wire::Engine {
        self.engine.map_or(wire::Engine::None, |engine| engine.kind())
    }

    /// Queries the driver for the properties. Needs no context.
    pub fn learn(device: CUdevice) -> Self {
        let (mut name, mut total) = ([0u8; 64], 0);
        // SAFETY: the buffers outlive the calls and have the stated sizes.
        unsafe {
            driver::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32 - 1, device);
            driver::cuDeviceTotalMem_v2(&mut total, device);
        }
        let settings = settings::get();
        let has_sanitizer = || settings.has_sanitizer || SANITIZER.handle_if_loaded().is_some();
        let (engine, reason) = match engine::choose(device, settings.engine) {
            // The sanitizer finds accesses beyond the end of an allocation only if it has seen the allocation
            // with its exact size.
            _ if settings.engine.is_none() && has_sanitizer() => (None, wire::EngineReason::Sanitizer),
            (engine, wire::EngineReason::Asked) if settings.oversubscribe => {
                (engine, wire::EngineReason::Oversubscription)
            }
            chosen => chosen,
        };
        let end = name.iter().position(|b| *b == 0).unwrap_or(0);
        let info = Self {
            identity: Identity::new(Uuid(driver::uuid(device).unwrap_or_default())),
            name: Text::new(core::str::from_utf8(name.get(..end).unwrap_or(&[])).unwrap_or("")),
            total: total as u64,
            engine,
            reason,
            env_max: settings.memory_max.map_or(u64::MAX, |amount| amount.of(total as u64)),
        };
        trace!("GPU {device}: {}, {total} bytes, engine {:?} ({reason:?})", info.identity.get(), info.engine_kind());
        info
    }
}
