//! Parameters of nodes, as programs pass and read them.

use super::*;

/// `CUDA_KERNEL_NODE_PARAMS`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelParams {
    pub(super) function: usize,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared: u32,
    pub(super) params: *const *const u8,
    pub(super) extra: *const usize,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelParams2 {
    pub(super) plain: KernelParams,
    pub(super) kernel: usize,
    pub(super) context: usize,
}

impl KernelParams {
    pub(super) fn work(&self) -> Result<Work, Error> {
        let shape = Shape { function: self.function, grid: self.grid, block: self.block, shared: self.shared };
        launch::prepare(shape, self.params, self.extra).map(Work::Kernel)
    }
}

impl KernelParams2 {
    pub(super) fn work(&self) -> Result<Work, Error> {
        let function = if self.plain.function != 0 { self.plain.function } else { self.kernel };
        KernelParams { function, ..self.plain }.work()
    }
}

/// `CUDA_MEMSET_NODE_PARAMS`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FillParams {
    pub(super) at: u64,
    pub(super) pitch: usize,
    pub(super) value: u32,
    pub(super) size: u32,
    pub(super) width: usize,
    pub(super) height: usize,
}

impl FillParams {
    pub(super) fn work(&self) -> Result<Work, Error> {
        if !matches!(self.size, 1 | 2 | 4) || self.height == 0 {
            return Err(Error::INVALID_VALUE);
        }
        Ok(Work::Fill(Fill {
            at: self.at,
            pitch: self.pitch as u64,
            value: self.value,
            size: self.size.into(),
            width: self.width as u64,
            height: self.height as u64,
        }))
    }
}

/// `CUDA_HOST_NODE_PARAMS`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HostParams {
    pub(super) call: Option<HostFn>,
    pub(super) data: usize,
}
