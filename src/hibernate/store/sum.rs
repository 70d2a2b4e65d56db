//! The checksum of a file that may be as large as a GPU's memory.

use super::hex;
use sha2::{Digest, Sha256};
use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

/// Bytes of a piece. Changing it changes all checksums.
const PIECE: u64 = 32 << 20;
/// Maximum number of threads. On an H200's host, eight threads hashed 7 GB/s from the page cache.
const MAX_THREADS: u64 = 16;
/// Bytes that a thread reads at a time.
const READ: u64 = 1 << 20;

type Sum = [u8; 32];

/// Whether the result is not needed any more. Asked before each piece.
pub type IsCancelled<'a> = &'a (dyn Fn() -> bool + Sync);

/// Returns the length and the checksum of a file that no process can write. The checksum is the SHA-256 of
/// the length and of the SHA-256 of each piece. Several threads hash the pieces, because a single one would be
/// slower than the disk.
///
/// # Errors
/// The file cannot be read, or `is_cancelled` has returned `true`.
pub fn of(file: &File, is_cancelled: IsCancelled<'_>) -> io::Result<(u64, String)> {
    in_pieces(file, PIECE, is_cancelled)
}

fn in_pieces(file: &File, piece: u64, is_cancelled: IsCancelled<'_>) -> io::Result<(u64, String)> {
    let bytes = file.metadata()?.len();
    let pieces = bytes.div_ceil(piece);
    let processors = thread::available_parallelism().map_or(1, usize::from) as u64;
    let threads = pieces.min(MAX_THREADS).min(processors);
    let next = AtomicU64::new(0);
    let work = || -> io::Result<Vec<(u64, Sum)>> {
        let mut buffer = vec![0; READ as usize];
        let taken = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        let own = taken.take_while(|at| *at < pieces);
        let sum = |at: u64| match is_cancelled() {
            true => Err(io::Error::other("it was cancelled")),
            false => Ok((at, sum_of(file, at * piece..bytes.min((at + 1) * piece), &mut buffer)?)),
        };
        own.map(sum).collect()
    };
    let mut sums = if threads <= 1 {
        work()?
    } else {
        thread::scope(|scope| {
            let running: Vec<_> = (0..threads).map(|_| thread::Builder::new().spawn_scoped(scope, work)).collect();
            let mut sums = Vec::new();
            for thread in running {
                let panicked = |_| io::Error::other("a thread has failed");
                sums.extend(thread?.join().map_err(panicked)??);
            }
            io::Result::Ok(sums)
        })?
    };
    sums.sort_unstable_by_key(|(at, _)| *at);
    let mut whole = Sha256::new_with_prefix(bytes.to_le_bytes());
    sums.iter().for_each(|(_, sum)| whole.update(sum));
    Ok((bytes, hex(&whole.finalize())))
}

fn sum_of(file: &File, range: Range<u64>, buffer: &mut [u8]) -> io::Result<Sum> {
    let mut hash = Sha256::new();
    let mut at = range.start;
    while at < range.end {
        let length = (range.end - at).min(READ);
        let part = &mut buffer[..length as usize];
        file.read_exact_at(part, at)?;
        hash.update(&*part);
        at += length;
    }
    Ok(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::daemon::Directory;

    #[test]
    fn a_changed_byte_changes_the_sum_in_every_piece() {
        const SMALL: u64 = 2 * READ;
        let directory = Directory::new();
        let path = directory.0.join("file");
        let file = File::options().create(true).truncate(true).read(true).write(true).open(&path).expect("a file");
        let sum = || in_pieces(&file, SMALL, &|| false).expect("a sum");
        let mut seen = std::collections::BTreeSet::from([sum()]);
        file.set_len(3 * SMALL + 5).expect("a sparse file");
        assert!(seen.insert(sum()));
        for at in [0, READ, SMALL - 1, SMALL, 3 * SMALL + 4] {
            file.write_all_at(&[1], at).expect("a byte");
            assert_eq!((sum().0, sum()), (3 * SMALL + 5, sum()), "the same each time");
            assert!(seen.insert(sum()), "byte {at}");
        }
        // The order of the pieces counts, and their number.
        let mut pieces = vec![vec![0; SMALL as usize]; 2];
        for (at, piece) in [0, SMALL].into_iter().zip(&mut pieces) {
            file.read_exact_at(piece, at).expect("a piece");
        }
        file.write_all_at(&pieces[1], 0).and_then(|()| file.write_all_at(&pieces[0], SMALL)).expect("both");
        assert!(seen.insert(sum()));
        file.set_len(SMALL).expect("a shorter file");
        assert!(seen.insert(sum()));
    }
}
