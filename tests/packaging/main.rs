//! Compares installed files and documents with the programs: the library as a file, units, manual
//! pages, figures, and the toolchain.

mod copyright;
mod documentation;
mod figures;
mod library;
mod paths;
mod systemd;
mod toolchain;
