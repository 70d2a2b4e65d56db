//! Memory of GPUs: who has how much of it, and who may have more.
//!
//! - `ledger`: what each client may have on a GPU and has, and the sums over all of them.

pub(super) mod ledger;
