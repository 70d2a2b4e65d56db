//! Requests to `nvshare-hibernate` and its answers. Each request and each answer is one packet of JSON
//! over the `SOCK_SEQPACKET` socket that is the program's standard input. Both sides are installed
//! together, so only one version of the packets is supported.
//!
//! Closing the socket for writing, or completely, cancels a request, unless its image is already complete
//! or its program is already restored. The reply then says which.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::time::Duration;

/// Maximum length of a packet in bytes.
pub const MAX_PACKET: usize = 128 << 10;
/// Maximum number of images in an answer. Each takes at most 1 KiB of a packet.
pub const MAX_LISTED: usize = 100;
/// Part of the record of an image that may be restored and was not.
pub const SAVED_RECORD: &str = r#""stage":"Saved""#;
/// Time that the helper waits for a request before it exits.
pub const IDLE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Checks whether a program can be saved, and prepares its image. Carries a pidfd of its process, which is the root of the
    /// tree of processes to save, and must belong to this user. `clients`: the clients of the scheduler that
    /// stay connected. None of them may be in the tree. `gpus`: the kind of each GPU that the program has used.
    /// `closes_connections`: the restore closes its network connections. Otherwise, none may exist.
    Check { uid: u32, clients: Vec<i32>, gpus: Vec<String>, closes_connections: bool },
    /// Saves the program that the latest `Check` has accepted, and ends it. Its client has left the
    /// scheduler.
    Save,
    /// Restores a program from an image of this user. `gpus`: the kinds of this host's GPUs; empty if
    /// they are not known.
    Restore { uid: u32, image: String, gpus: Vec<String> },
    /// Lists everything that this host lacks for a restore of an image of this user, and starts nothing.
    Compare { uid: u32, image: String, gpus: Vec<String> },
    /// Lists the images of this user, or of all users, the newest first, after the first `skip` images.
    /// An answer with fewer images than [`MAX_LISTED`] is the last one.
    List { uid: Option<u32>, skip: usize },
    /// Lists the image with this name, if it exists.
    Find { image: String },
    /// Records that the program of an image of this user may run on this other host from now on.
    Send { uid: u32, image: String, host: String },
    /// Records that the program of an image that was sent does not run on the other host.
    Claim { uid: u32, image: String },
    /// Deletes an image of this user.
    Delete { uid: u32, image: String },
    /// Continues or ends the processes that a killed helper has left stopped. Every helper does so when
    /// it starts. The answer is [`Reply::Busy`] while CRIU or another helper is at work.
    Settle,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Saved {
        image: Image,
    },
    Restored {
        pid: i32,
    },
    Images(Vec<Image>),
    /// What this host lacks, each with the remedy.
    Lacks(Vec<String>),
    Busy,
    /// The reason why the request was not carried out, in words for the user. A program that was to be
    /// saved continues.
    Refused(String),
}

/// An image, as its signed manifest describes it, or its record if it is not complete.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    pub name: String,
    pub uid: u32,
    /// The name of the program.
    pub program: String,
    /// When the program was saved, in seconds since 1970.
    pub saved: u64,
    /// Size of the image in bytes, as far as it was written.
    pub bytes: u64,
    pub place: Place,
    /// Why the image cannot be used.
    pub damage: Option<String>,
}

/// Where the program of an image is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// In this process. The image is being written, and will have about `expected` bytes.
    Saving { process: i32, expected: u64 },
    /// In the image.
    #[default]
    Image,
    /// In this process, which was restored from the image.
    Process(i32),
    /// The process that was restored from the image has ended. The image can be restored again.
    Ended,
    /// In the image, or on this host, which got a copy.
    Sent(String),
    /// An operation is in progress, or has to be finished.
    Unfinished,
}

/// Part of the record of an image that was sent to this host.
pub fn sent_record(host: &str) -> String {
    format!(r#""stage":{{"Sent":{{"host":"{host}"}}}}"#)
}

/// Free space, in bytes, that images leave on a disk of this size.
pub fn reserve(disk: u64) -> u64 {
    (4 << 30).min(disk / 10)
}

impl Image {
    /// The bytes that the image takes, or will take when it is complete.
    pub fn room(&self) -> u64 {
        match self.place {
            Place::Saving { expected, .. } => self.bytes.max(expected),
            _ => self.bytes,
        }
    }
}

/// Encodes a [`Request`] or a [`Reply`].
pub fn encode(value: &impl Serialize) -> Vec<u8> {
    // These types have only string keys, so encoding cannot fail.
    serde_json::to_vec(value).unwrap_or_default()
}

/// Decodes a [`Request`] or a [`Reply`]. Returns `None` if the packet is something else, or
/// comes from another version.
pub fn decode<T: DeserializeOwned>(packet: &[u8]) -> Option<T> {
    serde_json::from_slice(packet).ok()
}
