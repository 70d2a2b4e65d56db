//! The primary contexts of devices.

use super::*;

fn primary(device: i32) -> Result<(usize, MutexGuard<'static, Primary>), Error> {
    let gpu = device::gpu(device)?;
    Ok((gpu, lock(&PRIMARIES[gpu])))
}

/// `cuDevicePrimaryCtxRetain`
pub fn retain_primary(context: *mut usize, device: i32) -> Done {
    if context.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    let (gpu, mut primary) = primary(device)?;
    if primary.context.is_none() {
        primary.context = Some(Context::new(gpu, primary.flags, 3020, Kind::Primary)?);
    }
    let handle = primary.context.as_ref().map_or(0, Context::handle);
    primary.references += 1;
    out(context, handle)
}

/// `cuDevicePrimaryCtxRelease`
pub fn release_primary(device: i32) -> Done {
    let (_, mut primary) = primary(device)?;
    if primary.references == 0 {
        return Err(Error::INVALID_CONTEXT);
    }
    primary.references -= 1;
    if primary.references == 0
        && let Some(context) = primary.context.take()
    {
        context.destroy();
    }
    Ok(())
}

/// `cuDevicePrimaryCtxReset`
pub fn reset_primary(device: i32) -> Done {
    let (_, mut primary) = primary(device)?;
    primary.references = 0;
    if let Some(context) = primary.context.take() {
        context.destroy();
    }
    Ok(())
}

/// `cuDevicePrimaryCtxSetFlags`
pub fn set_primary_flags(device: i32, flags: u32) -> Done {
    let (_, mut primary) = primary(device)?;
    primary.flags = flags;
    if let Some(context) = &primary.context {
        context.flags.store(flags, Ordering::Relaxed);
    }
    Ok(())
}

/// `cuDevicePrimaryCtxGetState`
pub fn primary_state(device: i32, flags: *mut u32, active: *mut i32) -> Done {
    let (_, primary) = primary(device)?;
    crate::out_if(flags, primary.flags);
    crate::out_if(active, i32::from(primary.context.is_some()));
    Ok(())
}
