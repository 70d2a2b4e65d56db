//! Two processes that share memory. One exports the memory and the other opens it. Both add to it
//! alternately until the exporter receives SIGUSR1. Their private memory may move at the same time.
//! They communicate through a mapped file.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Buffer, Error, Gpu, Kind, Stream, cu,
        late::{MemHandle, late_cu},
    },
    report::Report,
    signal,
};
use std::{
    fs::{self, File},
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
    ptr, thread,
    time::{Duration, Instant},
};

const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
const SYNC_MEMOPS: u32 = 6;
/// Offset of the handles in the file. The words of both sides come before the handles.
const HANDLES: usize = 4096;
const MOST: usize = 1024;
const LEN: usize = HANDLES + 64 * MOST;
/// The timeout of one side's wait for the other.
const PATIENCE: Duration = Duration::from_secs(120);

/// Indices of the words in the file.
const EXPORTED: usize = 0;
const STEP: [usize; 2] = [1, 2];
/// The final number of rounds.
const ROUNDS: usize = 3;

struct Meeting(*mut u8);

impl Meeting {
    fn at(path: &str) -> Result<Meeting, Box<dyn std::error::Error>> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        file.set_len(LEN as u64)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address of the new mapping, and the file has this length.
        let at = unsafe { libc::mmap(ptr::null_mut(), LEN, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(std::io::Error::last_os_error().into()) } else { Ok(Meeting(at.cast())) }
    }

    fn say(&self, word: usize, value: u32) {
        // SAFETY: the address is inside the mapping. Only this side writes this word.
        unsafe { self.0.cast::<u32>().add(word).write_volatile(value) };
    }

    fn read(&self, word: usize) -> u32 {
        // SAFETY: the address is of a word in the mapping.
        unsafe { self.0.cast::<u32>().add(word).read_volatile() }
    }

    fn wait(&self, word: usize, least: u32) -> Result<u32, Box<dyn std::error::Error>> {
        let start = Instant::now();
        loop {
            let value = self.read(word);
            if value >= least {
                return Ok(value);
            }
            if start.elapsed() > PATIENCE {
                return Err("the other side does not come".into());
            }
            thread::sleep(Duration::from_micros(200));
        }
    }

    fn handle(&self, i: usize) -> *mut MemHandle {
        self.0.wrapping_add(HANDLES + 64 * i).cast()
    }
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let meeting = Meeting::at(args.text("file", "/dev/shm/cuda-program-share"))?;
    let gpu = Gpu::open(0)?;
    let private = Buffer::new(Kind::Alloc, args.size("private", "16M") as usize)?;
    gpu.fill(private.at, private.count(), 7, 0)?;
    let rounds = match args.text("role", "export") {
        "export" => export(args, report, &meeting, &gpu, &private)?,
        "import" => import(args, report, &meeting, &gpu, &private)?,
        _ => return Err("--role: want export or import".into()),
    };
    let sum = private.count() * (7 + u64::from(rounds));
    expect("the sum of the own memory", gpu.sum(private.at, private.count())?, sum)
}

/// The number of rounds that a side has completed.
type Rounds = Result<u32, Box<dyn std::error::Error>>;

fn export(args: &Args, report: &mut Report, meeting: &Meeting, gpu: &Gpu, private: &Buffer) -> Rounds {
    let (mem, count) = (args.size("mem", "16M") as usize, args.size("count", "1") as usize);
    let buffers = (0..count).map(|_| Buffer::new(Kind::Alloc, mem)).collect::<Result<Vec<_>, _>>()?;
    for (i, buffer) in buffers.iter().enumerate() {
        gpu.fill(buffer.at, buffer.count(), i as u32, 0)?;
    }
    gpu.synchronise()?;
    wait_for_file(args, "filled")?;
    if args.given("sync") {
        pin(&buffers[0])?;
    }
    for (i, buffer) in buffers.iter().enumerate() {
        let (mut handle, mut again) = (MemHandle::default(), MemHandle::default());
        late_cu!(cuIpcGetMemHandle(&mut handle, buffer.at))?;
        late_cu!(cuIpcGetMemHandle(&mut again, buffer.at + buffer.count() / 2))?;
        if handle != again {
            return Err("another handle for the same allocation".into());
        }
        // SAFETY: the address is in the mapping. The other side reads it only after the count is
        // set.
        unsafe { meeting.handle(i).write_volatile(handle) };
    }
    if args.given("sync") {
        buffers.iter().try_for_each(pin)?;
    }
    // SAFETY: the address is in the mapping, and this process has written the handle.
    expect(
        "opening an own handle",
        open(unsafe { meeting.handle(0).read_volatile() }).err().map_or(0, |e| e.code),
        201,
    )?;
    meeting.say(EXPORTED, count as u32);
    let mut rounds = 0;
    for round in (1..=args.size("rounds", "10") as u32).take_while(|_| !signal::has_come()) {
        for buffer in &buffers {
            gpu.add(buffer.at, buffer.count(), 1, 0)?;
        }
        gpu.add(private.at, private.count(), 1, 0)?;
        gpu.synchronise()?;
        meeting.say(STEP[0], round);
        meeting.wait(STEP[1], round)?;
        rounds = round;
    }
    wait_for_file(args, "hold")?;
    for (i, buffer) in buffers.iter().enumerate() {
        let want = buffer.count() * (i as u64 + 2 * u64::from(rounds));
        expect("the sum of what is shared", gpu.sum(buffer.at, buffer.count())?, want)?;
    }
    report.integer("exported", count as u64);
    buffers.into_iter().try_for_each(Buffer::free)?;
    meeting.say(ROUNDS, rounds);
    meeting.say(STEP[0], rounds + 1);
    wait_for_file(args, "stay")?;
    Ok(rounds)
}

/// Announces to the driver that another device will access the memory. This is a second reason for
/// pinning the memory.
fn pin(buffer: &Buffer) -> crate::cuda::Result<()> {
    late_cu!(cuPointerSetAttribute(&1, SYNC_MEMOPS, buffer.at))
}

fn import(args: &Args, report: &mut Report, meeting: &Meeting, gpu: &Gpu, private: &Buffer) -> Rounds {
    let count = meeting.wait(EXPORTED, 1)? as usize;
    wait_for_file(args, "begin")?;
    let mut handles: Vec<MemHandle> =
        // SAFETY: the handles are in the mapping, and were written before the count.
        (0..count).map(|i| unsafe { meeting.handle(i).read_volatile() }).collect();
    if args.given("spoil") {
        handles[0].0[args.size("spoil", "0") as usize] ^= 1;
    }
    if args.given("expect") {
        let code = open(handles[0]).err().map_or(0, |e| e.code);
        expect("opening", code, args.size("expect", "0") as u32)?;
        return Ok(0);
    }
    let opened = handles.iter().map(|handle| open(*handle)).collect::<Result<Vec<_>, _>>()?;
    for (at, handle) in opened.iter().zip(&handles) {
        expect("the address the second time", open(*handle)?, *at)?;
        late_cu!(cuIpcCloseMemHandle(*at))?;
        expect("freeing what another process has", cu!(cuMemFree_v2(*at)).err().map_or(0, |e| e.code), 1)?;
    }
    let size = args.size("mem", "16M") as usize;
    for at in &opened {
        let (mut base, mut len) = (0, 0);
        late_cu!(cuMemGetAddressRange_v2(&mut base, &mut len, at + 5))?;
        expect("the base", base, *at)?;
        expect("the size", len, size)?;
    }
    let mut rounds = 0;
    let elements = size as u64 / 4;
    for round in 1..=args.size("rounds", "10") as u32 {
        meeting.wait(STEP[0], round)?;
        let all = meeting.read(ROUNDS);
        if all > 0 && round > all {
            break;
        }
        for (i, at) in opened.iter().enumerate() {
            let want = elements * (i as u64 + 2 * u64::from(round) - 1);
            expect("the sum of what was imported", gpu.sum(*at, elements)?, want)?;
            gpu.add(*at, elements, 1, 0)?;
        }
        gpu.add(private.at, private.count(), 1, 0)?;
        gpu.synchronise()?;
        meeting.say(STEP[1], round);
        rounds = round;
    }
    report.integer("imported", count as u64);
    if args.given("keep") {
        // The exporter has freed the memory or has ended.
        wait_for_file(args, "keep")?;
        for (i, at) in opened.iter().enumerate() {
            let want = elements * (i as u64 + 2 * u64::from(rounds));
            expect("the sum of what the exporter left", gpu.sum(*at, elements)?, want)?;
        }
    }
    let stream = Stream::new()?;
    if args.given("other-context") {
        // Closes the memory while the GPU uses it and another context ends.
        gpu.spin(500_000_000, stream.0)?;
        gpu.add(opened[0], elements, 0, stream.0)?;
    }
    opened.iter().try_for_each(|at| late_cu!(cuIpcCloseMemHandle(*at)))?;
    if args.given("other-context") {
        let mut context = 0;
        late_cu!(cuCtxCreate_v2(&mut context, 0, gpu.device))?;
        late_cu!(cuCtxDestroy_v2(context))?;
        gpu.enter()?;
    }
    stream.synchronise()?;
    expect("closing once more", late_cu!(cuIpcCloseMemHandle(opened[0])).err().map_or(0, |e| e.code), 1)?;
    if args.given("reopen") {
        wait_for_file(args, "reopen")?;
        for (i, handle) in handles.iter().enumerate() {
            let at = open(*handle)?;
            let want = elements * (i as u64 + 2 * u64::from(rounds));
            expect("the sum of what was opened again", gpu.sum(at, elements)?, want)?;
            late_cu!(cuIpcCloseMemHandle(at))?;
        }
    }
    wait_for_file(args, "stay")?;
    Ok(rounds)
}

fn open(handle: MemHandle) -> Result<u64, Error> {
    let mut at = 0;
    late_cu!(cuIpcOpenMemHandle_v2(&mut at, handle, LAZY_ENABLE_PEER_ACCESS)).map(|()| at)
}

/// Creates the file that the option names, with the suffix `.reached`, and waits until the file
/// itself exists.
fn wait_for_file(args: &Args, option: &str) -> Outcome {
    if !args.given(option) {
        return Ok(());
    }
    let path = args.text(option, "");
    File::create(format!("{path}.reached"))?.write_all_at(b".", 0)?;
    let start = Instant::now();
    while !fs::exists(Path::new(path))? {
        if start.elapsed() > PATIENCE {
            return Err(format!("nobody made {path}").into());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
