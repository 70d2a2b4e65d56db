//! The memory of a GPU: how many bytes each client may have mapped there, and which clients give bytes up for others.
//!
//! Σ charges ≤ capacity, where a client's *charge* is the most that it can have mapped while messages are under way.
//!
//! - `ledger`: each client's account on a GPU, and the sums over all accounts.
//! - `allowance`: raises and lowers allowances: attaching, reports, credit, eviction.
//! - `verification`: frees that clients report and no measurement has confirmed yet.
//! - `unevictable`: memory that cannot leave its GPU for a while.
//! - `reservation`: room for what the driver allocates for itself.
//! - `admission`: clients that are about to create a context.
//! - `shortfall`: mappings that failed although the ledger had room for them.

pub(crate) mod admission;
pub(crate) mod allowance;
pub(crate) mod capacity;
pub(crate) mod ledger;
pub(crate) mod protection;
pub(crate) mod reservation;
pub(crate) mod shortfall;
pub(crate) mod unevictable;
pub(crate) mod verification;
