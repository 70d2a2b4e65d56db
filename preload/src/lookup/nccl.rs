//! Jobs of several processes that communicate with NCCL. Their kernels wait for each other, so their
//! processes are one gang: the scheduler runs them together.
//!
//! All processes of a communicator pass the same 128 random bytes (`ncclUniqueId`) to
//! `ncclCommInitRank`, and no other process does. A hash of these bytes is the key of the gang. A
//! communicator of one process makes no gang, and neither does `ncclCommInitAll`, whose communicators
//! are all in one process.
//!
//! The library exports no function of NCCL, because a weak reference or a lookup would then find the
//! function in a program without NCCL. Instead, it looks for NCCL among the loaded libraries and
//! changes NCCL's symbol table and the bindings to it ([`redirect`]), so that every lookup and every
//! binding yields a thunk. The thunk reads the arguments, joins the gang, and jumps to the function. It
//! neither changes arguments nor sees the result. Each loaded NCCL has its own thunks.
//!
//! The library looks for NCCL when the program
//! - looks up a name of NCCL with `dlsym`, which is how Python and JAX find the functions;
//! - initialises CUDA, which comes after the binding of a program and its libraries;
//! - has opened a library with `dlopen` after that, and looks up any name in the same thread: a library
//!   opened with `dlopen` is nearly always queried before it runs.
//!
//! Two kinds of calls are not noticed: calls of a statically linked NCCL whose functions are not exported
//! and bound like those of a library, and calls through bindings that were made by a `dlopen` after CUDA
//! was initialised, if no lookup follows in that thread.

use crate::{
    connection::gangs,
    driver::redirect,
    env::{launcher, settings},
    submit,
    sys::{elf, errno, thread},
};
use core::{
    arch::naked_asm,
    ffi::{CStr, c_char},
    slice,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

/// `sizeof(ncclUniqueId)`
const ID_LEN: usize = 128;

/// The functions that create a communicator of several processes. NCCL 2.2 has only the first one.
const NAMES: [&CStr; 3] = [c"ncclCommInitRank", c"ncclCommInitRankConfig", c"ncclCommInitRankScalable"];
/// The index of `ncclCommInitRankScalable`, which takes a list of ids.
const SCALABLE: usize = 2;

/// The number of loaded NCCLs whose communicators are noticed.
const LIBRARIES: usize = 8;
const THUNKS: usize = LIBRARIES * NAMES.len();

/// The distance between two thunks, in bytes.
const STRIDE: usize = 16;

/// The function of each thunk: [`NAMES`] of the first NCCL, then of the next one; 0 if the thunk is
/// unused.
static FUNCTIONS: [AtomicUsize; THUNKS] = [const { AtomicUsize::new(0) }; THUNKS];

/// Called before the program opens a library.
pub fn on_open() {
    thread::set_opened(true);
}

/// Whether to [`look`] before this lookup of a name with `dlsym`.
///
/// # Safety
/// `name` is NULL or ends with NUL.
pub unsafe fn is_due(name: *const c_char) -> bool {
    // SAFETY: the caller's contract. A byte is read only if no earlier one is NUL.
    let begins_with = |text: &CStr| unsafe { text.to_bytes().iter().zip(0..).all(|(b, i)| *name.add(i) as u8 == *b) };
    (thread::has_opened() && submit::is_active()) || (!name.is_null() && begins_with(NAMES[0]))
}

/// Looks for NCCL among the loaded libraries, and gives it thunks.
pub fn look() {
    /// The number of loaded objects at the last look.
    static SEEN: AtomicU64 = AtomicU64::new(0);
    thread::set_opened(false);
    if settings::is_disabled() {
        return;
    }
    errno::preserve(|| {
        let loads = elf::load_count();
        if loads == Some(SEEN.load(Ordering::SeqCst)) {
            return;
        }
        let mut found = [[0; NAMES.len()]; LIBRARIES];
        let mut places = found.iter_mut();
        elf::each_object(|object| {
            // A library that merely wraps the first function does not define the other two.
            let is_nccl = || [c"ncclCommDestroy", c"ncclGetUniqueId"].iter().all(|name| object.symbol(name).is_some());
            let Some(first) = object.symbol(NAMES[0]) else { return true };
            // If the symbol has a thunk, its address is in this library.
            if object.contains(first)
                && is_nccl()
                && let Some(place) = places.next()
            {
                *place = NAMES.map(|name| object.symbol(name).filter(|at| object.contains(*at)).unwrap_or(0));
            }
            true
        });
        found.into_iter().filter(|functions| functions[0] != 0).for_each(give_thunks);
        // Until here, other threads look too. None of them continues before the thunks are there.
        SEEN.store(loads.unwrap_or(0), Ordering::SeqCst);
    });
}

/// Gives thunks to the functions of one NCCL, if any are left.
fn give_thunks(functions: [usize; NAMES.len()]) {
    let first = FUNCTIONS.iter().step_by(NAMES.len()).position(|place| {
        let before = place.compare_exchange(0, functions[0], Ordering::SeqCst, Ordering::SeqCst);
        before.is_ok() || before == Err(functions[0])
    });
    let Some(first) = first.map(|library| library * NAMES.len()) else { return };
    let mut pairs = [(0, 0); NAMES.len()];
    for (i, (pair, function)) in pairs.iter_mut().zip(functions).enumerate() {
        if let Some(place) = FUNCTIONS.get(first + i).filter(|_| function != 0) {
            place.store(function, Ordering::SeqCst);
            *pair = (function, thunk_at(first + i));
        }
    }
    pairs.sort_unstable(); // functions that this NCCL lacks have address 0, at which there is no function
    // If that fails, this NCCL's communicators are not noticed. A library into which NCCL was linked
    // statically calls its own functions.
    redirect::try_redirect(functions[0], &pairs, true);
}

fn thunk_at(thunk: usize) -> usize {
    thunks as *const () as usize + thunk * STRIDE
}

/// The arguments of a call, as [`enter`] saves them.
#[repr(C)]
struct Call {
    /// `rax`, which keeps the stack aligned, `r9`, `r8`, `rcx`, `rdx`, `rsi` and `rdi`.
    #[cfg(target_arch = "x86_64")]
    registers: [usize; 7],
    #[cfg(target_arch = "x86_64")]
    return_address: usize,
    /// The first argument on the stack. An argument of 128 bytes is passed there by value.
    #[cfg(target_arch = "x86_64")]
    id: [u8; ID_LEN],
    /// `x0` to `x7`. An argument of 128 bytes is passed as the address of a copy.
    #[cfg(target_arch = "aarch64")]
    registers: [usize; 8],
}

impl Call {
    /// An argument that is passed in a register. The struct of 128 bytes does not count on x86-64.
    fn argument(&self, at: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        let at = 6 - at;
        self.registers.get(at).copied().unwrap_or(0)
    }

    /// The unique id of a communicator of several processes. `function`: the index in [`NAMES`].
    ///
    /// # Safety
    /// The call is one of that function.
    unsafe fn id(&self, function: usize) -> Option<&[u8]> {
        // ncclCommInitRank(ncclComm_t *, int nranks, ncclUniqueId, int rank)
        // ncclCommInitRankConfig(ncclComm_t *, int nranks, ncclUniqueId, int rank, ncclConfig_t *)
        // ncclCommInitRankScalable(ncclComm_t *, int nranks, int rank, int count, ncclUniqueId *, ncclConfig_t *)
        let ranks = self.argument(1) as i32;
        let id = match function {
            SCALABLE if self.argument(3) as i32 > 0 => self.argument(4) as *const u8,
            SCALABLE => return None,
            #[cfg(target_arch = "x86_64")]
            _ => self.id.as_ptr(),
            #[cfg(target_arch = "aarch64")]
            _ => self.argument(2) as *const u8,
        };
        // SAFETY: the caller's contract. NCCL reads the same bytes.
        (ranks > 1 && !id.is_null()).then(|| unsafe { slice::from_raw_parts(id, ID_LEN) })
    }
}

/// Called by a thunk, with an address inside that thunk and the arguments of the call. Returns the
/// address of the thunk's function.
unsafe extern "C" fn on_call(inside: usize, call: &Call) -> usize {
    let thunk = inside.wrapping_sub(thunks as *const () as usize) / STRIDE;
    errno::preserve(|| {
        // SAFETY: the thunk belongs to this function of NCCL.
        if let Some(id) = unsafe { call.id(thunk % NAMES.len()) }.filter(|_| !settings::get().refuses_gangs) {
            gangs::join(launcher::hash(id));
        }
    });
    FUNCTIONS.get(thunk).map_or(0, |function| function.load(Ordering::SeqCst))
}

/// The thunks, one after another.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn thunks() {
    naked_asm!(
        ".rept {thunks}",
        ".balign {stride}",
        "lea r11, [rip]", // identifies the thunk by its own address; r11 is free at a call
        "jmp {enter}",
        ".endr",
        thunks = const THUNKS,
        stride = const STRIDE,
        enter = sym enter,
    )
}

/// Calls [`on_call`], and then jumps to the function. All arguments are integers, so no other
/// registers contain arguments.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn enter() {
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "push rax", // keeps the stack aligned for the call
        "mov rdi, r11",
        "mov rsi, rsp",
        "call {on_call}",
        "mov r11, rax",
        "pop rax",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp r11",
        on_call = sym on_call,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn thunks() {
    naked_asm!(
        ".rept {thunks}",
        ".balign {stride}",
        "adr x16, .", // identifies the thunk by its own address; x16 is free at a call
        "b {enter}",
        ".endr",
        thunks = const THUNKS,
        stride = const STRIDE,
        enter = sym enter,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn enter() {
    naked_asm!(
        "stp x29, x30, [sp, #-80]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "mov x0, x16",
        "add x1, sp, #16",
        "bl {on_call}",
        "mov x16, x0",
        "ldp x6, x7, [sp, #64]",
        "ldp x4, x5, [sp, #48]",
        "ldp x2, x3, [sp, #32]",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #80",
        "br x16",
        on_call = sym on_call,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::{fake::Scheduler, gangs};
    use core::mem::transmute;
    use nvshare_wire::ClientMessage;
    use std::vec::Vec;

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Id([u8; ID_LEN]);

    type Init = extern "C" fn(&mut u64, i32, Id, i32, usize) -> i32;
    type InitScalable = extern "C" fn(&mut u64, i32, i32, i32, *const Id, usize) -> i32;

    extern "C" fn init(comm: &mut u64, ranks: i32, id: Id, rank: i32, config: usize) -> i32 {
        *comm = id.0.iter().fold(0, |sum: u64, byte| sum * 3 % 1_000_003 + u64::from(*byte));
        ranks * 100 + rank * 10 + config as i32
    }

    extern "C" fn init_scalable(
        comm: &mut u64,
        ranks: i32,
        rank: i32,
        count: i32,
        ids: *const Id,
        config: usize,
    ) -> i32 {
        // SAFETY: the test passes one id.
        init(comm, ranks, unsafe { *ids }, rank, config + count as usize)
    }

    #[test]
    fn thunks_pass_all_arguments_on_and_join_the_gang_of_the_id() {
        let scheduler = Scheduler::connect();
        let functions = [init as *const () as usize, init as *const () as usize, init_scalable as *const () as usize];
        FUNCTIONS.iter().zip(functions).for_each(|(place, function)| place.store(function, Ordering::SeqCst));
        // SAFETY: the thunks continue at functions of these types.
        let (thunk, scalable) = unsafe {
            (
                [0, 1].map(|at| transmute::<usize, Init>(thunk_at(at))),
                transmute::<usize, InitScalable>(thunk_at(SCALABLE)),
            )
        };
        let id = |first: u8| {
            let mut bytes = [7; ID_LEN];
            (bytes[0], bytes[1], bytes[ID_LEN - 1]) = (first, 0, 200 + first);
            Id(bytes)
        };
        let expected = |id: Id| {
            let mut comm = 0;
            init(&mut comm, 1, id, 0, 0);
            comm
        };
        let mut comm = 0;
        assert_eq!(thunk[0](&mut comm, 1, id(9), 0, 3), 103);
        assert_eq!(comm, expected(id(9)));
        assert!(!gangs::any(), "a communicator of one process is no gang");
        assert_eq!(thunk[0](&mut comm, 4, id(1), 2, 3), 423);
        assert_eq!(comm, expected(id(1)));
        assert_eq!(thunk[1](&mut comm, 8, id(2), 7, 5), 875);
        assert_eq!(comm, expected(id(2)));
        assert_eq!(scalable(&mut comm, 2, 1, 1, &id(3), 4), 215);
        assert_eq!(comm, expected(id(3)));
        assert_eq!(thunk[0](&mut comm, 4, id(1), 3, 3), 433);
        let joined: Vec<ClientMessage> = scheduler.sent();
        let gang = |id: Id| ClientMessage::JoinGang { gang: launcher::hash(&id.0) };
        assert_eq!(joined, [1, 2, 3].map(|first| gang(id(first))));
    }

    #[test]
    fn a_lookup_of_nccls_names_or_after_dlopen_is_due() {
        // SAFETY: the names end with NUL.
        let is_due = |name: &CStr| unsafe { is_due(name.as_ptr()) };
        assert!(NAMES.iter().all(|name| is_due(name)));
        assert!(!is_due(c"ncclCommInitAll") && !is_due(c"nccl") && !is_due(c"") && !is_due(c"cuInit"));
        on_open();
        assert!(!is_due(c"cuInit"), "CUDA is not initialised");
        submit::set_active(true);
        assert!(is_due(c"cuInit"));
        look();
        assert!(!is_due(c"cuInit"));
        // SAFETY: NULL is allowed.
        assert!(unsafe { !super::is_due(core::ptr::null()) });
    }
}
