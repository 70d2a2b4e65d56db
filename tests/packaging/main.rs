//! What is installed: the library as a file, units, man pages.

mod documentation;
mod library;
mod systemd;
