//! A TAP: frames with a `virtio_net_hdr` in front, to and from the kernel's network stack.
//!
//! Source: the kernel's `drivers/net/tun.c` and `Documentation/networking/tuntap.rst`.

use super::Port;
use crate::offload::{Groups, HEADER_LENGTH};
use crate::queue::Pieces;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

/// An open queue of a TAP.
#[derive(Debug)]
pub struct Tap(File);

/// How to open a TAP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapOptions {
    /// The interface has, or is to have, several queues.
    pub multi_queue: bool,
    /// The interface outlives the last descriptor.
    pub persist: bool,
}

impl Tap {
    /// Creates the TAP `name` in the caller's network namespace, or attaches to it.
    ///
    /// `PermissionDenied`: neither CAP_NET_ADMIN nor owner of it, or no access to `/dev/net/tun`. `ResourceBusy`: somebody
    /// else has its queue. `InvalidInput`: it exists and is no TAP, or differs in [`TapOptions::multi_queue`].
    pub fn open(name: &str, options: TapOptions) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
        let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if options.multi_queue {
            flags |= libc::IFF_MULTI_QUEUE;
        }
        let mut request = super::interface::request(name)?;
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        // SAFETY: TUNSETIFF reads and writes one ifreq, which `request` is.
        check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) })?;
        let tap = Self(file);
        tap.set_int(libc::TUNSETVNETHDRSZ, HEADER_LENGTH as libc::c_int)?;
        tap.set_value(libc::TUNSETPERSIST, libc::c_ulong::from(options.persist))?;
        tap.offloads(Groups::NONE)?;
        Ok(tap)
    }

    /// Whether the interface outlives this descriptor.
    pub fn set_persist(&self, persist: bool) -> io::Result<()> {
        self.set_value(libc::TUNSETPERSIST, libc::c_ulong::from(persist))
    }

    /// A second descriptor of the same queue.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Throws away what the kernel has queued; returns how many frames.
    pub fn discard_queued(&mut self) -> u64 {
        let mut count = 0u64;
        let mut nothing = [0; 64];
        // Bounded by twice the longest transmit queue that anybody sets.
        while count < 20_000 && rustix::io::read(&self.0, &mut nothing).is_ok() {
            count = count.saturating_add(1);
        }
        count
    }

    fn offloads(&self, groups: Groups) -> io::Result<()> {
        const TUN_F: [(Groups, libc::c_ulong); 5] = [
            (Groups::CSUM, 0x01),
            (Groups::TSO4, 0x02),
            (Groups::TSO6, 0x04),
            (Groups::ECN, 0x08),
            // TUN_F_USO4 | TUN_F_USO6: the kernel wants both or none.
            (Groups::USO, 0x20 | 0x40),
        ];
        let bits = TUN_F.iter().filter(|(group, _)| groups.contains(*group)).fold(0, |bits, (_, bit)| bits | bit);
        self.set_value(libc::TUNSETOFFLOAD, bits)
    }

    fn set_int(&self, request: libc::Ioctl, value: libc::c_int) -> io::Result<()> {
        // SAFETY: the requests that are used here read one int.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), request, &value) })
    }

    fn set_value(&self, request: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
        // SAFETY: the requests that are used here take their argument by value.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), request, value) })
    }
}

impl Port for Tap {
    fn receive(&mut self, header: &mut [u8; HEADER_LENGTH], room: Pieces<'_>) -> io::Result<usize> {
        let mut vectors = [EMPTY; 3];
        vectors[0] = libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: HEADER_LENGTH };
        let count = fill(&mut vectors, 1, &room);
        // SAFETY: the vectors name `header`, which is borrowed for this call, and pieces of a mapping that `room` borrows;
        // the kernel writes there, and no Rust reference to the pieces exists.
        let length = unsafe { libc::readv(self.0.as_raw_fd(), vectors.as_ptr(), count) };
        let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
        length.checked_sub(HEADER_LENGTH).ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
    }

    fn send(&mut self, front: &[u8], rest: Pieces<'_>) -> io::Result<()> {
        let mut vectors = [EMPTY; 3];
        vectors[0] = libc::iovec { iov_base: front.as_ptr().cast_mut().cast(), iov_len: front.len() };
        let count = fill(&mut vectors, 1, &rest);
        let written = if count == 1 {
            // SAFETY: `front` is borrowed for this call.
            unsafe { libc::write(self.0.as_raw_fd(), front.as_ptr().cast(), front.len()) }
        } else {
            // SAFETY: the vectors name `front` and pieces of a mapping that `rest` borrows; the kernel only reads them.
            unsafe { libc::writev(self.0.as_raw_fd(), vectors.as_ptr(), count) }
        };
        if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn readiness(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }

    fn set_offloads(&mut self, groups: Groups) -> io::Result<Groups> {
        match self.offloads(groups) {
            // A kernel before 6.2 knows no USO, and says so in this way.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && groups.contains(Groups::USO) => {
                let groups = groups.without(Groups::USO);
                self.offloads(groups).map(|()| groups)
            }
            other => other.map(|()| groups),
        }
    }

    fn set_carrier(&mut self, up: bool) -> io::Result<()> {
        /// `_IOW('T', 226, int)`, see the kernel's `include/uapi/linux/if_tun.h`.
        const TUNSETCARRIER: libc::Ioctl = 0x4004_54e2;
        self.set_int(TUNSETCARRIER, libc::c_int::from(up))
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Tap {
    fn from(descriptor: OwnedFd) -> Self {
        Self(File::from(descriptor))
    }
}

const EMPTY: libc::iovec = libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };

fn fill(vectors: &mut [libc::iovec; 3], mut count: usize, pieces: &Pieces<'_>) -> libc::c_int {
    for piece in pieces.iter().flatten() {
        // The guard ends here and the pointer does not: with vm-memory's mmap backend, the only one in use, the mapping lives
        // as long as what `pieces` borrows.
        if let Some(vector) = vectors.get_mut(count) {
            *vector = libc::iovec { iov_base: piece.ptr_guard_mut().as_ptr().cast(), iov_len: piece.len() };
            count = count.saturating_add(1);
        }
    }
    count as libc::c_int
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
