//! Vectors as eventfds.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// One vector, in one direction. One side notifies; the other watches the descriptor edge-triggered and never reads it,
/// so that a peer, which shares the file description, has nothing to block.
#[derive(Debug)]
pub struct Vector(EventFd);

impl Vector {
    /// A fresh vector.
    pub fn new() -> io::Result<Self> {
        EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Self)
    }

    /// A second handle to the same vector.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Wakes whoever watches the vector.
    ///
    /// A full counter means that the watcher has something to see already, so that is no error.
    pub fn notify(&self) -> io::Result<()> {
        match self.0.write(1) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            other => other,
        }
    }
}

impl From<OwnedFd> for Vector {
    fn from(descriptor: OwnedFd) -> Self {
        // SAFETY: the descriptor is owned, and its ownership moves into the EventFd. Whatever it really refers to,
        // writing eight bytes to it and watching it is memory safe.
        Self(unsafe { EventFd::from_raw_fd(descriptor.into_raw_fd()) })
    }
}

impl AsFd for Vector {
    fn as_fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsRawFd;
        // SAFETY: the EventFd owns the descriptor and lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}
