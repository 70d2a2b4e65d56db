//! Installed files and documents against the programs: the library as a file, units, manual pages, figures.

mod documentation;
mod figures;
mod library;
mod systemd;
