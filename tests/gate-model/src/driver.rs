//! The driver's types.

#[path = "../../../preload/src/driver/types.rs"]
pub mod types;
