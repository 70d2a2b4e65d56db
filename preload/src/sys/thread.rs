//! Starting threads of this library, and thread-local words for every thread.

use super::c;
use alloc::boxed::Box;
use core::{
    cell::UnsafeCell,
    ffi::{CStr, c_void},
    mem::MaybeUninit,
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

/// The stack size of this library's threads in bytes. Untouched pages of a stack take no memory.
const STACK: usize = 256 << 10;

type Main = Box<dyn FnOnce() + Send>;

/// Starts a detached thread that receives no signals and has the process's scheduling attributes.
/// Returns `false` if that fails.
pub fn spawn(name: &'static CStr, main: impl FnOnce() + Send + 'static) -> bool {
    let run: Main = Box::new(move || {
        let _ = rustix::thread::set_name(name);
        schedule();
        main();
    });
    let main = Box::into_raw(Box::new(run));
    let started = with_signals_blocked(|| create(main));
    if !started {
        // SAFETY: no thread was started, so `main` still belongs to this function.
        drop(unsafe { Box::from_raw(main) });
    }
    started
}

fn create(main: *mut Main) -> bool {
    let (Some(init), Some(detach), Some(stack), Some(destroy), Some(create)) = (
        c::pthread_attr_init(),
        c::pthread_attr_setdetachstate(),
        c::pthread_attr_setstacksize(),
        c::pthread_attr_destroy(),
        c::pthread_create(),
    ) else {
        return false;
    };
    let (mut attributes, mut thread) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: `attributes` and `thread` outlive the calls. The attributes are initialised before they are
    // used.
    unsafe {
        let attributes = attributes.as_mut_ptr();
        if init(attributes) != 0 {
            return false;
        }
        detach(attributes, libc::PTHREAD_CREATE_DETACHED);
        // The new thread does not inherit the policy of the calling thread. A caller under
        // SCHED_FIFO may keep the processor while it waits for the new thread, and a new thread
        // with the same policy would never run.
        if let (Some(inherit), Some(policy), Some(priority)) =
            (c::pthread_attr_setinheritsched(), c::pthread_attr_setschedpolicy(), c::pthread_attr_setschedparam())
        {
            policy(attributes, libc::SCHED_OTHER);
            priority(attributes, &libc::sched_param { sched_priority: 0 });
            inherit(attributes, libc::PTHREAD_EXPLICIT_SCHED);
        }
        // Adds the space that the C library itself needs on the stack, for example for static thread-local
        // storage, which may have any size. If the C library does not report this size, threads get the
        // program's default stack size.
        if let Some(minimum) = c::__pthread_get_minstack() {
            stack(attributes, STACK.saturating_add(minimum(attributes)));
        }
        let started = create(thread.as_mut_ptr(), attributes, run, main.cast()) == 0;
        destroy(attributes);
        started
    }
}

extern "C" fn run(main: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` created the box for this thread only.
    unsafe { Box::from_raw(main.cast::<Main>())() };
    core::ptr::null_mut()
}

/// Runs `f` with all signals blocked. A thread that `f` starts inherits the mask, so the program's
/// threads get all signals.
fn with_signals_blocked<R>(f: impl FnOnce() -> R) -> R {
    let Some(sigprocmask) = c::sigprocmask() else { return f() };
    let (mut all, mut before) = (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::uninit());
    // SAFETY: `all` and `before` outlive the calls. On Linux, `sigprocmask` changes the mask of the
    // calling thread only. The C library keeps its own signals unblocked.
    unsafe {
        all.as_mut_ptr().write_bytes(0xff, 1);
        let changed = sigprocmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) == 0;
        let result = f();
        if changed {
            sigprocmask(libc::SIG_SETMASK, before.as_ptr(), core::ptr::null_mut());
        }
        result
    }
}

/// The processors on which the process's first thread could run when the library was loaded, in the
/// kernel's format.
struct Cpus {
    mask: UnsafeCell<[u8; CPU_MASK]>,
    /// The number of bytes that the kernel has written; 0 if the call failed.
    len: AtomicUsize,
}

/// The size in bytes of a set of 8,192 processors, the most that Linux supports.
const CPU_MASK: usize = 1024;

// SAFETY: the loader's thread writes the value before any other thread exists. Afterwards threads only
// read it.
unsafe impl Sync for Cpus {}

static AT_LOAD: Cpus = Cpus { mask: UnsafeCell::new([0; CPU_MASK]), len: AtomicUsize::new(0) };

/// Records the processors of the process. Called once, when the library is loaded.
pub fn remember_cpus() {
    // SAFETY: no other thread reads the mask yet, and the kernel writes at most `CPU_MASK` bytes. Thread 0
    // stands for the calling thread, which is the process's first.
    let len = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, CPU_MASK, AT_LOAD.mask.get()) };
    AT_LOAD.len.store(len.clamp(0, CPU_MASK as _) as usize, Ordering::Relaxed);
}

/// Replaces scheduling attributes that the calling thread has inherited, as far as the kernel allows.
/// It restores the processors recorded at load, takes the nice value of the process's first thread, and
/// allows all memory nodes.
fn schedule() {
    const MPOL_DEFAULT: i32 = 0;
    let first = rustix::process::getpid().as_raw_pid();
    // SAFETY: the kernel has written `len` bytes of the mask. The other calls take no pointers.
    unsafe {
        let len = AT_LOAD.len.load(Ordering::Relaxed);
        if len > 0 {
            libc::syscall(libc::SYS_sched_setaffinity, 0, len, AT_LOAD.mask.get());
        }
        let nice = 20 - libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, first); // the kernel returns 40 to 1
        if nice < 20 {
            libc::syscall(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, nice);
        }
        libc::syscall(libc::SYS_set_mempolicy, MPOL_DEFAULT, ptr::null::<c_void>(), 0);
    }
}

/// Returns the number of CPUs that this library's threads may use.
pub fn cpus() -> usize {
    let len = AT_LOAD.len.load(Ordering::Relaxed);
    // SAFETY: the mask was written once, when the library was loaded.
    let mask = unsafe { &*AT_LOAD.mask.get() };
    mask.iter().take(len).map(|byte| byte.count_ones() as usize).sum::<usize>().max(1)
}

/// Returns the stack pointer of the function into which this function is inlined.
#[inline(always)]
pub fn stack_pointer() -> usize {
    let here;
    // SAFETY: reads a register.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!("mov {here}, rsp", here = out(reg) here, options(pure, nomem, nostack, preserves_flags));
    }
    // SAFETY: reads a register.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("mov {here}, sp", here = out(reg) here, options(pure, nomem, nostack, preserves_flags));
    }
    here
}

// ---- thread-local words ----

/// Declares a thread-local word, and a function that returns its address in the calling thread. The
/// word uses thread-local storage in the initial-exec model. An access costs two instructions and no
/// call, and the word exists until its thread ends. In stable Rust only std offers thread-local
/// storage.
macro_rules! word {
    ($place:ident, $symbol:literal) => {
        core::arch::global_asm!(
            concat!(".pushsection .tbss.", $symbol, ", \"awT\", @nobits"),
            ".balign 8",
            concat!(".globl ", $symbol),
            concat!(".hidden ", $symbol),
            concat!(".type ", $symbol, ", @object"),
            concat!(".size ", $symbol, ", 8"),
            concat!($symbol, ":"),
            ".zero 8",
            ".popsection",
        );

        #[inline(always)]
        fn $place() -> *mut usize {
            let place: *mut usize;
            // SAFETY: computes the address of this thread's own storage.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                core::arch::asm!(
                    "mov {place}, qword ptr fs:[0]",
                    concat!("add {place}, qword ptr [rip + ", $symbol, "@GOTTPOFF]"),
                    place = out(reg) place,
                    options(pure, readonly, nostack),
                );
            }
            // SAFETY: computes the address of this thread's own storage.
            #[cfg(target_arch = "aarch64")]
            unsafe {
                core::arch::asm!(
                    "mrs {thread}, tpidr_el0",
                    concat!("adrp {place}, :gottprel:", $symbol),
                    concat!("ldr {place}, [{place}, :gottprel_lo12:", $symbol, "]"),
                    "add {place}, {place}, {thread}",
                    thread = out(reg) _,
                    place = out(reg) place,
                    options(pure, readonly, nostack, preserves_flags),
                );
            }
            place
        }
    };
}

word!(place, "nvshare_thread");
word!(opened_place, "nvshare_opened");
#[cfg(debug_assertions)]
word!(ranks_place, "nvshare_ranks");

/// Returns the calling thread's word, which is NULL until `set_mine` is called.
#[inline(always)]
pub fn mine() -> *const c_void {
    // Every launch reads this word. The code takes one instruction less than `place` followed by a load.
    // SAFETY: reads this thread's own storage.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        let word;
        core::arch::asm!(
            "mov {word}, qword ptr [rip + nvshare_thread@GOTTPOFF]",
            "mov {word}, qword ptr fs:[{word}]",
            word = out(reg) word,
            options(pure, readonly, nostack, preserves_flags),
        );
        word
    }
    // SAFETY: reads this thread's own storage.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe {
        place().cast::<*const c_void>().read()
    }
}

pub fn set_mine(word: *const c_void) {
    // SAFETY: writes this thread's own storage.
    unsafe { place().cast::<*const c_void>().write(word) }
}

/// Whether the calling thread has opened a library with `dlopen` since the last `set_opened(false)`.
pub fn has_opened() -> bool {
    // SAFETY: reads this thread's own storage.
    unsafe { opened_place().read() != 0 }
}

pub fn set_opened(opened: bool) {
    // SAFETY: writes this thread's own storage.
    unsafe { opened_place().write(opened.into()) }
}

/// Returns the ranks of the locks that the calling thread holds, as bits ([`super::rank`]). Always 0 in release
/// builds.
#[inline(always)]
pub fn ranks() -> u64 {
    #[cfg(debug_assertions)]
    // SAFETY: reads this thread's own storage.
    return unsafe { ranks_place().cast::<u64>().read() };
    #[cfg(not(debug_assertions))]
    0
}

#[inline(always)]
pub fn set_ranks(_ranks: u64) {
    #[cfg(debug_assertions)]
    // SAFETY: writes this thread's own storage.
    unsafe {
        ranks_place().cast::<u64>().write(_ranks);
    }
}
