//! What the environment of the program says, and how this library says something to the user.

pub mod amount;
pub mod launcher;
pub mod limits;
pub mod settings;
pub mod trace;
