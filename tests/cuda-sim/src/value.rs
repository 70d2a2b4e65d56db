//! Stream memory operations: waiting for a value in memory, and writing a value.

use crate::{
    context::Context,
    error::{Done, Error},
    memory::{self, space},
    stream::{self, Flavour},
    work::Work,
};
use std::{thread, time::Duration};

/// Polling interval of a stream that waits for a value.
const LOOK: Duration = Duration::from_micros(50);

/// One stream memory operation.
#[derive(Clone, Copy, Debug)]
pub struct Value {
    at: u64,
    value: u64,
    wide: bool,
    /// The comparison for a wait; `None` for a write.
    wait: Option<u32>,
}

impl Value {
    fn new(at: u64, value: u64, wide: bool, wait: Option<u32>) -> Result<Value, Error> {
        let size = if wide { 8 } else { 4 };
        if !at.is_multiple_of(size) || wait.is_some_and(|flags| flags & !(1 << 30) > 3) || !space().covers(at, size) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(Value { at, value, wide, wait: wait.map(|flags| flags & 3) })
    }

    pub fn run(&self, context: &Context) -> Done {
        let Some(compare) = self.wait else {
            return if self.wide {
                memory::write(self.at, context.gpu, self.value)
            } else {
                memory::write(self.at, context.gpu, self.value as u32)
            };
        };
        loop {
            context.error()?;
            let met = if self.wide {
                let now = memory::read::<u64>(self.at, context.gpu)?;
                match compare {
                    0 => now.wrapping_sub(self.value) as i64 >= 0,
                    1 => now == self.value,
                    2 => now & self.value != 0,
                    _ => !(now | self.value) != 0,
                }
            } else {
                let (now, value) = (memory::read::<u32>(self.at, context.gpu)?, self.value as u32);
                match compare {
                    0 => now.wrapping_sub(value) as i32 >= 0,
                    1 => now == value,
                    2 => now & value != 0,
                    _ => !(now | value) != 0,
                }
            };
            if met {
                return Ok(());
            }
            thread::sleep(LOOK);
        }
    }
}

fn submit(flavour: Flavour, stream: usize, value: Result<Value, Error>) -> Done {
    let stream = stream::of(stream, flavour)?;
    stream.context.error()?;
    stream.submit(Work::Value(value?)).map(drop)
}

/// `cuStreamWaitValue32`
pub fn wait32(flavour: Flavour, stream: usize, at: u64, value: u32, flags: u32) -> Done {
    submit(flavour, stream, Value::new(at, value.into(), false, Some(flags)))
}

/// `cuStreamWaitValue64`
pub fn wait64(flavour: Flavour, stream: usize, at: u64, value: u64, flags: u32) -> Done {
    submit(flavour, stream, Value::new(at, value, true, Some(flags)))
}

/// `cuStreamWriteValue32`
pub fn write32(flavour: Flavour, stream: usize, at: u64, value: u32, _flags: u32) -> Done {
    submit(flavour, stream, Value::new(at, value.into(), false, None))
}

/// `cuStreamWriteValue64`
pub fn write64(flavour: Flavour, stream: usize, at: u64, value: u64, _flags: u32) -> Done {
    submit(flavour, stream, Value::new(at, value, true, None))
}

/// `CUstreamBatchMemOpParams`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BatchOp {
    operation: u32,
    at: u64,
    value: u64,
    flags: u32,
    alias: u64,
    _pad: u64,
}

/// `cuStreamBatchMemOp`
pub fn batch(flavour: Flavour, stream: usize, count: u32, operations: *const BatchOp, _flags: u32) -> Done {
    if operations.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    for i in 0..count as usize {
        // SAFETY: the program passes `count` operations.
        let op = unsafe { *operations.add(i) };
        match op.operation {
            1 => wait32(flavour, stream, op.at, op.value as u32, op.flags)?,
            2 => write32(flavour, stream, op.at, op.value as u32, op.flags)?,
            4 => wait64(flavour, stream, op.at, op.value, op.flags)?,
            5 => write64(flavour, stream, op.at, op.value, op.flags)?,
            3 | 6 => {}
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    Ok(())
}
