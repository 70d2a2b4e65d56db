//! Images that are sent to another host.
//!
//! The image is copied while it is [`Stage::Saved`]. Then both hosts' records say [`Stage::Sent`], so neither
//! restores it by itself, whatever is cut off or killed. The sender orders the other host to claim and restore
//! it. If the sender gets no answer, the program may run there, and only a user can say that it does not.

use crate::{Refusal, record::Stage, store::Entry};
use nvshare_hibernate::Reply;
use std::io;

/// Maximum length of a host's name.
const MAX_HOST: usize = 255;

impl Entry {
    /// Checks that the program is the image, so that it may be restored.
    ///
    /// # Errors
    /// The place where the program is, or may be.
    pub fn check_restorable(&self) -> Result<(), Refusal> {
        let image = &self.name;
        let words = |e: io::Error| Refusal::new(format!("cannot read the record of image {image}: {e}"));
        let stage = self.stage().map_err(words)?;
        if let Some(pid) = stage.process() {
            return Err(Refusal::new(format!("image {image} was restored, and runs as process {pid}")));
        }
        match stage {
            Stage::Saved | Stage::Restored { .. } => Ok(()),
            Stage::Sent { host } => Err(Refusal::new(format!(
                "image {image} was sent to {host}, where its program may run. If it does not, run: nvsharectl restore \
                 --sent {image}"
            ))),
            _ => Err(Refusal::new(format!("image {image} is not complete, or an attempt is not finished"))),
        }
    }

    /// Records that the program may run on another host from now on.
    ///
    /// # Errors
    /// The program runs here, or may run on a third host, or the record cannot be written.
    pub fn send(&self, uid: u32, host: String) -> Result<Reply, Refusal> {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || ".-_:[]".contains(c);
        if host.is_empty() || host.len() > MAX_HOST || host.starts_with('-') || !host.chars().all(is_allowed) {
            return Err(Refusal::new(format!("{host:?} is not the name of a host")));
        }
        if matches!(self.stage(), Ok(Stage::Sent { host: known }) if known == host) {
            return Ok(Reply::Done);
        }
        self.check_restorable()?;
        self.write(uid, &Stage::Sent { host })
    }

    /// Records that the program does not run on the other host, by an order.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn claim(&self, uid: u32) -> Result<Reply, Refusal> {
        match self.stage() {
            Ok(Stage::Sent { .. }) => self.write(uid, &Stage::Saved),
            // A restore says what is wrong otherwise.
            _ => Ok(Reply::Done),
        }
    }

    fn write(&self, uid: u32, stage: &Stage) -> Result<Reply, Refusal> {
        let words = |e: io::Error| Refusal::new(format!("cannot write the record of image {}: {e}", self.name));
        self.record(uid, stage).map(|()| Reply::Done).map_err(words)
    }
}
