//! Waiting for the host on vector 0, with an end.

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use vbus::connector::local::Connection;
use vbus::north::Vector0;

/// Rings the host and waits for it; a host that is gone, or silent for 5 s, is an error.
#[derive(Debug)]
pub struct VectorWait<'a> {
    connection: &'a Connection,
    epoll: OwnedFd,
}

const INTERRUPT: u64 = 0;
const SOCKET: u64 = 1;

impl<'a> VectorWait<'a> {
    /// For one connection.
    pub fn new(connection: &'a Connection) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let flags = EventFlags::IN | EventFlags::ET;
        if let Some(interrupt) = connection.interrupts.first() {
            epoll::add(&epoll, interrupt.as_fd(), EventData::new_u64(INTERRUPT), flags)?;
        }
        epoll::add(&epoll, &connection.socket, EventData::new_u64(SOCKET), EventFlags::RDHUP | EventFlags::IN)?;
        Ok(Self { connection, epoll })
    }
}

impl Vector0 for VectorWait<'_> {
    fn ring(&mut self) -> io::Result<()> {
        self.connection.doorbells.first().map_or(Ok(()), |doorbell| doorbell.notify())
    }

    fn wait(&mut self) -> io::Result<()> {
        let mut space = [const { MaybeUninit::<Event>::uninit() }; 2];
        let timeout = Timespec { tv_sec: 5, tv_nsec: 0 };
        let (events, _) = epoll::wait(&self.epoll, &mut space, Some(&timeout))?;
        if events.is_empty() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the host does not answer on the bus"));
        }
        if events.iter().any(|event| event.data.u64() == SOCKET) {
            return Err(io::Error::new(io::ErrorKind::ConnectionReset, "the host closed the connection"));
        }
        Ok(())
    }
}
