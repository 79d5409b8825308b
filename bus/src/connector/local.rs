//! The `local` connector: a UNIX socket passes the window and the vectors; its end of file is the death of the peer.
//!
//! The guest sends one [`ClientHello`]; the host answers with one [`ServerHello`], and, if it accepts, with the window,
//! all doorbells and all interrupts as descriptors, in this order. After that nothing is sent; the socket stays open for
//! as long as the connection lives. It is a `SOCK_SEQPACKET` socket, so a message is never in pieces.

use super::notifier::Vector;
use crate::abi::{ABI_MAJOR, ABI_MINOR};
use crate::message::{CALL_DATA_LENGTH, decode_name};
use crate::window::{Window, WindowError};
use core::mem::{MaybeUninit, offset_of, size_of};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use thiserror::Error;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// First eight bytes of both hellos: `VBUSHELO`.
pub const HELLO_MAGIC: u64 = u64::from_le_bytes(*b"VBUSHELO");
/// Most vectors in one direction that a connection can have.
pub const MOST_VECTORS: u32 = 32;

/// What the guest sends.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ClientHello {
    /// [`HELLO_MAGIC`].
    pub magic: u64,
    /// Of the guest.
    pub abi_major: u16,
    /// Of the guest.
    pub abi_minor: u16,
    /// Zero.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<ClientHello>() == 16);
    assert!(offset_of!(ClientHello, magic) == 0);
    assert!(offset_of!(ClientHello, abi_major) == 8);
    assert!(offset_of!(ClientHello, abi_minor) == 10);
    assert!(offset_of!(ClientHello, reserved) == 12);
};

/// What the host answers.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ServerHello {
    /// [`HELLO_MAGIC`].
    pub magic: u64,
    /// 1 if the host accepts, 0 if it refuses.
    pub accepted: u32,
    /// Of the host.
    pub abi_major: u16,
    /// Of the host.
    pub abi_minor: u16,
    /// How many doorbell descriptors follow the window's.
    pub doorbells: u32,
    /// How many interrupt descriptors follow those.
    pub interrupts: u32,
    /// Why the host refuses, for people; padded with zeroes.
    pub reason: [u8; 2 * CALL_DATA_LENGTH],
}

const _: () = {
    assert!(size_of::<ServerHello>() == 152);
    assert!(offset_of!(ServerHello, magic) == 0);
    assert!(offset_of!(ServerHello, accepted) == 8);
    assert!(offset_of!(ServerHello, abi_major) == 12);
    assert!(offset_of!(ServerHello, abi_minor) == 14);
    assert!(offset_of!(ServerHello, doorbells) == 16);
    assert!(offset_of!(ServerHello, interrupts) == 20);
    assert!(offset_of!(ServerHello, reason) == 24);
};

/// Why no connection came about.
#[derive(Debug, Error)]
pub enum ConnectError {
    /// The socket could not be used.
    #[error("{0}")]
    Socket(#[from] io::Error),
    /// The two ABIs do not fit.
    #[error(
        "ABI versions do not fit: the host speaks {host_major}.{host_minor}, the guest {guest_major}.{guest_minor}; use releases with the same major version"
    )]
    Version {
        /// Of the host.
        host_major: u16,
        /// Of the host.
        host_minor: u16,
        /// Of the guest.
        guest_major: u16,
        /// Of the guest.
        guest_minor: u16,
    },
    /// The host refused for another reason.
    #[error("the host refused the connection: {0}")]
    Refused(String),
    /// The other end does not speak this protocol.
    #[error("the other end of the socket does not speak the vbus handshake")]
    NotVbus,
    /// The window is not usable.
    #[error(transparent)]
    Window(#[from] WindowError),
}

/// A guest's end of a connection.
#[derive(Debug)]
pub struct Connection {
    /// End of file here is the death of the host.
    pub socket: OwnedFd,
    /// The window.
    pub window: Window,
    /// Notify the host.
    pub doorbells: Vec<Vector>,
    /// The host notifies us.
    pub interrupts: Vec<Vector>,
}

/// Connects to a host at `path` and completes the handshake. Blocks for at most as long as the host takes to answer.
/// For the guest.
pub fn connect(path: &Path) -> Result<Connection, ConnectError> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(io::Error::from)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).map_err(io::Error::from)?).map_err(io::Error::from)?;
    let timeout = Some(core::time::Duration::from_secs(5));
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, timeout)
        .map_err(io::Error::from)?;
    let hello = ClientHello { magic: HELLO_MAGIC, abi_major: ABI_MAJOR, abi_minor: ABI_MINOR, reserved: 0 };
    rustix::net::send(&socket, hello.as_bytes(), SendFlags::NOSIGNAL).map_err(io::Error::from)?;
    let mut answer = ServerHello::new_zeroed();
    let (length, descriptors) = receive(socket.as_fd(), answer.as_mut_bytes(), RecvFlags::empty())?;
    if length != size_of::<ServerHello>() || answer.magic != HELLO_MAGIC {
        return Err(ConnectError::NotVbus);
    }
    if answer.abi_major != ABI_MAJOR {
        return Err(version_error(&hello, answer.abi_major, answer.abi_minor));
    }
    if answer.accepted != 1 {
        return Err(ConnectError::Refused(decode_name(&answer.reason)));
    }
    let doorbells = answer.doorbells as usize;
    let expected = doorbells.checked_add(answer.interrupts as usize).and_then(|vectors| vectors.checked_add(1));
    if expected != Some(descriptors.len()) || doorbells == 0 || answer.interrupts == 0 {
        return Err(ConnectError::NotVbus);
    }
    let mut descriptors = descriptors.into_iter();
    let window = Window::open(descriptors.next().ok_or(ConnectError::NotVbus)?)?;
    let doorbells = descriptors.by_ref().take(doorbells).map(Vector::from).collect();
    let interrupts = descriptors.map(Vector::from).collect();
    Ok(Connection { socket, window, doorbells, interrupts })
}

/// Takes a guest's hello from a connected socket without waiting, and checks it. For the host.
///
/// `WouldBlock` means that the hello has not arrived yet. Surplus descriptors are closed. A guest of another ABI gets the
/// refusal that names both versions, as does the caller.
pub fn take_hello(socket: BorrowedFd<'_>) -> Result<ClientHello, ConnectError> {
    let mut hello = ClientHello::new_zeroed();
    let (length, _surplus) = receive(socket, hello.as_mut_bytes(), RecvFlags::DONTWAIT)?;
    if length != size_of::<ClientHello>() || hello.magic != HELLO_MAGIC {
        refuse(socket, "this socket speaks the vbus handshake");
        return Err(ConnectError::NotVbus);
    }
    if hello.abi_major != ABI_MAJOR {
        let error = version_error(&hello, ABI_MAJOR, ABI_MINOR);
        refuse(socket, &error.to_string());
        return Err(error);
    }
    Ok(hello)
}

/// Tells the guest why it is refused. Errors are ignored: the socket is closed next.
pub fn refuse(socket: BorrowedFd<'_>, reason: &str) {
    let mut answer = server_hello(0, 0, 0);
    answer.reason.iter_mut().zip(reason.bytes()).for_each(|(to, from)| *to = from);
    let _ = rustix::net::send(socket, answer.as_bytes(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// Accepts the guest: passes the window and the vectors. Never blocks. For the host.
pub fn accept(
    socket: BorrowedFd<'_>,
    window: BorrowedFd<'_>,
    doorbells: &[Vector],
    interrupts: &[Vector],
) -> Result<(), ConnectError> {
    let answer = server_hello(1, doorbells.len() as u32, interrupts.len() as u32);
    let vectors = doorbells.iter().chain(interrupts).map(AsFd::as_fd);
    let descriptors: Vec<BorrowedFd<'_>> = core::iter::once(window).chain(vectors).collect();
    send(socket, answer.as_bytes(), &descriptors)?;
    Ok(())
}

/// Sends one message with descriptors, without waiting.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); ANCILLARY_SPACE];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
    Ok(())
}

/// Receives one message and the descriptors that came with it.
pub fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8], flags: RecvFlags) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); ANCILLARY_SPACE];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok((received.bytes, descriptors))
}

/// Room for the window and [`MOST_VECTORS`] in both directions.
const ANCILLARY_SPACE: usize = rustix::cmsg_space!(ScmRights(65));

fn server_hello(accepted: u32, doorbells: u32, interrupts: u32) -> ServerHello {
    ServerHello {
        magic: HELLO_MAGIC,
        accepted,
        abi_major: ABI_MAJOR,
        abi_minor: ABI_MINOR,
        doorbells,
        interrupts,
        reason: [0; 2 * CALL_DATA_LENGTH],
    }
}

fn version_error(guest: &ClientHello, host_major: u16, host_minor: u16) -> ConnectError {
    ConnectError::Version { host_major, host_minor, guest_major: guest.abi_major, guest_minor: guest.abi_minor }
}
