//! The guest's half: asks for a reset, makes control calls, and is told of devices.
//!
//! [`Guest`] is a state machine without I/O of its own: it rings and waits through a [`Vector0`]. A driver looks at
//! [`Guest::poll`] when its own vector 0 rang.

use crate::abi::{ABI_MAJOR, ABI_MINOR, KIND_MESSAGE, METADATA_LENGTH};
use crate::message::{
    DeviceAdded, DeviceDropped, DeviceMemoryClosed, Empty, LARGEST_MESSAGE, MalformedMessage, MessageHeader, Negotiate,
    REPLY, Status, decode_body, decode_header, encode, verb,
};
use crate::ring::{Consumer, Producer, RingConfig, UnusableRing, Violation};
use crate::window::{Window, WindowError, WindowRing};
use bincode::{Decode, Encode};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use thiserror::Error;

/// Why the guest cannot go on with this connection.
#[derive(Debug, Error)]
pub enum GuestError {
    /// The window is not usable.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// A ring is not usable.
    #[error(transparent)]
    Ring(#[from] UnusableRing),
    /// The host broke the ring protocol.
    #[error("violation by the host: {0}")]
    Violation(#[from] Violation),
    /// The host sent a control message that is none.
    #[error("from the host: {0}")]
    Message(#[from] MalformedMessage),
    /// The host refused a verb.
    #[error("the host refused {verb}: {status}")]
    Refused {
        /// Which verb.
        verb: &'static str,
        /// Why.
        status: Status,
    },
    /// The verb ring is full: the host does not answer.
    #[error("the host does not take control messages any more")]
    VerbRingFull,
    /// Waiting failed.
    #[error("lost the connection to the host: {0}")]
    Lost(#[from] io::Error),
}

/// How a driver reaches and awaits the host on vector 0.
pub trait Vector0 {
    /// Rings the host.
    fn ring(&mut self) -> io::Result<()>;
    /// Sleeps until the host rang, or the connection ended (an error), or too much time passed (an error).
    fn wait(&mut self) -> io::Result<()>;
}

/// What the host told the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A device exists.
    Added(DeviceAdded),
    /// A device is gone.
    Dropped(DeviceDropped),
    /// A ring is out of use.
    MemoryClosed(DeviceMemoryClosed),
}

/// A guest's end of a bus, in one generation.
pub struct Guest {
    window: Arc<Window>,
    verbs: Producer<WindowRing>,
    events: Consumer<WindowRing>,
    generation: u32,
    last_sequence: u32,
    reply: Option<(MessageHeader, Vec<u8>)>,
    queued: VecDeque<Event>,
}

impl Guest {
    /// Starts, or starts over: resets the connection, negotiates, and asks for the devices to be announced.
    pub fn start(window: Arc<Window>, vector: &mut impl Vector0) -> Result<Self, GuestError> {
        let wanted = window.host_generation().wrapping_add(1);
        window.set_reset_generation(wanted);
        vector.ring()?;
        while window.host_generation() != wanted {
            vector.wait()?;
        }
        let header = window.header();
        let config = RingConfig { largest: LARGEST_MESSAGE, generation: wanted as u32 };
        let verbs = WindowRing::new(Arc::clone(&window), header.verbs)?;
        let events = WindowRing::new(Arc::clone(&window), header.events)?;
        let mut guest = Self {
            verbs: Producer::new(verbs, config, 0)?,
            events: Consumer::new(events, config, 0)?,
            window,
            generation: wanted as u32,
            last_sequence: 0,
            reply: None,
            queued: VecDeque::new(),
        };
        let ours = Negotiate { abi_major: ABI_MAJOR, abi_minor: ABI_MINOR, ..Negotiate::default() };
        guest.call::<_, Negotiate>(vector, "NEGOTIATE", verb::NEGOTIATE, &ours)?;
        guest.call::<_, Empty>(vector, "READY", verb::READY, &Empty {})?;
        Ok(guest)
    }

    /// The window.
    pub fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// Records carry this.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Sends a verb and waits for its reply. Events that arrive meanwhile are kept for [`Self::poll`].
    pub fn call<Body: Encode, Reply: Decode<()>>(
        &mut self,
        vector: &mut impl Vector0,
        name: &'static str,
        verb: u32,
        body: &Body,
    ) -> Result<Reply, GuestError> {
        let sequence = self.submit(verb, body)?;
        vector.ring()?;
        loop {
            self.drain(vector)?;
            match self.reply.take() {
                Some((header, bytes)) if header.sequence == sequence => {
                    Status::from_wire(header.status).map_err(|status| GuestError::Refused { verb: name, status })?;
                    return Ok(decode_body(&bytes)?);
                }
                _ if !self.events.arm()? => vector.wait()?,
                _ => {}
            }
        }
    }

    /// The next event, or `None`. Call it until it returns `None` when vector 0 rang; it then is armed again.
    pub fn poll(&mut self, vector: &mut impl Vector0) -> Result<Option<Event>, GuestError> {
        loop {
            self.drain(vector)?;
            if let Some(event) = self.queued.pop_front() {
                return Ok(Some(event));
            }
            if !self.events.arm()? {
                return Ok(None);
            }
        }
    }

    /// Waits for the next event.
    pub fn wait_for(&mut self, vector: &mut impl Vector0) -> Result<Event, GuestError> {
        loop {
            match self.poll(vector)? {
                Some(event) => return Ok(event),
                None => vector.wait()?,
            }
        }
    }

    fn submit<Body: Encode>(&mut self, verb: u32, body: &Body) -> Result<u32, GuestError> {
        self.last_sequence = self.last_sequence.wrapping_add(1).max(1);
        let header = MessageHeader {
            verb,
            generation: self.generation,
            sequence: self.last_sequence,
            ..MessageHeader::default()
        };
        if !self.verbs.push(KIND_MESSAGE, &encode(header, body), &[0; METADATA_LENGTH])? {
            return Err(GuestError::VerbRingFull);
        }
        self.verbs.publish();
        // A control call is rare: it rings whether the host sleeps or not, but the test keeps its place.
        self.verbs.should_notify();
        Ok(self.last_sequence)
    }

    fn drain(&mut self, vector: &mut impl Vector0) -> Result<(), GuestError> {
        while let Some(record) = self.events.peek()? {
            let mut bytes = vec![0; record.payload.length as usize];
            self.events.copy_payload(&record, &mut bytes);
            self.events.advance(&record);
            if record.kind != KIND_MESSAGE {
                // Of a later minor version.
                continue;
            }
            let header = decode_header(&bytes)?;
            if header.generation != self.generation {
                continue;
            }
            match header.verb {
                verb::DEVADD => self.queued.push_back(Event::Added(decode_body(&bytes)?)),
                verb::DEVDROP => self.queued.push_back(Event::Dropped(decode_body(&bytes)?)),
                verb::SHMCLOSE => self.queued.push_back(Event::MemoryClosed(decode_body(&bytes)?)),
                other if other & REPLY != 0 => self.reply = Some((header, bytes)),
                // An event of a later minor version.
                _ => {}
            }
        }
        self.events.commit();
        if self.events.should_notify() {
            // The host waits for space in the event ring.
            vector.ring()?;
        }
        Ok(())
    }
}
