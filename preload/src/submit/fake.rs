//! Work on a GPU of the fake driver.

use super::Work;
use crate::{
    driver::{fake::Driver, types::*},
    submit,
};
use alloc::boxed::Box;

/// Returns work without submissions, and its only context, which is current.
pub fn new(driver: &Driver) -> (&'static Work, CUcontext) {
    submit::set_active(true);
    let work = Box::leak(Box::new(Work::new()));
    let context = driver.new_context(0);
    work.add_context(context);
    driver.set_current(context);
    (work, context)
}
