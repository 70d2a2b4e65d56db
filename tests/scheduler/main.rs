//! The scheduler's tests, in virtual time. `World` has clients that behave as the library does.
//! `Talk` sends single messages.

mod accounting;
mod adaptive;
mod ahead;
mod env_limits;
mod explain;
mod foreign;
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
mod views;
mod worlds;
