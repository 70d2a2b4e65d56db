//! The scheduler's tests, in virtual time: with clients that behave as the library does (`World`), or message by message
//! (`Talk`).

mod accounting;
mod adaptive;
mod ahead;
mod env_limits;
mod explain;
mod gangs;
mod memory;
mod moves;
mod moving_turns;
mod placement;
mod presence;
mod properties;
mod rooms;
mod rules;
mod shares;
mod sleep;
mod talk;
mod worlds;
