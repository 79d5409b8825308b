//! A queue pair as the pump sees it: frames come from the peer, and frames go to the peer.
//!
//! [`RingPair`] is venet's queue pair over two rings. The trait exists so that another kind of queue can drive the same
//! pump.

use crate::abi::LARGEST_RECORD;
use crate::offload::HEADER_LENGTH;
use vbus::ring::{Consumer, Extent, Place, Producer, Record, Violation};
use vbus::window::WindowRing;
use vm_memory::VolatileSlice;

/// Memory of a frame, in up to two pieces.
pub type Pieces<'a> = [Option<VolatileSlice<'a>>; 2];

/// A queue pair, from either side.
pub trait Queue {
    /// Something that the peer sent and that was not taken yet.
    type Incoming: Copy;
    /// Room for a frame to the peer.
    type Room;

    /// The next thing from the peer.
    fn peek(&mut self) -> Result<Option<Self::Incoming>, Violation>;
    /// Its kind, as a record's.
    fn kind(&self, incoming: &Self::Incoming) -> u16;
    /// Its length in bytes.
    fn length(&self, incoming: &Self::Incoming) -> u64;
    /// Its offload header, as the peer wrote it.
    fn header(&self, incoming: &Self::Incoming) -> [u8; HEADER_LENGTH];
    /// Copies its first bytes; returns how many.
    fn copy_front(&self, incoming: &Self::Incoming, into: &mut [u8]) -> usize;
    /// What follows after its first `skip` bytes.
    fn rest(&self, incoming: &Self::Incoming, skip: u64) -> Pieces<'_>;
    /// Takes it.
    fn advance(&mut self, incoming: &Self::Incoming);
    /// Gives the space of all that was taken back to the peer.
    fn commit(&mut self) -> bool;
    /// Whether the peer waits for that space. Once per pass.
    fn space_wanted(&mut self) -> bool;

    /// Room for a frame of any legal length.
    fn reserve(&mut self) -> Result<Option<Self::Room>, Violation>;
    /// The room's memory.
    fn room<'a>(&'a self, room: &Self::Room) -> Pieces<'a>;
    /// Makes the frame in the room final.
    fn fill(&mut self, room: Self::Room, length: u64, header: &[u8; HEADER_LENGTH]);
    /// Sends something short of another kind, if there is room.
    fn push(&mut self, kind: u16, payload: &[u8]) -> Result<bool, Violation>;
    /// Makes everything final visible to the peer; returns whether there was anything.
    fn publish(&mut self) -> bool;
    /// Whether the peer waits for that. Once per pass.
    fn data_wanted(&mut self) -> bool;
    /// Bytes on their way to the peer, and all bytes that the peer ever took, by a fresh look.
    fn progress(&mut self) -> Result<(u64, u64), Violation>;
    /// Bytes that may be on their way at most.
    fn capacity(&self) -> u64;

    /// Asks to be woken for incoming work; `true` if there is some already.
    fn arm(&mut self) -> Result<bool, Violation>;
    /// Asks to be woken once at most `in_flight` bytes are on their way, or, with `None`, once there is room for a frame;
    /// `true` if that is so already.
    fn arm_space(&mut self, in_flight: Option<u64>) -> Result<bool, Violation>;
    /// Asks not to be woken.
    fn suppress(&mut self);
}

/// venet's queue pair.
#[derive(Debug)]
pub struct RingPair {
    /// From the peer.
    pub incoming: Consumer<WindowRing>,
    /// To the peer.
    pub outgoing: Producer<WindowRing>,
}

impl Queue for RingPair {
    type Incoming = Record;
    type Room = Place;

    fn peek(&mut self) -> Result<Option<Record>, Violation> {
        self.incoming.peek()
    }
    fn kind(&self, incoming: &Record) -> u16 {
        incoming.kind
    }
    fn length(&self, incoming: &Record) -> u64 {
        incoming.payload.length
    }
    fn header(&self, incoming: &Record) -> [u8; HEADER_LENGTH] {
        incoming.metadata
    }
    fn copy_front(&self, incoming: &Record, into: &mut [u8]) -> usize {
        self.incoming.copy_payload(incoming, into)
    }
    fn rest(&self, incoming: &Record, skip: u64) -> Pieces<'_> {
        let Extent { offset, length } = incoming.payload;
        let rest = Extent { offset: offset.saturating_add(skip), length: length.saturating_sub(skip) };
        [if rest.length == 0 { None } else { self.incoming.memory().slice(rest) }, None]
    }
    fn advance(&mut self, incoming: &Record) {
        self.incoming.advance(incoming);
    }
    fn commit(&mut self) -> bool {
        self.incoming.commit()
    }
    fn space_wanted(&mut self) -> bool {
        self.incoming.should_notify()
    }

    fn reserve(&mut self) -> Result<Option<Place>, Violation> {
        self.outgoing.reserve(LARGEST_RECORD)
    }
    fn room<'a>(&'a self, room: &Place) -> Pieces<'a> {
        let memory = self.outgoing.memory();
        [memory.slice(room.first), room.rest.and_then(|rest| memory.slice(rest))]
    }
    fn fill(&mut self, room: Place, length: u64, header: &[u8; HEADER_LENGTH]) {
        self.outgoing.commit(room, crate::abi::KIND_FRAME, length, header);
    }
    fn push(&mut self, kind: u16, payload: &[u8]) -> Result<bool, Violation> {
        self.outgoing.push(kind, payload, &[0; HEADER_LENGTH])
    }
    fn publish(&mut self) -> bool {
        self.outgoing.publish()
    }
    fn data_wanted(&mut self) -> bool {
        self.outgoing.should_notify()
    }
    fn progress(&mut self) -> Result<(u64, u64), Violation> {
        let taken = self.outgoing.consumed()?;
        Ok((self.outgoing.in_flight(), taken))
    }
    fn capacity(&self) -> u64 {
        self.outgoing.memory().location().length
    }

    fn arm(&mut self) -> Result<bool, Violation> {
        self.incoming.arm()
    }
    fn arm_space(&mut self, in_flight: Option<u64>) -> Result<bool, Violation> {
        match in_flight {
            Some(in_flight) => self.outgoing.arm_space_until(in_flight),
            None => self.outgoing.arm_space(LARGEST_RECORD),
        }
    }
    fn suppress(&mut self) {
        self.incoming.suppress();
        self.outgoing.suppress_space();
    }
}
