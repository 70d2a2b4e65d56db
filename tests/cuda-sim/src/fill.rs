//! Fills: all `cuMemset*` calls.

use crate::{
    context::{self, Context},
    error::{Done, Error},
    managed,
    memory::{self, PIECE, Touch, space},
    stream::{self, Flavour},
    work::Work,
};
use cuda_sim_gpus::{Config, Engine, EngineKind};
use std::time::Duration;

/// Rows of one repeated value.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    pub at: u64,
    pub pitch: u64,
    pub value: u32,
    /// Bytes of the value: 1, 2 or 4.
    pub size: u64,
    /// Values in a row.
    pub width: u64,
    pub height: u64,
}

impl Fill {
    pub fn run(&self, context: &Context) -> Done {
        let row = self.width * self.size;
        if self.height > 1 && self.pitch == row {
            return self.line(context, self.at, row * self.height);
        }
        (0..self.height).try_for_each(|y| self.line(context, self.at + y * self.pitch, row))
    }

    fn line(&self, context: &Context, at: u64, len: u64) -> Done {
        let bandwidth = Config::get().gpu_bandwidth;
        let step = (bandwidth / 500).clamp(64 << 10, PIECE) & !4095;
        let mut done = 0;
        while done < len {
            context.error()?;
            let piece = step.min(len - done);
            managed::fault(at + done, piece, context.gpu);
            let cost = Duration::from_nanos((u128::from(piece) * 1_000_000_000 / u128::from(bandwidth)) as u64);
            let touch = Touch { gpu: context.gpu, write: true, copy: true };
            Engine::get(context.gpu, EngineKind::Compute)
                .run(cost, || memory::touch(at + done, piece, touch, |run, len| self.write(run, len)))?;
            done += piece;
        }
        Ok(())
    }

    fn write(&self, to: *mut u8, len: u64) {
        let count = (len / self.size) as usize;
        // SAFETY: `to` has `len` writable bytes while the table is locked, and has the alignment of the
        // address.
        unsafe {
            match self.size {
                1 => to.write_bytes(self.value as u8, count),
                2 => (0..count).for_each(|i| to.cast::<u16>().add(i).write(self.value as u16)),
                _ => (0..count).for_each(|i| to.cast::<u32>().add(i).write(self.value)),
            }
        }
    }

    /// Checks the fill against the current mappings.
    pub fn check(&self, context: &Context) -> Done {
        if !self.at.is_multiple_of(self.size)
            || (self.height > 1 && (!self.pitch.is_multiple_of(self.size) || self.pitch < self.width * self.size))
        {
            return Err(Error::INVALID_VALUE);
        }
        let last = (self.height - 1) * self.pitch + self.width * self.size;
        let touch = Touch { gpu: context.gpu, write: true, copy: true };
        space().runs(self.at, last, touch).map(drop).map_err(|_| Error::INVALID_VALUE)
    }
}

fn submit(flavour: Flavour, fill: Fill, stream: usize) -> Done {
    context::healthy()?;
    let stream = stream::of(stream, flavour)?;
    if fill.width == 0 || fill.height == 0 {
        return Ok(());
    }
    fill.check(&stream.context)?;
    stream.submit(Work::Fill(fill)).map(drop)
}

fn row(at: u64, value: u32, size: u64, count: usize) -> Fill {
    Fill { at, pitch: 0, value, size, width: count as u64, height: 1 }
}

fn rows(at: u64, pitch: usize, value: u32, size: u64, width: usize, height: usize) -> Fill {
    Fill { at, pitch: pitch as u64, value, size, width: width as u64, height: height as u64 }
}

/// `cuMemsetD8`. The related calls follow. Fills are asynchronous, as on a GPU.
pub fn d8(flavour: Flavour, at: u64, value: u8, count: usize) -> Done {
    submit(flavour, row(at, value.into(), 1, count), 0)
}

pub fn d16(flavour: Flavour, at: u64, value: u16, count: usize) -> Done {
    submit(flavour, row(at, value.into(), 2, count), 0)
}

pub fn d32(flavour: Flavour, at: u64, value: u32, count: usize) -> Done {
    submit(flavour, row(at, value, 4, count), 0)
}

pub fn d8_async(flavour: Flavour, at: u64, value: u8, count: usize, stream: usize) -> Done {
    submit(flavour, row(at, value.into(), 1, count), stream)
}

pub fn d16_async(flavour: Flavour, at: u64, value: u16, count: usize, stream: usize) -> Done {
    submit(flavour, row(at, value.into(), 2, count), stream)
}

pub fn d32_async(flavour: Flavour, at: u64, value: u32, count: usize, stream: usize) -> Done {
    submit(flavour, row(at, value, 4, count), stream)
}

pub fn d2_d8(flavour: Flavour, at: u64, pitch: usize, value: u8, width: usize, height: usize) -> Done {
    submit(flavour, rows(at, pitch, value.into(), 1, width, height), 0)
}

pub fn d2_d16(flavour: Flavour, at: u64, pitch: usize, value: u16, width: usize, height: usize) -> Done {
    submit(flavour, rows(at, pitch, value.into(), 2, width, height), 0)
}

pub fn d2_d32(flavour: Flavour, at: u64, pitch: usize, value: u32, width: usize, height: usize) -> Done {
    submit(flavour, rows(at, pitch, value, 4, width, height), 0)
}

pub fn d2_d8_async(
    flavour: Flavour,
    at: u64,
    pitch: usize,
    value: u8,
    width: usize,
    height: usize,
    stream: usize,
) -> Done {
    submit(flavour, rows(at, pitch, value.into(), 1, width, height), stream)
}

pub fn d2_d16_async(
    flavour: Flavour,
    at: u64,
    pitch: usize,
    value: u16,
    width: usize,
    height: usize,
    stream: usize,
) -> Done {
    submit(flavour, rows(at, pitch, value.into(), 2, width, height), stream)
}

pub fn d2_d32_async(
    flavour: Flavour,
    at: u64,
    pitch: usize,
    value: u32,
    width: usize,
    height: usize,
    stream: usize,
) -> Done {
    submit(flavour, rows(at, pitch, value, 4, width, height), stream)
}
