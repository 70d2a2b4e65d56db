//! Checks that files and documents match the code: the exports and dependencies of `libnvshare.so`,
//! units, manual pages, figures, the packages' list of crates, and the minimum cargo version.

mod copyright;
mod documentation;
mod figures;
mod library;
mod paths;
mod systemd;
mod toolchain;
