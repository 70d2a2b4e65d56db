//! Work in a process that nobody waits for: neither a child of this one, nor of a program that takes its place.

use std::io;

/// Runs it in a process of its own, which has of this one's descriptors only standard error. Returns once that process is no child any
/// more. It ends with the work.
///
/// # Errors
/// If there can be no process; also if this one has other threads, whose locks nobody would release in a copy.
pub fn run(work: impl FnOnce()) -> io::Result<()> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("there are other threads"));
    }
    // SAFETY: this is the only thread, so the copy finds everything in order.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: as above. The process in between ends at once, so that whoever adopts orphans is the other's parent.
            if unsafe { libc::fork() } == 0 {
                let is_quiet = leave_descriptors();
                if is_quiet.is_ok() {
                    work();
                }
            }
            // SAFETY: ends this process, without what the one that it was copied from does at its end.
            unsafe { libc::_exit(0) }
        }
        child => {
            let mut status = 0;
            // SAFETY: `status` is there until the call returns.
            while unsafe { libc::waitpid(child, &raw mut status, 0) } == -1 {
                let e = io::Error::last_os_error();
                if e.kind() != io::ErrorKind::Interrupted {
                    return Err(e);
                }
            }
            Ok(())
        }
    }
}

/// Whoever reads what the program writes must see its end, and its locks on files must end with it.
fn leave_descriptors() -> io::Result<()> {
    // SAFETY: plain system calls; nothing that is used from here on has one of these descriptors.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        if null < 0 || libc::dup2(null, 0) < 0 || libc::dup2(null, 1) < 0 {
            return Err(io::Error::last_os_error());
        }
        match libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
