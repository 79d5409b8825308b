//! One bus: the devices that one guest can see, and the verbs by which it uses them.

use super::device::{Attachment, Device, RingRequest};
use crate::abi::{ABI_MAJOR, ABI_MINOR, KIND_MESSAGE, METADATA_LENGTH, RingLocation, WINDOW_MAGIC, WindowHeader};
use crate::layout::Layout;
use crate::message::{
    DeviceAdded, DeviceCall, DeviceClose, DeviceDropped, DeviceMemory, DeviceMemoryGranted, DeviceOpen, DeviceOpened,
    Empty, LARGEST_MESSAGE, MalformedMessage, MessageHeader, Negotiate, REPLY, Status, decode_body, decode_header,
    encode, encode_name, verb,
};
use crate::ring::{Consumer, Producer, RingConfig, UnusableRing, Violation};
use crate::window::{Window, WindowError, WindowRing};
use bincode::Encode;
use core::mem::size_of;
use std::collections::VecDeque;
use std::sync::Arc;
use thiserror::Error;

/// How a bus is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusConfig {
    /// Identifies the connection in the log and in the window's header.
    pub peer_id: u64,
}

/// What serving the bus came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Ring the guest's vector 0.
    pub notify: bool,
    /// The guest reset the connection.
    pub reset: bool,
}

/// Why a bus cannot be set up, or must be quarantined.
#[derive(Debug, Error)]
pub enum BusError {
    /// The window cannot be made or mapped.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// A control ring cannot work.
    #[error(transparent)]
    Ring(#[from] UnusableRing),
    /// The devices' rings do not fit into a window.
    #[error("the devices need more shared memory than a window can have")]
    TooLarge,
    /// The guest broke the ring protocol.
    #[error("violation on a control ring: {0}")]
    Violation(#[from] Violation),
    /// The guest sent a control message that is none.
    #[error(transparent)]
    Message(#[from] MalformedMessage),
}

/// A bus, serving one guest through one window.
pub struct Bus {
    window: Arc<Window>,
    layout: Layout,
    verbs: Consumer<WindowRing>,
    events: Producer<WindowRing>,
    generation: u64,
    ready: bool,
    devices: Vec<Slot>,
    /// Events that did not fit yet; at most two per device.
    pending: VecDeque<Vec<u8>>,
    /// The last verb's sequence number and its reply: a verb that is repeated gets the same answer.
    last_reply: (u32, Vec<u8>),
}

struct Slot {
    device: Box<dyn Device>,
    first_vector: u32,
    open: bool,
    /// Places once given stay given, so that opening and closing in a loop uses nothing up.
    rings: Vec<(u32, RingLocation)>,
    attached: Vec<u32>,
}

impl Bus {
    /// Creates the window and a bus over it. The guest's first act is a reset.
    pub fn create(config: BusConfig, devices: Vec<Box<dyn Device>>) -> Result<Self, BusError> {
        let window = Arc::new(Window::create(Self::window_size(&devices))?);
        Self::over(config, window, devices)
    }

    /// Bytes that the window for `devices` has to have.
    pub fn window_size(devices: &[Box<dyn Device>]) -> u64 {
        let lengths: Vec<u64> = devices.iter().flat_map(|device| device.ring_lengths()).collect();
        Layout::window_size(&lengths)
    }

    /// How many vectors, each way, `devices` have in all; vector 0 is the bus.
    pub fn vectors(devices: &[Box<dyn Device>]) -> u32 {
        devices.iter().map(|device| device.queues()).fold(1, u32::saturating_add)
    }

    /// A bus over a fresh window of at least [`Self::window_size`] bytes.
    pub fn over(config: BusConfig, window: Arc<Window>, devices: Vec<Box<dyn Device>>) -> Result<Self, BusError> {
        let layout = Layout::new(window.size()).ok_or(BusError::TooLarge)?;
        let vectors = Self::vectors(&devices);
        let mut next_vector = 1u32;
        let devices = devices
            .into_iter()
            .map(|device| {
                let first_vector = next_vector;
                next_vector = next_vector.saturating_add(device.queues());
                Slot { device, first_vector, open: false, rings: Vec::new(), attached: Vec::new() }
            })
            .collect();
        let (verbs, events) = control_rings(&window, &layout, 0)?;
        // Last: with the header the window may be passed to the guest.
        window.write_header(&WindowHeader {
            magic: WINDOW_MAGIC,
            abi_major: ABI_MAJOR,
            abi_minor: ABI_MINOR,
            header_length: size_of::<WindowHeader>() as u32,
            window_size: window.size(),
            verbs: layout.verbs(),
            events: layout.events(),
            doorbells: vectors,
            interrupts: vectors,
            peer_id: config.peer_id,
            ..WindowHeader::default()
        });
        Ok(Self {
            window,
            layout,
            verbs,
            events,
            generation: 0,
            ready: false,
            devices,
            pending: VecDeque::new(),
            last_reply: (0, Vec::new()),
        })
    }

    /// The window to hand to the guest.
    pub fn window(&self) -> &Arc<Window> {
        &self.window
    }

    /// How many resets were completed.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The guest rang vector 0: complete a reset that it asks for, then answer verbs until there are none.
    ///
    /// An error means quarantine: call [`Self::close_devices`], and serve again only to see a reset.
    pub fn serve(&mut self) -> Result<Served, BusError> {
        let mut served = Served::default();
        if self.reset_if_asked()? {
            served = Served { notify: true, reset: true };
        }
        loop {
            while self.serve_one()? {}
            self.verbs.commit();
            self.events.publish();
            served.notify |= self.verbs.should_notify();
            served.notify |= self.events.should_notify();
            if !self.verbs.arm()? || !self.reply_fits()? {
                return Ok(served);
            }
        }
    }

    /// Completes a reset if the guest asks for one. Works while the connection is quarantined.
    pub fn reset_if_asked(&mut self) -> Result<bool, BusError> {
        let wanted = self.generation.wrapping_add(1);
        if self.window.reset_generation() != wanted {
            return Ok(false);
        }
        self.close_devices();
        self.generation = wanted;
        self.ready = false;
        self.pending.clear();
        self.last_reply = (0, Vec::new());
        let (verbs, events) = control_rings(&self.window, &self.layout, wanted as u32)?;
        (self.verbs, self.events) = (verbs, events);
        // The arm words were cleared; arming comes before the generation is visible, so no verb can slip through. The
        // generation is visible even if arming fails: the guest must be able to ask for the next one.
        let armed = self.verbs.arm();
        self.window.set_host_generation(wanted);
        armed?;
        Ok(true)
    }

    /// Takes every device out of use: at the end of the connection, and in quarantine.
    pub fn close_devices(&mut self) {
        for slot in &mut self.devices {
            slot.close();
        }
    }

    /// Ends the bus and gives the devices back.
    pub fn into_devices(mut self) -> Vec<Box<dyn Device>> {
        self.close_devices();
        self.devices.into_iter().map(|slot| slot.device).collect()
    }

    fn reply_fits(&mut self) -> Result<bool, BusError> {
        Ok(self.events.reserve(LARGEST_MESSAGE)?.is_some())
    }

    /// Sends what is pending, or else answers one verb. A verb is read only while its reply fits.
    fn serve_one(&mut self) -> Result<bool, BusError> {
        if !self.reply_fits()? {
            // Dropped replies would be worse than a wait: the guest drains, and rings again.
            return Ok(self.events.arm_space(LARGEST_MESSAGE)?);
        }
        if let Some(event) = self.pending.pop_front() {
            self.push(&event)?;
            return Ok(true);
        }
        let Some(record) = self.verbs.peek()? else { return Ok(false) };
        let mut bytes = [0; LARGEST_MESSAGE as usize];
        let length = self.verbs.copy_payload(&record, &mut bytes);
        self.verbs.advance(&record);
        if record.kind != KIND_MESSAGE {
            // Of a later minor version.
            return Ok(true);
        }
        let bytes = bytes.get(..length).unwrap_or_default();
        let header = decode_header(bytes)?;
        if header.generation != self.generation as u32 {
            return Ok(true);
        }
        if header.sequence == self.last_reply.0 && header.sequence != 0 {
            let repeated = core::mem::take(&mut self.last_reply.1);
            self.push(&repeated)?;
            self.last_reply.1 = repeated;
            return Ok(true);
        }
        let reply = self.answer(&header, bytes)?;
        self.push(&reply)?;
        self.last_reply = (header.sequence, reply);
        Ok(true)
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), BusError> {
        // `reply_fits` was asked before, so there is room.
        self.events.push(KIND_MESSAGE, bytes, &[0; METADATA_LENGTH])?;
        Ok(())
    }

    fn answer(&mut self, header: &MessageHeader, bytes: &[u8]) -> Result<Vec<u8>, BusError> {
        Ok(match header.verb {
            verb::NEGOTIATE => reply(header, self.negotiate(decode_body(bytes)?)),
            verb::READY => {
                decode_body::<Empty>(bytes)?;
                reply(header, self.announce())
            }
            verb::DEVOPEN => reply(header, self.device_open(decode_body(bytes)?)),
            verb::DEVCLOSE => reply(header, self.device_close(decode_body(bytes)?)),
            verb::DEVCALL => reply(header, self.device_call(decode_body(bytes)?)),
            verb::DEVSHM => reply(header, self.device_memory(decode_body(bytes)?)),
            _ => reply::<Empty>(header, Err(Status::UnknownVerb)),
        })
    }

    fn negotiate(&mut self, asked: Negotiate) -> Result<Negotiate, Status> {
        let ours = Negotiate { abi_major: ABI_MAJOR, abi_minor: ABI_MINOR, ..Negotiate::default() };
        if asked.abi_major == ABI_MAJOR { Ok(ours) } else { Err(Status::UnsupportedVersion) }
    }

    fn announce(&mut self) -> Result<Empty, Status> {
        if self.ready {
            return Err(Status::Busy);
        }
        self.ready = true;
        for (number, slot) in self.devices.iter().enumerate() {
            let added = DeviceAdded {
                device: number as u32,
                interface: slot.device.interface(),
                name: encode_name(slot.device.name()),
            };
            self.pending.push_back(event(verb::DEVADD, self.generation, &added));
        }
        Ok(Empty {})
    }

    /// Announces that a device is gone.
    pub fn drop_device(&mut self, number: u32) {
        if let Some(slot) = self.devices.get_mut(number as usize) {
            slot.close();
            if self.ready {
                let dropped = DeviceDropped { device: number, reserved: 0 };
                self.pending.push_back(event(verb::DEVDROP, self.generation, &dropped));
            }
        }
    }

    fn device_open(&mut self, asked: DeviceOpen) -> Result<DeviceOpened, Status> {
        if !self.ready {
            return Err(Status::NotReady);
        }
        let slot = self.devices.get_mut(asked.device as usize).ok_or(Status::NoSuchDevice)?;
        if slot.open {
            return Err(Status::Busy);
        }
        slot.device.open(asked.interface_version)?;
        slot.open = true;
        Ok(DeviceOpened {
            handle: asked.device,
            queues: slot.device.queues(),
            first_doorbell: slot.first_vector,
            first_interrupt: slot.first_vector,
        })
    }

    fn opened(&mut self, handle: u32) -> Result<&mut Slot, Status> {
        self.devices.get_mut(handle as usize).filter(|slot| slot.open).ok_or(Status::NoSuchDevice)
    }

    fn device_close(&mut self, asked: DeviceClose) -> Result<Empty, Status> {
        self.opened(asked.handle)?.close();
        Ok(Empty {})
    }

    fn device_call(&mut self, asked: DeviceCall) -> Result<DeviceCall, Status> {
        let data = self.opened(asked.handle)?.device.call(asked.function, &asked.data)?;
        Ok(DeviceCall { data, ..asked })
    }

    fn device_memory(&mut self, asked: DeviceMemory) -> Result<DeviceMemoryGranted, Status> {
        let (window, generation) = (Arc::clone(&self.window), self.generation as u32);
        let mut layout = self.layout.clone();
        let slot = self.opened(asked.handle)?;
        let RingRequest { length, largest } = slot.device.ring(asked.ring).ok_or(Status::InvalidArgument)?;
        if slot.attached.contains(&asked.ring) {
            return Err(Status::Busy);
        }
        let known = slot.rings.iter().find(|(ring, _)| *ring == asked.ring).map(|(_, location)| *location);
        let location = known.or_else(|| layout.ring(length)).ok_or(Status::NoSpace)?;
        let ring = WindowRing::new(window, location).map_err(|_| Status::NoSpace)?;
        ring.clear();
        slot.device.attach(asked.ring, Attachment { ring, generation, first_vector: slot.first_vector })?;
        slot.attached.push(asked.ring);
        if known.is_none() {
            slot.rings.push((asked.ring, location));
            self.layout = layout;
        }
        Ok(DeviceMemoryGranted { words: location.words, data: location.data, length, largest })
    }
}

impl Slot {
    fn close(&mut self) {
        if core::mem::take(&mut self.open) {
            self.device.close();
            self.attached.clear();
        }
    }
}

fn control_rings(
    window: &Arc<Window>,
    layout: &Layout,
    generation: u32,
) -> Result<(Consumer<WindowRing>, Producer<WindowRing>), BusError> {
    let config = RingConfig { largest: LARGEST_MESSAGE, generation };
    let verbs = WindowRing::new(Arc::clone(window), layout.verbs())?;
    let events = WindowRing::new(Arc::clone(window), layout.events())?;
    verbs.clear();
    events.clear();
    Ok((Consumer::new(verbs, config, 0)?, Producer::new(events, config, 0)?))
}

/// A reply that reports a failure has no body.
fn reply<Body: Encode>(to: &MessageHeader, outcome: Result<Body, Status>) -> Vec<u8> {
    let MessageHeader { generation, sequence, .. } = *to;
    let header = MessageHeader { verb: to.verb | REPLY, generation, sequence, ..MessageHeader::default() };
    match outcome {
        Ok(body) => encode(header, &body),
        Err(status) => encode(MessageHeader { status: status as u32, ..header }, &Empty {}),
    }
}

fn event<Body: Encode>(verb: u32, generation: u64, body: &Body) -> Vec<u8> {
    encode(MessageHeader { verb, generation: generation as u32, ..MessageHeader::default() }, body)
}
