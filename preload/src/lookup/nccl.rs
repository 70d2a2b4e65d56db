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
    driver::{
        detour::{Arguments, thunks},
        redirect,
    },
    env::{launcher, settings},
    submit,
    sys::{elf, errno, thread},
};
use core::{
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

/// Returns the unique id of a communicator of several processes. `function`: the index in [`NAMES`].
///
/// # Safety
/// The call is one of that function.
unsafe fn id_of<'a>(call: *const Arguments, function: usize) -> Option<&'a [u8]> {
    // ncclCommInitRank(ncclComm_t *, int nranks, ncclUniqueId, int rank)
    // ncclCommInitRankConfig(ncclComm_t *, int nranks, ncclUniqueId, int rank, ncclConfig_t *)
    // ncclCommInitRankScalable(ncclComm_t *, int nranks, int rank, int count, ncclUniqueId *, ncclConfig_t *)
    // SAFETY: the thunk has saved the arguments.
    let argument = |at| unsafe { (*call).integer(at) };
    let ranks = argument(1) as i32;
    let id = match function {
        SCALABLE if argument(3) as i32 > 0 => argument(4) as *const u8,
        SCALABLE => return None,
        // The id has 128 bytes. On x86-64, it is the first argument on the stack, and in no register.
        #[cfg(target_arch = "x86_64")]
        _ => call.wrapping_add(1).cast(),
        // The argument is the address of a copy.
        #[cfg(target_arch = "aarch64")]
        _ => argument(2) as *const u8,
    };
    // SAFETY: the caller's contract. NCCL reads the same bytes.
    (ranks > 1 && !id.is_null()).then(|| unsafe { slice::from_raw_parts(id, ID_LEN) })
}

/// Called by a thunk, with an address inside that thunk and the arguments of the call. Returns the
/// address of the thunk's function.
unsafe extern "C" fn on_call(inside: usize, call: *const Arguments) -> usize {
    let thunk = thunk_of(inside);
    errno::preserve(|| {
        // SAFETY: the thunk belongs to this function of NCCL.
        let id = unsafe { id_of(call, thunk % NAMES.len()) };
        if let Some(id) = id.filter(|_| !settings::get().refuses_gangs) {
            gangs::join(launcher::hash(id));
        }
    });
    FUNCTIONS.get(thunk).map_or(0, |function| function.load(Ordering::SeqCst))
}

thunks!(THUNKS, on_call);

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
