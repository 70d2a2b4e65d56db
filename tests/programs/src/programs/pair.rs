//! Two processes whose work waits for the other process's work in each round, by values in shared
//! memory or by events. With values, neither process can end its round before the other has begun
//! its own, as in a collective operation.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Buffer, Gpu, Kind, Stream, cu,
        late::{EventHandle, late_cu},
    },
    report::Report,
};
use std::{
    env,
    error::Error,
    fs::File,
    os::fd::{AsRawFd, FromRawFd},
    process::{Child, Command, Stdio},
    ptr, thread,
    time::{Duration, Instant},
};

const LEN: usize = 4096;
/// The timeout of one side's wait for the other.
const PATIENCE: Duration = Duration::from_secs(120);

/// The shared memory. For each side it contains a value, the number of recorded events, and the
/// event's handle.
#[derive(Clone, Copy)]
struct Shared(*mut u8);

impl Shared {
    fn map(file: &File) -> Result<Shared, Box<dyn Error>> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address of the new mapping, and the file has this length.
        let at = unsafe { libc::mmap(ptr::null_mut(), LEN, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(std::io::Error::last_os_error().into()) } else { Ok(Shared(at.cast())) }
    }

    fn value(self, side: usize) -> *mut u32 {
        self.0.wrapping_add(64 * side).cast()
    }

    fn recorded(self, side: usize) -> *mut u32 {
        self.0.wrapping_add(256 + 64 * side).cast()
    }

    fn handle(self, side: usize) -> *mut EventHandle {
        self.0.wrapping_add(512 + 64 * side).cast()
    }

    /// Waits until a side has recorded `count` events.
    fn wait(self, side: usize, count: u32) -> Outcome {
        let start = Instant::now();
        // SAFETY: the address is of a word in the mapping, which the other process writes
        // atomically.
        while unsafe { self.recorded(side).read_volatile() } < count {
            if start.elapsed() > PATIENCE {
                return Err("the other side does not come".into());
            }
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (how, rounds) = (args.text("how", "value"), args.size("rounds", "10") as u32);
    let file = args.text("file", "");
    if !file.is_empty() {
        let file = File::options().read(true).write(true).open(file)?;
        return work(Shared::map(&file)?, 1, how, rounds, Duration::ZERO);
    }
    // Only one side pauses, so that the work of the other side waits.
    let pause = args.milliseconds("pause-ms", "0");
    // SAFETY: the descriptor is new, so no other value owns it.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"pair".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(LEN as u64)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let words = ["pair", "--how", how, "--rounds", &rounds.to_string(), "--file", &path];
    let mut other = Other(Command::new(env::current_exe()?).args(words).stdout(Stdio::null()).spawn()?);
    report.integer("other", other.0.id().into());
    work(Shared::map(&file)?, 0, how, rounds, pause)?;
    expect("the other side's exit status", other.0.wait()?.code().unwrap_or(-1), 0)
}

/// The other process. It is killed when this process drops the value.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn work(shared: Shared, side: usize, how: &str, rounds: u32, pause: Duration) -> Outcome {
    // Kills this process when its parent, the other side, ends. SAFETY: the call changes only this
    // process.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let gpu = Gpu::open(0)?;
    let stream = Stream::new()?;
    let buffer = Buffer::new(Kind::Alloc, 4 << 20)?;
    gpu.fill(buffer.at, buffer.count(), 0, stream.0)?;
    stream.synchronise()?;
    match how {
        "value" => values(shared, side, (rounds, pause), &gpu, &buffer, &stream)?,
        "event" => events(shared, side, rounds, &gpu, &buffer, &stream)?,
        _ => return Err("--how: want value or event".into()),
    }
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * u64::from(rounds))
}

fn values(
    shared: Shared,
    side: usize,
    (rounds, pause): (u32, Duration),
    gpu: &Gpu,
    buffer: &Buffer,
    stream: &Stream,
) -> Outcome {
    const DEVICE_MAP: u32 = 2;
    late_cu!(cuMemHostRegister_v2(shared.0, LEN, DEVICE_MAP))?;
    let mut at = 0;
    cu!(cuMemHostGetDevicePointer_v2(&mut at, shared.0, 0))?;
    for round in 1..=rounds {
        thread::sleep(pause);
        late_cu!(cuStreamWriteValue32_v2(stream.0, at + 64 * side as u64, round, 0))?;
        late_cu!(cuStreamWaitValue32_v2(stream.0, at + 64 * (1 - side) as u64, round, 0))?;
        gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
        stream.synchronise()?;
        // SAFETY: the address is of a word in the mapping, which only the GPU writes.
        expect("own value", unsafe { shared.value(side).read_volatile() }, round)?;
    }
    late_cu!(cuMemHostUnregister(shared.0))?;
    Ok(())
}

fn events(shared: Shared, side: usize, rounds: u32, gpu: &Gpu, buffer: &Buffer, stream: &Stream) -> Outcome {
    const INTERPROCESS: u32 = 4 | 2;
    let (mut own, mut other) = (0, 0);
    cu!(cuEventCreate(&mut own, INTERPROCESS))?;
    let mut handle = EventHandle::default();
    late_cu!(cuIpcGetEventHandle(&mut handle, own))?;
    // SAFETY: the addresses are in the mapping. The handle is read after the count shows that it
    // was written.
    unsafe {
        shared.handle(side).write_volatile(handle);
        shared.recorded(side).write_volatile(1);
    }
    shared.wait(1 - side, 1)?;
    // SAFETY: the address is in the mapping, and the other side has written the handle before it
    // set the count.
    let handle = unsafe { shared.handle(1 - side).read_volatile() };
    late_cu!(cuIpcOpenEventHandle(&mut other, handle))?;
    // The sides alternate: each side waits for the last event of the other.
    for round in 1..=rounds {
        if side == 1 || round > 1 {
            shared.wait(1 - side, if side == 1 { round + 1 } else { round })?;
            cu!(cuStreamWaitEvent(stream.0, other, 0))?;
        }
        gpu.spin(20_000_000, stream.0)?;
        gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
        cu!(cuEventRecord(own, stream.0))?;
        // SAFETY: the address is of a word in the mapping, which only this side writes.
        unsafe { shared.recorded(side).write_volatile(round + 1) };
    }
    stream.synchronise()?;
    // Keeps the event until the other side has waited for it.
    shared.wait(1 - side, rounds + 1)?;
    cu!(cuEventSynchronize(other))?;
    cu!(cuEventDestroy_v2(other))?;
    cu!(cuEventDestroy_v2(own))?;
    Ok(())
}
