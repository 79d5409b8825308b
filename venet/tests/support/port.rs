//! A port like a TAP, whose answers a test writes down beforehand.

use rustix::fd::{AsFd, BorrowedFd};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use vbus::connector::notifier::Vector;
use venet::offload::{Groups, HEADER_LENGTH};
use venet::port::Port;
use venet::queue::Pieces;

use super::{Frame, PATIENCE};

/// What a port does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Sent,
    Received,
}

/// What a port is to do, and what it did.
#[derive(Default)]
pub struct Script {
    /// What the next calls of `receive` answer: a frame or an errno. Empty: `WouldBlock`.
    pub incoming: VecDeque<Result<Frame, i32>>,
    /// Each `receive` that would answer `WouldBlock` answers with a small frame instead.
    pub endless: bool,
    /// What the next calls of `send` answer: 0 for success, or an errno. Empty: success.
    pub answers: VecDeque<i32>,
    /// `send` answers `WouldBlock`.
    pub full: bool,
    /// How often it did.
    pub refused: u64,
    /// Frames that were sent.
    pub sent: Vec<Frame>,
    /// Everything in the order in which it happened.
    pub events: Vec<Event>,
    pub carriers: Vec<bool>,
    pub offloads: Vec<Groups>,
    /// Groups that the port does not accept.
    pub unknown_offloads: Groups,
    /// The next calls of `set_offloads` fail.
    pub failing_offloads: u32,
    /// Frames that may still pass before the next one has to wait for more; none: as many as come.
    pub sends_before_gate: Option<u64>,
    pub receives_before_gate: Option<u64>,
}

struct Inner {
    script: Mutex<Script>,
    changed: Condvar,
    ready: Vector,
}

/// The test's end.
#[derive(Clone)]
pub struct Handle(Arc<Inner>);

/// The pump's end.
pub struct ScriptedPort {
    inner: Arc<Inner>,
    /// In place of a descriptor that can be waited for.
    pub useless: Arc<Mutex<Option<Arc<File>>>>,
    kept: Option<Arc<File>>,
}

pub fn scripted() -> (ScriptedPort, Handle) {
    let inner = Arc::new(Inner { script: Mutex::default(), changed: Condvar::new(), ready: Vector::new().unwrap() });
    (ScriptedPort { inner: Arc::clone(&inner), useless: Arc::default(), kept: None }, Handle(inner))
}

impl Handle {
    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.0.script.lock().unwrap()
    }

    /// Makes the port readable and writable again, as far as the pump is told.
    pub fn wake(&self) {
        self.0.changed.notify_all();
        self.0.ready.notify().unwrap();
    }

    /// Frames come in.
    pub fn arrive(&self, frames: impl IntoIterator<Item = Frame>) {
        self.script().incoming.extend(frames.into_iter().map(Ok));
        self.wake();
    }

    /// Waits until so many frames were sent.
    pub fn sent(&self, count: usize) -> Vec<Frame> {
        super::until(&format!("{count} frames at the port"), || self.script().sent.len() >= count);
        self.script().sent.clone()
    }
}

impl ScriptedPort {
    /// Takes one from a number of frames, waiting for more.
    fn gate(&self, gate: fn(&mut Script) -> &mut Option<u64>) -> MutexGuard<'_, Script> {
        let script = self.inner.script.lock().unwrap();
        let closed = |script: &mut Script| *gate(script) == Some(0);
        let (mut script, _) = self.inner.changed.wait_timeout_while(script, PATIENCE * 2, closed).unwrap();
        if let Some(left) = gate(&mut script) {
            *left = left.saturating_sub(1);
        }
        script
    }
}

impl Port for ScriptedPort {
    fn receive(&mut self, header: &mut [u8; HEADER_LENGTH], room: Pieces<'_>) -> io::Result<usize> {
        let empty = |script: &Script| script.incoming.is_empty() && !script.endless;
        if empty(&self.inner.script.lock().unwrap()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut script = self.gate(|script| &mut script.receives_before_gate);
        let next = match script.incoming.pop_front() {
            None if script.endless => Ok((super::PLAIN, super::frame(60, 0))),
            next => next.ok_or(io::ErrorKind::WouldBlock)?,
        };
        let (claimed, bytes) = next.map_err(io::Error::from_raw_os_error)?;
        script.events.push(Event::Received);
        *header = claimed;
        let mut rest = bytes.as_slice();
        for piece in room.into_iter().flatten() {
            let (now, later) = rest.split_at(rest.len().min(piece.len()));
            piece.copy_from(now);
            rest = later;
        }
        // As much as there was room for: the frame may have been longer.
        Ok(bytes.len() - rest.len())
    }

    fn send(&mut self, front: &[u8], rest: Pieces<'_>) -> io::Result<()> {
        let mut script = self.gate(|script| &mut script.sends_before_gate);
        if script.full {
            script.refused += 1;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        match script.answers.pop_front() {
            None | Some(0) => {}
            Some(errno) => return Err(io::Error::from_raw_os_error(errno)),
        }
        let (header, bytes) = front.split_at(HEADER_LENGTH);
        let mut bytes = bytes.to_vec();
        for piece in rest.into_iter().flatten() {
            let start = bytes.len();
            bytes.resize(start + piece.len(), 0);
            piece.copy_to(&mut bytes[start..]);
        }
        script.events.push(Event::Sent);
        script.sent.push((header.try_into().unwrap(), bytes));
        Ok(())
    }

    fn readiness(&self) -> Option<BorrowedFd<'_>> {
        Some(self.kept.as_ref().map_or(self.inner.ready.as_fd(), |file| file.as_fd()))
    }

    fn set_offloads(&mut self, groups: Groups) -> io::Result<Groups> {
        self.kept = self.useless.lock().unwrap().clone();
        let mut script = self.inner.script.lock().unwrap();
        script.offloads.push(groups);
        if script.failing_offloads > 0 {
            script.failing_offloads -= 1;
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(groups.without(script.unknown_offloads))
    }

    fn set_carrier(&mut self, up: bool) -> io::Result<()> {
        self.inner.script.lock().unwrap().carriers.push(up);
        Ok(())
    }
}
