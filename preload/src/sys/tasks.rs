//! The threads of this process as the kernel sees them.

use super::file;
use alloc::{ffi::CString, format, vec::Vec};
use rustix::{
    fs::{Mode, OFlags, open},
    thread::gettid,
};

/// A thread that was running or runnable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    id: i32,
    /// The processor time that it had used, in clock ticks.
    used: u64,
}

/// Returns the threads of the process that are not asleep in a system call, except the calling thread.
/// `None` if `/proc` cannot be read.
pub fn on_their_way() -> Option<Vec<Task>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = open(c"/proc/self/task", flags, Mode::empty()).ok()?;
    let own = gettid().as_raw_nonzero().get();
    let mut tasks = Vec::new();
    let is_read = file::each_number(&folder, |id, _| {
        tasks.extend(state(id).filter(|(task, is_asleep)| task.id != own && !is_asleep).map(|(task, _)| task));
        true
    });
    is_read.then_some(tasks)
}

impl Task {
    /// Whether the thread has left the code that it was executing: it sleeps in a system call, has used
    /// processor time, or has ended.
    pub fn has_moved_on(&self) -> bool {
        state(self.id).is_none_or(|(now, is_asleep)| is_asleep || now.used > self.used)
    }
}

/// Returns a thread, and whether it sleeps in a system call or has ended. `None` if it no longer
/// exists.
fn state(id: i32) -> Option<(Task, bool)> {
    parse(id, &file::read(&CString::new(format!("/proc/self/task/{id}/stat")).ok()?))
}

fn parse(id: i32, text: &[u8]) -> Option<(Task, bool)> {
    // The thread's name may contain spaces and brackets. The fields that follow contain neither.
    let end = text.iter().rposition(|byte| *byte == b')')?;
    let mut fields = text.get(end + 2..)?.split(|byte| *byte == b' ');
    let state = fields.next()?;
    let number = |field: &[u8]| core::str::from_utf8(field).ok()?.parse::<u64>().ok();
    let used = number(fields.nth(10)?)? + number(fields.next()?)?;
    // A thread that waits for a page has state D, and may be at any instruction. An ended thread (Z or X)
    // executes none.
    Some((Task { id, used }, matches!(state, b"S" | b"Z" | b"X")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Duration,
    };

    #[test]
    fn a_proc_stat_line_is_parsed() {
        let line = b"42 (a) R (b)) R 1 42 42 0 -1 4194304 9 0 0 0 70 30 0 0 20 0 1 0 5 1 1";
        assert_eq!(parse(42, line), Some((Task { id: 42, used: 100 }, false)));
        assert_eq!(parse(42, b"42 (x) S 1 42 42 0 -1 4194304 9 0 0 0 7 3 0"), Some((Task { id: 42, used: 10 }, true)));
        assert_eq!(parse(42, b""), None);
    }

    /// Polls for at least a minute, and longer on a busy machine.
    fn until<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
        (0..12_000).find_map(|_| {
            thread::sleep(Duration::from_millis(5));
            look()
        })
    }

    #[test]
    fn running_threads_progress_and_sleeping_threads_are_not_listed() {
        static END: AtomicBool = AtomicBool::new(false);
        let busy = thread::spawn(|| {
            while !END.load(Ordering::Relaxed) {
                core::hint::spin_loop()
            }
        });
        let asleep = thread::spawn(|| {
            while !END.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(500))
            }
        });
        let look = || Some(on_their_way().expect("/proc is there")).filter(|seen| !seen.is_empty());
        let seen = until(look).expect("no thread runs");
        until(|| seen.iter().all(Task::has_moved_on).then_some(())).expect("they have not moved on");
        END.store(true, Ordering::Relaxed);
        busy.join().unwrap();
        asleep.join().unwrap();
    }
}
