//! Holds memory and shares a part of it, like programs whose memory other devices or processes use.

use super::{Outcome, expect, info::FABRIC_HANDLES};
use crate::{
    args::Args,
    cuda::{
        Buffer, Gpu, Kind, api, cu,
        late::{MulticastProperties, late_cu},
    },
    report::Report,
    signal,
};
use std::{os::fd::FromRawFd, os::fd::OwnedFd, time::Duration};

const P2P_TOKENS: u32 = 5;
const SYNC_MEMOPS: u32 = 6;
const DMA_BUF: u32 = 1;
const DESCRIPTOR: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`
const FABRIC: u32 = 8;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, beside) = (args.size("mem", "16M") as usize, args.size("beside", "32M"));
    let kind = Kind::parse(args.text("kind", "alloc")).ok_or("--kind: want alloc or vmm")?;
    let gpu = Gpu::open(0)?;
    // The other memory is split into several buffers, so that it can be evicted.
    let others = (0..4).map(|_| Buffer::new(Kind::Alloc, beside as usize / 4)).collect::<Result<Vec<_>, _>>()?;
    let mut descriptor = -1;
    let (at, owner) = match args.text("how", "none") {
        how @ ("export" | "bind" | "bind-address" | "offered") => (give_whole(memory, how, &mut descriptor)?, None),
        how => {
            let buffer = Buffer::new(kind, memory)?;
            match how {
                "sync" => late_cu!(cuPointerSetAttribute(&1, SYNC_MEMOPS, buffer.at))?,
                "sync-and-clear" => {
                    late_cu!(cuPointerSetAttribute(&1, SYNC_MEMOPS, buffer.at))?;
                    late_cu!(cuPointerSetAttribute(&0, SYNC_MEMOPS, buffer.at))?;
                }
                "tokens" => late_cu!(cuPointerGetAttribute([0_u64; 2].as_mut_ptr(), P2P_TOKENS, buffer.at))?,
                "token-list" => {
                    let mut tokens = [0_u64; 2];
                    late_cu!(cuPointerGetAttributes(1, &P2P_TOKENS, &tokens.as_mut_ptr(), buffer.at))?
                }
                "range" => late_cu!(cuMemGetHandleForAddressRange(&mut descriptor, buffer.at, memory, DMA_BUF, 0))?,
                "graphics" => {
                    let mut resource = 0;
                    late_cu!(cuGraphicsGLRegisterBuffer(&mut resource, 1, 0))?;
                    late_cu!(cuImportExternalSemaphore(&mut resource, [0_u8; 128].as_ptr()))?;
                }
                _ => {}
            }
            (buffer.at, Some(buffer))
        }
    };
    // SAFETY: the driver has returned the descriptor to this program, so no other value owns it.
    let _descriptor = (descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) });
    let count = memory as u64 / 4;
    gpu.fill(at, count, 5, 0)?;
    others.iter().try_for_each(|other| gpu.fill(other.at, other.count(), 6, 0))?;
    gpu.synchronise()?;
    eprintln!("holding");
    signal::pause(Duration::from_secs_f64(args.number("seconds", "5")));
    expect("sum", gpu.sum(at, count)?, count * 5)?;
    for other in others {
        expect("sum beside", gpu.sum(other.at, other.count())?, other.count() * 6)?;
        other.free()?;
    }
    owner.map_or(Ok(()), Buffer::free)?;
    report.integer("mem", memory as u64);
    Ok(())
}

/// Allocates memory and exports it, or binds it to a multicast object, by its handle or its address.
/// `offered` allocates memory that could be exported by the handle that the driver offers, with a
/// preference for FABRIC, like PyTorch's expandable segments.
fn give_whole(len: usize, how: &str, descriptor: &mut i32) -> crate::cuda::Result<u64> {
    let location = api::Location { kind: 1, id: 0 };
    let (mut at, mut handle) = (0, 0);
    let mut has_fabric = 0;
    late_cu!(cuDeviceGetAttribute(&mut has_fabric, FABRIC_HANDLES, 0))?;
    let handle_types = if how == "offered" && has_fabric == 1 { FABRIC } else { DESCRIPTOR };
    let properties = api::Properties { kind: 1, handle_types, location, ..Default::default() };
    cu!(cuMemCreate(&mut handle, len, &properties, 0))?;
    cu!(cuMemAddressReserve(&mut at, len, 0, 0, 0))?;
    cu!(cuMemMap(at, len, 0, handle, 0))?;
    cu!(cuMemSetAccess(at, len, &api::Access { location, flags: 3 }, 1))?;
    let mut object = 0;
    if how.starts_with("bind") {
        let properties = MulticastProperties { devices: 1, size: len, ..MulticastProperties::default() };
        late_cu!(cuMulticastCreate(&mut object, &properties))?;
        late_cu!(cuMulticastAddDevice(object, 0))?;
    }
    match how {
        "bind" => late_cu!(cuMulticastBindMem(object, 0, handle, 0, len, 0))?,
        "bind-address" => late_cu!(cuMulticastBindAddr(object, 0, at, len, 0))?,
        "offered" => {}
        _ => late_cu!(cuMemExportToShareableHandle(descriptor, handle, DESCRIPTOR, 0))?,
    }
    cu!(cuMemRelease(handle))?;
    Ok(at)
}
