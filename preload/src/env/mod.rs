//! The environment of the program, and messages to the user.

pub mod amount;
pub mod launcher;
pub mod limits;
pub mod settings;
pub mod trace;
