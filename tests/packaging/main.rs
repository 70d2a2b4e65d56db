//! Installed files and documents against the programs: the library as a file, units, manual pages,
//! figures, the toolchain.

mod copyright;
mod documentation;
mod figures;
mod library;
mod systemd;
mod toolchain;
