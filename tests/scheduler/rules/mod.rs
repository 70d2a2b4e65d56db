//! One test for each rule of the scheduler, written to be read. The tests run in virtual time: with
//! clients that behave as the library does (`World`), or message by message (`Talk`).

mod absent;
mod backfill;
mod contexts;
mod corun;
mod eviction;
mod gangs;
mod limits;
mod turns;
mod undrainable;
mod users;
