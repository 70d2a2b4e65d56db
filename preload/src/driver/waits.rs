//! Which driver calls may wait for running work. Examples are module loads, `cuMemFree`,
//! `cuMemHostUnregister`, the destruction of a context, and `cuEventRecord` in a stream whose queue is
//! full. The invariant is: **no call that may wait is made by the client's thread, or by a thread that
//! holds a lock of this library.** The work may wait for the program's next call, and that call may
//! need the client's thread or the lock.
//!
//! `coverage/waiting.tsv` classifies the functions. Debug builds check each call, and abort if it is
//! forbidden. Release builds check nothing.
//!
//! Rejected: a separate thread for every wait of the program. The program could then not see which of
//! its calls wait.

#[cfg(debug_assertions)]
pub use checks::KnownClass;
pub use checks::check;

/// Runs `f`. The caller guarantees that the submissions of `f` find room in the queues of their
/// streams, and so do not wait.
pub fn with_room<R>(f: impl FnOnce() -> R) -> R {
    let _room = crate::sys::rank::with_room();
    f()
}

#[cfg(not(debug_assertions))]
mod checks {
    #[inline(always)]
    pub fn check(_: &super::super::Function) {}
}

#[cfg(debug_assertions)]
mod checks {
    use super::super::Function;
    use crate::{
        env::trace::Line,
        sys::{c::environment, rank},
    };
    use core::{
        ffi::CStr,
        fmt::Write as _,
        panic::Location,
        sync::atomic::{AtomicU8, Ordering},
    };
    use rustix::fs::{Mode, OFlags};

    static TABLE: &str = include_str!("../../coverage/waiting.tsv");

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Class {
        Never,
        Queues,
        Waits,
    }

    /// A function's class, once it has been looked up. Looking it up at each call took an eighth of the
    /// processor time of all tests.
    #[derive(Debug)]
    pub struct KnownClass(AtomicU8);

    impl KnownClass {
        pub const fn new() -> Self {
            Self(AtomicU8::new(0))
        }

        fn get(&self, name: &CStr) -> Class {
            match self.0.load(Ordering::Relaxed) {
                1 => Class::Never,
                2 => Class::Queues,
                3 => Class::Waits,
                _ => {
                    let class = class_of(name.to_str().unwrap_or("")).unwrap_or(Class::Waits);
                    self.0.store(1 + class as u8, Ordering::Relaxed);
                    class
                }
            }
        }
    }

    /// Looks a function's class up, if it is known.
    fn class_of(name: &str) -> Option<Class> {
        let name = ["_ptsz", "_ptds"].iter().find_map(|flavour| name.strip_suffix(flavour)).unwrap_or(name);
        let mut lines = TABLE.lines().filter(|line| !line.starts_with('#')).map(|line| line.split('\t'));
        let class = lines.find_map(|mut line| (line.next() == Some(name)).then(|| line.next())?)?;
        Some(match class {
            "never" => Class::Never,
            "queues" => Class::Queues,
            _ => Class::Waits,
        })
    }

    /// Aborts if a call of this function may wait where waiting is forbidden. If `LIBNVSHARE_WAITING_CALLS`
    /// names a file, instead appends a line to that file, and also a line for each permitted call that may
    /// wait.
    #[track_caller]
    pub fn check(function: &Function) {
        let counted = environment(c"LIBNVSHARE_WAITING_CALLS");
        let is_wrong = rank::holds_any();
        if !is_wrong && counted.is_none() {
            return;
        }
        let waits = match function.waiting.get(function.name()) {
            Class::Never => false,
            Class::Queues => !rank::has_room(),
            Class::Waits => true,
        };
        if !waits {
            return;
        }
        let name = function.name().to_str().unwrap_or("");
        let place = Location::caller();
        let mut line = Line::new();
        let verdict = if is_wrong { "wrong" } else { "reached" };
        let _ = write!(line, "{verdict}\t{name}\t{}:{}\t{:#b}", place.file(), place.line(), rank::ranks_of_thread());
        let line = line.end();
        match counted {
            Some(path) => append(path, line),
            None => {
                const WHY: &[u8] = b"nvshare: a driver call that may block, on the client's thread or under a lock: ";
                // SAFETY: each buffer has as many bytes as its call passes. The last call ends the process.
                unsafe {
                    libc::write(2, WHY.as_ptr().cast(), WHY.len());
                    libc::write(2, line.as_ptr().cast(), line.len());
                    libc::abort()
                }
            }
        }
    }

    fn append(path: &[u8], line: &[u8]) {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC;
        if let Ok(file) = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
            let _ = rustix::io::write(&file, line);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use crate::{
            driver,
            sys::sync::{Mutex, Rank},
        };
        use std::{env, process::Command, string::String};

        #[test]
        fn every_called_driver_function_has_a_waiting_class() {
            driver::each_function(|function| {
                let name = function.name().to_str().expect("a name");
                assert!(class_of(name).is_some(), "{name} is not in coverage/waiting.tsv");
            });
        }

        /// Checks a call of a function of this class while a lock is held, without making the call.
        fn calls(which: &str) {
            static LOCK: Mutex<()> = Mutex::new(Rank::Space, ());
            let _held = LOCK.lock();
            match which {
                "waits" => check(&driver::address::cuModuleUnload),
                "queues" => check(&driver::address::cuEventRecord),
                "in room" => super::super::with_room(|| check(&driver::address::cuEventRecord)),
                "never" => check(&driver::address::cuEventQuery),
                _ => check(&Function::new(c"cuUnknown")),
            }
        }

        #[test]
        fn a_waiting_call_under_a_lock_aborts_the_process() {
            const CHILD: &str = "NVSHARE_TEST_CALL";
            if let Ok(which) = env::var(CHILD) {
                return calls(&which);
            }
            let name = "driver::waits::checks::tests::a_waiting_call_under_a_lock_aborts_the_process";
            for (which, is_right) in
                [("waits", false), ("queues", false), ("in room", true), ("never", true), ("unknown", false)]
            {
                let mut command = Command::new(env::current_exe().expect("this program"));
                let ended = command.args([name, "--exact", "--nocapture"]).env(CHILD, which).output().expect("a child");
                let said = String::from_utf8_lossy(&ended.stderr).into_owned();
                assert_eq!(ended.status.success(), is_right, "{which}: {said}");
                assert_eq!(said.contains("a driver call that may block"), !is_right, "{which}: {said}");
            }
        }
    }
}
