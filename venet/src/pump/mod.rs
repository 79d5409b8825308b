//! The loop that moves frames between a queue and a port.
//!
//! It drains both directions up to budgets and asks for no notification while there is progress. When there is nothing
//! to do it arms, looks again, and only then blocks. Generic over its queue and its port; the same pump runs on both
//! sides of a window. Every frame taken from the queue has exactly one fate: sent, or dropped and counted.

pub mod back_pressure;
pub mod placement;
pub mod policy;
mod wait;

pub use wait::{Attention, Waker};

use crate::abi::{KIND_FRAME, KIND_LINK, LARGEST_RECORD, LinkState};
use crate::counters::{Counters, DropReason};
use crate::frame::{self, FRONT_LENGTH, Limits};
use crate::offload::{Groups, HEADER_LENGTH, OffloadHeader, complete_checksum};
use crate::port::Port;
use crate::queue::{Pieces, Queue};
use back_pressure::BackPressure;
use policy::Policy;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;
use vbus::connector::notifier::Vector;
use vbus::ring::Violation;
use wait::Waiter;
use zerocopy::{FromBytes, IntoBytes};

/// Frames per direction and pass, so that neither direction starves the other.
pub const FRAME_BUDGET: u32 = 64;
/// Bytes per direction and pass: four of the largest frames.
pub const BYTE_BUDGET: u64 = 4 * LARGEST_RECORD;
/// Space is given back after this many bytes at the latest, so that a fast sender need not wait for the pass to end.
const COMMIT_BYTES: u64 = LARGEST_RECORD;
/// Passes between two looks at what else needs attention, under load.
const PASSES_WITHOUT_LOOK: u32 = 16;

/// Why a pump stopped.
#[derive(Debug, Error)]
pub enum PumpError {
    /// The other side broke the ring protocol: quarantine.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The port is gone.
    #[error("the port failed: {0}")]
    Port(io::Error),
    /// Waiting or notifying failed.
    #[error("cannot wait or notify: {0}")]
    Wait(#[from] io::Error),
}

/// What a pump works with, besides its queue and port.
#[derive(Debug)]
pub struct PumpConfig {
    /// What was agreed on.
    pub limits: Limits,
    /// When to notify.
    pub policy: Policy,
    /// Whether to limit the bytes on their way to the other side by its drain time.
    pub back_pressure: bool,
    /// Notifies the other side.
    pub notify: Vector,
    /// The other side notifies us.
    pub notified: Vector,
    /// Where to count.
    pub counters: Arc<Counters>,
}

/// Moves frames between one queue and one port, in one thread.
#[derive(Debug)]
pub struct Pump<Q, P> {
    queue: Q,
    port: P,
    config: PumpConfig,
    waiter: Waiter,
    back_pressure: Option<BackPressure>,
    epoch: Instant,
    /// The offload header and the front of the frame that is being sent.
    front: [u8; HEADER_LENGTH + FRONT_LENGTH],
    /// The port took no more; nothing is sent until it says that it does again.
    port_full: bool,
    /// Why nothing is read from the port.
    hold: Hold,
    link_to_tell: Option<LinkState>,
    link_told: Option<LinkState>,
    passes: u32,
}

/// Why nothing is read from the port just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    No,
    /// The ring has no room for a frame.
    RingFull,
    /// Enough bytes are on their way.
    Enough(u64),
}

/// What one direction of one pass came to.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    frames: u32,
    bytes: u64,
}

impl<Q: Queue, P: Port> Pump<Q, P> {
    /// A pump that does nothing until [`Self::run`].
    pub fn new(queue: Q, port: P, config: PumpConfig) -> Result<Self, PumpError> {
        Self::try_new(queue, port, config).map_err(|(_, error)| error)
    }

    /// As [`Self::new`], but a port that no pump can be made for is given back.
    pub(crate) fn try_new(queue: Q, port: P, config: PumpConfig) -> Result<Self, (P, PumpError)> {
        let waiter = match Waiter::new(&config.notified, port.readiness()) {
            Ok(waiter) => waiter,
            Err(error) => return Err((port, error.into())),
        };
        let back_pressure = config.back_pressure.then(|| BackPressure::new(queue.capacity()));
        Ok(Self {
            queue,
            port,
            config,
            waiter,
            back_pressure,
            epoch: Instant::now(),
            front: [0; HEADER_LENGTH + FRONT_LENGTH],
            port_full: false,
            hold: Hold::No,
            link_to_tell: None,
            link_told: None,
            passes: 0,
        })
    }

    /// Watches something else; [`Self::run`] returns when it is ready.
    pub fn watch(&mut self, attention: &impl Attention) -> io::Result<()> {
        self.waiter.watch(attention)
    }

    /// Tells the other side about the link, ahead of the next frame.
    pub fn tell_link(&mut self, state: LinkState) {
        self.link_to_tell = Some(state);
    }

    /// What the other side last told about the link. Taken out.
    pub fn take_link(&mut self) -> Option<LinkState> {
        self.link_told.take()
    }

    /// The port.
    pub fn port(&mut self) -> &mut P {
        &mut self.port
    }

    /// Ends the pump.
    pub fn into_port(self) -> P {
        self.port
    }

    /// Moves frames until something that is watched needs attention, or the link's state was told.
    pub fn run(&mut self) -> Result<(), PumpError> {
        loop {
            let from_ring = self.drain_ring()?;
            let to_ring = self.drain_port()?;
            if self.link_told.is_some() {
                return Ok(());
            }
            if to_ring.frames > 0 && self.port.readiness().is_none() {
                self.port_full = false;
            }
            let progress = from_ring.frames > 0 || to_ring.frames > 0;
            self.passes = self.passes.wrapping_add(1);
            if progress && !self.passes.is_multiple_of(PASSES_WITHOUT_LOOK) {
                continue;
            }
            let woken = if progress { self.waiter.look()? } else { self.sleep()? };
            if woken.port {
                self.port_full = false;
            }
            if woken.attention {
                return Ok(());
            }
        }
    }

    /// Arms, looks again, and blocks if there is nothing to do.
    fn sleep(&mut self) -> Result<wait::Woken, PumpError> {
        // A full port keeps the ring's frames waiting: no notification about more of them is wanted.
        let work = !self.port_full && self.queue.arm()?;
        let space = match self.hold {
            Hold::No => false,
            Hold::RingFull => self.queue.arm_space(None)?,
            Hold::Enough(limit) => self.queue.arm_space(Some(limit))?,
        };
        let woken = if work || space { self.waiter.look()? } else { self.waiter.sleep()? };
        self.queue.suppress();
        self.hold = Hold::No;
        if !(work || space) {
            self.config.counters.wake_ups.add(1);
        }
        if woken.notified {
            self.config.counters.notifications_received.add(1);
        }
        Ok(woken)
    }

    /// From the ring to the port.
    fn drain_ring(&mut self) -> Result<Moved, PumpError> {
        let mut moved = Moved::default();
        let mut uncommitted = 0u64;
        while !self.port_full && moved.frames < FRAME_BUDGET && moved.bytes < BYTE_BUDGET {
            let Some(incoming) = self.queue.peek()? else { break };
            let length = self.queue.length(&incoming);
            match self.queue.kind(&incoming) {
                KIND_FRAME if self.send(&incoming, length)? => {}
                KIND_FRAME => {
                    self.port_full = true;
                    self.config.counters.port_full.add(1);
                    break;
                }
                KIND_LINK => self.hear_link(&incoming),
                // A record of a later release.
                _ => {}
            }
            self.queue.advance(&incoming);
            moved.frames = moved.frames.saturating_add(1);
            moved.bytes = moved.bytes.saturating_add(length);
            uncommitted = uncommitted.saturating_add(length);
            if uncommitted >= COMMIT_BYTES || self.config.policy.announces_each_frame() {
                uncommitted = 0;
                self.queue.commit();
                self.notify_space()?;
            }
        }
        let counters = &self.config.counters.from_ring;
        if moved.frames >= FRAME_BUDGET || moved.bytes >= BYTE_BUDGET {
            counters.budget_stops.add(1);
        }
        if self.queue.commit() {
            self.notify_space()?;
        }
        Ok(moved)
    }

    /// Sends one frame from the ring, or drops and counts it. Returns `false` if the port is full.
    fn send(&mut self, incoming: &Q::Incoming, length: u64) -> Result<bool, PumpError> {
        let counters = &self.config.counters.from_ring;
        let (header, front) = self.front.split_at_mut(HEADER_LENGTH);
        let copied = self.queue.copy_front(incoming, front);
        let alleged = OffloadHeader::from_bytes(&self.queue.header(incoming));
        let judged = front.get(..copied).unwrap_or_default();
        let checked = match frame::judge(judged, length, &alleged, &self.config.limits) {
            Ok(checked) => checked,
            Err(reason) => {
                counters.dropped(reason);
                return Ok(true);
            }
        };
        header.copy_from_slice(&checked.to_bytes());
        let front = self.front.get(..HEADER_LENGTH.saturating_add(copied)).unwrap_or_default();
        match self.port.send(front, self.queue.rest(incoming, copied as u64)) {
            Ok(()) => {
                count(counters, &checked, length, &self.config.limits);
                Ok(true)
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) => Ok(false),
                // Loopback says so without the system.
                None if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
                // The interface is down or has no carrier: frames are lost as on any cable that is not plugged in.
                Some(libc::EIO | libc::ENETDOWN) => {
                    counters.dropped(DropReason::PortDown);
                    Ok(true)
                }
                Some(libc::EBADFD | libc::EBADF) => Err(PumpError::Port(error)),
                _ => {
                    counters.dropped(DropReason::PortRefused);
                    Ok(true)
                }
            },
        }
    }

    fn hear_link(&mut self, incoming: &Q::Incoming) {
        let mut bytes = [0; size_of::<LinkState>()];
        if self.queue.copy_front(incoming, &mut bytes) == bytes.len() {
            self.link_told = LinkState::read_from_bytes(&bytes).ok();
        }
    }

    /// From the port to the ring.
    fn drain_port(&mut self) -> Result<Moved, PumpError> {
        let mut moved = Moved::default();
        if let Some(state) = self.link_to_tell
            && self.queue.push(KIND_LINK, state.as_bytes())?
        {
            self.link_to_tell = None;
            self.announce()?;
        }
        let limit = self.observe_back_pressure()?;
        let mut first = true;
        while moved.frames < FRAME_BUDGET && moved.bytes < BYTE_BUDGET {
            if let Some((in_flight, limit)) = limit
                && in_flight.saturating_add(moved.bytes) >= limit
            {
                self.hold = Hold::Enough(limit >> 1);
                self.config.counters.back_pressure.add(1);
                break;
            }
            let Some(room) = self.queue.reserve()? else {
                self.hold = Hold::RingFull;
                self.config.counters.ring_full.add(1);
                break;
            };
            let mut header = [0; HEADER_LENGTH];
            let length = match self.port.receive(&mut header, self.queue.room(&room)) {
                Ok(length) => length as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBADFD | libc::EBADF)) => {
                    return Err(PumpError::Port(error));
                }
                // The interface is down.
                Err(error) if error.raw_os_error() == Some(libc::EIO) => break,
                // The kernel had a frame that it cannot hand out, such as EINVAL for an offload that it does not know.
                // More may wait behind it, of which nothing would tell again.
                Err(_) => {
                    moved.frames = moved.frames.saturating_add(1);
                    self.config.counters.to_ring.dropped(DropReason::PortRefused);
                    continue;
                }
            };
            moved.frames = moved.frames.saturating_add(1);
            moved.bytes = moved.bytes.saturating_add(length);
            if self.accept(&mut header, length, &room) {
                self.queue.fill(room, length, &header);
                if first || self.config.policy.announces_each_frame() {
                    // The first frame of a burst is announced at once.
                    first = false;
                    self.announce()?;
                }
            }
        }
        if moved.frames >= FRAME_BUDGET || moved.bytes >= BYTE_BUDGET {
            self.config.counters.to_ring.budget_stops.add(1);
        }
        self.announce()?;
        Ok(moved)
    }

    /// Checks a frame from the port, and completes its checksum if the other side cannot. `false` if it was dropped.
    fn accept(&self, header: &mut [u8; HEADER_LENGTH], length: u64, room: &Q::Room) -> bool {
        let counters = &self.config.counters.to_ring;
        let limits = &self.config.limits;
        let parsed = OffloadHeader::from_bytes(header);
        if length >= LARGEST_RECORD {
            counters.dropped(DropReason::TooLong);
            return false;
        }
        let allowed = match parsed.segmentation() {
            Some((_, needed)) => limits.groups.contains(needed),
            None => !parsed.is_super_frame(),
        };
        if !allowed {
            // The port queued it before the groups were reduced.
            counters.dropped(DropReason::OffloadNotNegotiated);
            return false;
        }
        if !limits.groups.contains(Groups::CSUM) {
            if parsed.needs_checksum() && !complete_in_place(&parsed, self.queue.room(room), length) {
                counters.dropped(DropReason::BadOffload);
                return false;
            }
            // Nor may the other side be told that a checksum is known to be right.
            *header = OffloadHeader::default().to_bytes();
        }
        count(counters, &parsed, length, limits);
        true
    }

    fn observe_back_pressure(&mut self) -> Result<Option<(u64, u64)>, PumpError> {
        let Some(state) = &mut self.back_pressure else { return Ok(None) };
        let (in_flight, taken) = self.queue.progress()?;
        state.observe(self.epoch.elapsed(), in_flight, taken);
        Ok(Some((in_flight, state.limit())))
    }

    /// Publishes what was put into the ring, and notifies the other side if it wants that.
    fn announce(&mut self) -> Result<(), PumpError> {
        if !self.queue.publish() {
            return Ok(());
        }
        let wanted = self.queue.data_wanted() || self.config.policy.announces_each_frame();
        let counters = &self.config.counters.to_ring;
        Ok(notify(&self.config.notify, counters, wanted)?)
    }

    /// Notifies the other side of space, if it wants that.
    fn notify_space(&mut self) -> Result<(), PumpError> {
        let wanted = self.queue.space_wanted();
        let counters = &self.config.counters.from_ring;
        Ok(notify(&self.config.notify, counters, wanted)?)
    }
}

fn notify(vector: &Vector, counters: &crate::counters::Direction, wanted: bool) -> io::Result<()> {
    if wanted {
        counters.notifications_sent.add(1);
        vector.notify()
    } else {
        counters.notifications_suppressed.add(1);
        Ok(())
    }
}

fn count(counters: &crate::counters::Direction, header: &OffloadHeader, length: u64, limits: &Limits) {
    counters.frames.add(1);
    counters.bytes.add(length);
    counters.segments.add(frame::segments(header, length));
    if length > u64::from(limits.mtu).saturating_add(18) {
        counters.super_frame_bytes.add(length);
    }
}

/// Completes a checksum in ring memory, by way of a private copy; `false` if it does not lie in the frame. Rare: the
/// kernel does it unless it was late.
fn complete_in_place(header: &OffloadHeader, room: Pieces<'_>, length: u64) -> bool {
    let mut copy = vec![0; length as usize];
    let mut at = 0usize;
    for piece in room.iter().flatten() {
        if let Some(rest) = copy.get_mut(at..) {
            at = at.saturating_add(piece.copy_to(rest));
        }
    }
    if !complete_checksum(header, &mut copy) {
        return false;
    }
    let mut rest = copy.as_slice();
    for piece in room.iter().flatten() {
        let (now, later) = rest.split_at(rest.len().min(piece.len()));
        piece.copy_from(now);
        rest = later;
    }
    true
}
