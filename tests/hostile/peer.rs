//! The scheduler's end of the socket, without a scheduler. It accepts connections and sends any
//! bytes, and never blocks.

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nvshare_wire::{ClientMessage, MAX_LEN};

/// A listening socket. Its path is removed when this value is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
}

impl Listener {
    pub fn new(path: &Path) -> Self {
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory for the socket");
        let _ = fs::remove_file(path);
        // SAFETY: all zeros is a valid address.
        let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        let bytes = path.as_os_str().as_bytes();
        assert!(bytes.len() < address.sun_path.len(), "{} is too long for a socket", path.display());
        for (to, from) in address.sun_path.iter_mut().zip(bytes) {
            *to = *from as _;
        }
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: a non-negative descriptor is new and owned here, and `address` has `len` bytes.
        unsafe {
            let socket = libc::socket(libc::AF_UNIX, kind, 0);
            assert!(socket >= 0, "a socket: {}", io::Error::last_os_error());
            let socket = OwnedFd::from_raw_fd(socket);
            let len = mem::size_of_val(&address) as libc::socklen_t;
            let bound = libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len);
            assert!(bound == 0 && libc::listen(socket.as_raw_fd(), 16) == 0, "{}", io::Error::last_os_error());
            Self { socket, path: path.to_owned() }
        }
    }

    pub fn accept(&self) -> Option<Connection> {
        let (none, flags) = (std::ptr::null_mut(), libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
        // SAFETY: the null pointers ask for no address, and a non-negative descriptor is new and
        // owned here.
        unsafe {
            let socket = libc::accept4(self.socket.as_raw_fd(), none, std::ptr::null_mut(), flags);
            (socket >= 0).then(|| Connection { socket: OwnedFd::from_raw_fd(socket), version: 1 })
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    /// The agreed version.
    pub version: u16,
}

/// The result of a receive.
#[derive(Debug)]
pub enum Received {
    Nothing,
    Message(ClientMessage),
    /// The client has closed the connection.
    End,
}

impl Connection {
    /// Sends one packet. Fails if the client's socket is full or closed.
    pub fn send(&self, packet: &[u8]) -> bool {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: `packet` is valid for reads of `packet.len()` bytes.
        unsafe { libc::send(self.socket.as_raw_fd(), packet.as_ptr().cast(), packet.len(), flags) >= 0 }
    }

    /// Like [`send`](Self::send), with `count` descriptors of /dev/null.
    pub fn send_with(&self, packet: &[u8], count: usize) -> bool {
        #[repr(C, align(8))]
        struct Control([u8; 16 + 4 * 64]);
        let file = fs::File::open("/dev/null").expect("a file");
        let mut control = Control([0; _]);
        let mut part = libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
        // SAFETY: the buffers outlive the call, and `control` has room for 64 descriptors, more
        // than any caller sends.
        unsafe {
            let bytes = 4 * count as u32;
            let mut message: libc::msghdr = mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(bytes) as _;
            let header = &mut *libc::CMSG_FIRSTHDR(&message);
            (header.cmsg_level, header.cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
            header.cmsg_len = libc::CMSG_LEN(bytes) as _;
            let data = libc::CMSG_DATA(header).cast::<i32>();
            (0..count).for_each(|i| data.add(i).write_unaligned(file.as_raw_fd()));
            libc::sendmsg(self.socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) >= 0
        }
    }

    /// Receives a message. The message must be well-formed, whatever the client has received.
    pub fn receive(&self) -> Received {
        let mut buffer = [0u8; 2 * MAX_LEN];
        // SAFETY: `buffer` is valid for writes of `buffer.len()` bytes.
        let len = unsafe {
            libc::recv(self.socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT)
        };
        match len {
            0 => Received::End,
            len if len > 0 => match ClientMessage::decode(&buffer[..len as usize], self.version) {
                Ok(message) => Received::Message(message),
                Err(e) => panic!("the library sent {:?}: {e}", &buffer[..len as usize]),
            },
            _ => match io::Error::last_os_error().kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Received::Nothing,
                _ => Received::End,
            },
        }
    }
}
