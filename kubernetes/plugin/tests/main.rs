//! Tests of the device plugin, of its page and of its protocol.

mod documentation;
mod garbage;
mod health;
mod kubelet;
mod protocol;
mod support;
