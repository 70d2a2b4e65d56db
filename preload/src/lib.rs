//! `libnvshare.so`: preloaded into a program, it makes it share the GPU.
//!
//! It is a guest: it does nothing until the program initialises CUDA, and whatever it meets, it must not crash, exit,
//! hang, print or change results. So nothing here panics, and what it does not know passes through.
//!
//! A call's way, from the program to the driver:
//! - [`loader`] answers look-ups of driver functions with the [`hooks`], which pass on to the real [`driver`] ([`cuda`]
//!   has its types), a [`library`] whose symbols [`elf`] finds. [`client`] says whether this process takes part at all,
//!   [`environment`] on which GPUs, [`visible`] which of them it sees.
//! - [`gate`] is where work waits for the GPU lock; [`threads`], [`barrier`] and [`epoch`] make passing it cheap, [`futex`]
//!   waiting.
//! - [`work`] bounds what is submitted and knows when it is done; [`capture`] keeps all of that out of stream captures.
//! - [`story`] is what the program is told of its memory, where somebody bounds that.
//! - [`memory`] is where the program's allocations are; [`gpu`] ties gate, work and memory of one GPU together, and has its [`info`],
//!   [`peers`] those GPUs that reach into each other's memory.
//!
//! The scheduler's way:
//! - [`link`] is the thread that listens ([`socket`]) and acts; [`turn`] is one GPU lock, from grant to release, [`gaps`] when
//!   to give it back early, [`fullness`] how full the GPU is meanwhile; [`limit`] asks for more memory than was promised,
//!   [`squeeze`] for room for the driver's own; [`alone`] is what clients do without a scheduler.
//!
//! [`settings`] reads the environment, [`trace`] writes for the user, [`errno`] keeps the program's; [`sys`] stands in for
//! the standard library. [`note`] tells the version to who reads the file.

#![no_std]
// Hooks are exported, and so used, only outside of tests.
#![cfg_attr(test, allow(dead_code))]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod alone;
mod amount;
mod atomic;
mod barrier;
mod capture;
mod client;
mod cuda;
mod driver;
mod elf;
mod environment;
mod epoch;
mod errno;
mod fullness;
mod futex;
mod gaps;
mod gate;
mod gpu;
mod hooks;
mod info;
mod launcher;
mod library;
mod limit;
mod link;
mod loader;
mod memory;
mod note;
mod own;
mod peers;
mod settings;
mod socket;
mod squeeze;
mod story;
mod sys;
mod threads;
mod trace;
mod turn;
mod visible;
mod work;
