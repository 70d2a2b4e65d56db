//! Tests of the device plugin, its man page and its protocol.

mod documentation;
mod dra;
mod garbage;
mod health;
mod kubelet;
mod protocol;
mod support;
