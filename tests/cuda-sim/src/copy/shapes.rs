//! Copies in two and three dimensions, as programs describe them.

use super::*;

/// One side of a 2D or 3D copy as the program describes it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Operand2D {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: usize,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Copy2D {
    from: Operand2D,
    to: Operand2D,
    width: usize,
    height: usize,
}

/// One side of a 3D copy. `CUDA_MEMCPY3D` reserves the word `context`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Operand3D {
    pub x: usize,
    pub y: usize,
    pub z: usize,
    pub lod: usize,
    pub kind: u32,
    pub host: u64,
    pub device: u64,
    pub array: usize,
    pub context: usize,
    pub pitch: usize,
    pub height: usize,
}

/// `CUDA_MEMCPY3D`, `CUDA_MEMCPY3D_PEER`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Copy3D {
    pub from: Operand3D,
    pub to: Operand3D,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

impl From<Operand2D> for Operand3D {
    fn from(o: Operand2D) -> Self {
        Operand3D {
            x: o.x,
            y: o.y,
            kind: o.kind,
            host: o.host,
            device: o.device,
            array: o.array,
            pitch: o.pitch,
            ..Operand3D::default()
        }
    }
}

impl From<Copy2D> for Copy3D {
    fn from(c: Copy2D) -> Self {
        Copy3D { from: c.from.into(), to: c.to.into(), width: c.width, height: c.height, depth: 1 }
    }
}

impl Operand3D {
    fn end(&self, width: usize, height: usize) -> Result<End, Error> {
        let (side, base, pitch, rows) = match self.kind {
            1 => (host(self.host)?, self.host, self.pitch, self.height),
            2 => (device(self.device)?, self.device, self.pitch, self.height),
            3 => {
                let array = array::of(self.array)?;
                (Side::Device, array.at, array.pitch as usize, array.rows as usize)
            }
            4 => (host(self.device)?, self.device, self.pitch, self.height),
            _ => return Err(Error::INVALID_VALUE),
        };
        let pitch = if pitch == 0 { width } else { pitch };
        let rows = if rows == 0 { height } else { rows };
        if pitch < width {
            return Err(Error::INVALID_VALUE);
        }
        let (pitch, slice) = (pitch as u64, (pitch * rows) as u64);
        let at = base + self.z as u64 * slice + self.y as u64 * pitch + self.x as u64;
        Ok(End { side, at, pitch, slice, gpu: None })
    }
}

impl Copy3D {
    /// Returns the copy, after checking it against the current mappings.
    pub fn decode(&self) -> Result<Copy, Error> {
        Ok(Copy {
            to: self.to.end(self.width, self.height)?,
            from: self.from.end(self.width, self.height)?,
            width: self.width as u64,
            height: self.height as u64,
            depth: self.depth as u64,
            peer: false,
        })
    }
}
