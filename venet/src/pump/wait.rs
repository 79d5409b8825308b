//! How a pump sleeps: one epoll instance, edge-triggered, so that nothing is ever read to be reset, and nothing that
//! cannot be served just now keeps the pump awake.

use core::mem::MaybeUninit;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vbus::connector::notifier::Vector;

/// Something besides frames that a pump's thread waits for.
pub trait Attention {
    /// What to watch. Readable, or at its end, means attention.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

impl Attention for OwnedFd {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

impl Attention for Vector {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

/// Stops a pump, or makes it look at something, from another thread.
#[derive(Clone, Debug)]
pub struct Waker(Arc<(Vector, AtomicBool)>);

impl Waker {
    /// A waker for one pump.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new((Vector::new()?, AtomicBool::new(false)))))
    }

    /// Makes the pump's `run` return.
    pub fn wake(&self) -> io::Result<()> {
        self.0.0.notify()
    }

    /// Makes the pump's thread end.
    pub fn stop(&self) -> io::Result<()> {
        // Release: what the caller wrote before is seen by the thread that sees the flag.
        self.0.1.store(true, Ordering::Release);
        self.wake()
    }

    /// Whether the thread is to end.
    pub fn stopped(&self) -> bool {
        // Acquire: see `stop`.
        self.0.1.load(Ordering::Acquire)
    }
}

impl Attention for Waker {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

/// Why a sleep ended.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Woken {
    /// The port can be read or written.
    pub(super) port: bool,
    /// The other side notified us.
    pub(super) notified: bool,
    /// Something that is watched is ready.
    pub(super) attention: bool,
}

#[derive(Debug)]
pub(super) struct Waiter {
    epoll: OwnedFd,
}

const NOTIFIED: u64 = 0;
const PORT: u64 = 1;
const ATTENTION: u64 = 2;

impl Waiter {
    pub(super) fn new(notified: &Vector, port: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let waiter = Self { epoll: epoll::create(CreateFlags::CLOEXEC)? };
        waiter.add(notified.as_fd(), NOTIFIED, EventFlags::IN)?;
        if let Some(port) = port {
            waiter.add(port, PORT, EventFlags::IN | EventFlags::OUT)?;
        }
        Ok(waiter)
    }

    pub(super) fn watch(&self, attention: &impl Attention) -> io::Result<()> {
        self.add(attention.descriptor(), ATTENTION, EventFlags::IN | EventFlags::RDHUP)
    }

    /// What happened so far.
    pub(super) fn look(&mut self) -> io::Result<Woken> {
        self.wait(Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))
    }

    /// Blocks until something happens. There is no time-out: nothing on the data path is driven by a timer.
    pub(super) fn sleep(&mut self) -> io::Result<Woken> {
        self.wait(None)
    }

    fn add(&self, descriptor: BorrowedFd<'_>, what: u64, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, descriptor, EventData::new_u64(what), flags | EventFlags::ET)?)
    }

    fn wait(&mut self, timeout: Option<&rustix::event::Timespec>) -> io::Result<Woken> {
        let mut space = [const { MaybeUninit::<Event>::uninit() }; 8];
        let events = match epoll::wait(&self.epoll, &mut space, timeout) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => &mut [],
            Err(error) => return Err(error.into()),
        };
        let mut woken = Woken::default();
        for event in events {
            match event.data.u64() {
                NOTIFIED => woken.notified = true,
                PORT => woken.port = true,
                _ => woken.attention = true,
            }
        }
        Ok(woken)
    }
}
