//! Tests of the device plugin, of its page and of its protocol.

mod documentation;
mod dra;
mod garbage;
mod health;
mod kubelet;
mod protocol;
mod support;
