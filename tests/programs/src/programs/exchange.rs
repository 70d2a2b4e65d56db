//! Measures the highest rate at which two programs can exchange memory. One program copies its
//! pieces to the host, and unmaps and releases each piece. At the same time, the other maps pieces
//! and fills them from the host. There is no scheduler, and neither program waits for the other's
//! memory.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{
        Gpu, Mapped, Result, Stream,
        api::{Access, Location, Properties},
        cu,
    },
    report::Report,
};
use std::{
    io::{BufRead, BufReader, Write, stdin},
    process::{Command, Stdio},
    time::Instant,
};

/// The size of a move and the number of copies in flight, as in the preload library.
const PIECE: usize = 64 << 20;
const IN_FLIGHT: usize = 8;
/// The number of host buffers, which are reused. It exceeds the number of copies in flight.
const HOST_PIECES: usize = 16;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let pieces = args.size("mem", "4G") as usize / PIECE;
    let side = Side::new(pieces)?;
    if args.text("way", "out") == "in" {
        say("ready")?;
        stdin().lock().read_line(&mut String::new())?;
        side.bring_in()?;
        return say("done");
    }
    let mut other = Command::new(std::env::current_exe()?)
        .args(["exchange", "--way", "in", "--mem", &(pieces * PIECE).to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut said = BufReader::new(other.stdout.take().ok_or("no output")?).lines();
    let mut input = other.stdin.take().ok_or("no input")?;
    (0..pieces).try_for_each(|piece| side.map(piece))?;
    expect_line(said.next(), "ready")?;
    let begin = Instant::now();
    writeln!(input)?;
    side.take_out()?;
    let out = begin.elapsed();
    expect_line(said.next(), "done")?;
    let both = begin.elapsed();
    other.wait()?;
    let gib = (pieces * PIECE) as f64 / (1 << 30) as f64;
    report.number("out", gib / out.as_secs_f64());
    report.number("each_way", gib / both.as_secs_f64());
    Ok(())
}

fn say(what: &str) -> Outcome {
    println!("{what}");
    Ok(std::io::stdout().flush()?)
}

fn expect_line(line: Option<std::io::Result<String>>, wanted: &str) -> Outcome {
    match line.transpose()?.as_deref() {
        Some(line) if line == wanted => Ok(()),
        other => Err(format!("the other program says {other:?}, not {wanted}").into()),
    }
}

/// One of the two programs.
struct Side {
    _gpu: std::sync::Arc<Gpu>,
    stream: Stream,
    host: Mapped,
    events: Vec<usize>,
    /// The start of the addresses for `pieces` pieces.
    base: u64,
    pieces: usize,
}

impl Side {
    fn new(pieces: usize) -> Result<Side> {
        const DISABLE_TIMING: u32 = 2;
        let gpu = Gpu::open(0)?;
        let (stream, host) = (Stream::new()?, Mapped::new(HOST_PIECES * PIECE)?);
        let mut events = vec![0; IN_FLIGHT];
        events.iter_mut().try_for_each(|event| cu!(cuEventCreate(event, DISABLE_TIMING)))?;
        let mut base = 0;
        cu!(cuMemAddressReserve(&mut base, pieces * PIECE, 0, 0, 0))?;
        Ok(Side { _gpu: gpu, stream, host, events, base, pieces })
    }

    fn at(&self, piece: usize) -> u64 {
        self.base + (piece * PIECE) as u64
    }

    fn host(&self, piece: usize) -> *mut u8 {
        self.host.host.wrapping_add(piece % HOST_PIECES * PIECE)
    }

    fn event(&self, piece: usize) -> usize {
        self.events[piece % IN_FLIGHT]
    }

    /// Creates and maps a piece. Its memory is released when the piece is unmapped.
    fn map(&self, piece: usize) -> Result<()> {
        let (location, mut handle) = (Location { kind: 1, id: 0 }, 0);
        cu!(cuMemCreate(&mut handle, PIECE, &Properties { kind: 1, location, ..Properties::default() }, 0))?;
        cu!(cuMemMap(self.at(piece), PIECE, 0, handle, 0))?;
        cu!(cuMemRelease(handle))?;
        cu!(cuMemSetAccess(self.at(piece), PIECE, &Access { location, flags: 3 }, 1))
    }

    fn take_out(&self) -> Result<()> {
        let mut begun = 0;
        for piece in 0..self.pieces {
            while begun < self.pieces.min(piece + IN_FLIGHT) {
                cu!(cuMemcpyDtoHAsync_v2(self.host(begun), self.at(begun), PIECE, self.stream.0))?;
                cu!(cuEventRecord(self.event(begun), self.stream.0))?;
                begun += 1;
            }
            cu!(cuEventSynchronize(self.event(piece)))?;
            cu!(cuMemUnmap(self.at(piece), PIECE))?;
        }
        Ok(())
    }

    fn bring_in(&self) -> Result<()> {
        let mut begun = 0;
        for piece in 0..self.pieces {
            while begun < self.pieces.min(piece + IN_FLIGHT) {
                self.map(begun)?;
                cu!(cuMemcpyHtoDAsync_v2(self.at(begun), self.host(begun), PIECE, self.stream.0))?;
                cu!(cuEventRecord(self.event(begun), self.stream.0))?;
                begun += 1;
            }
            cu!(cuEventSynchronize(self.event(piece)))?;
        }
        Ok(())
    }
}
