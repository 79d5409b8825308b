//! Control calls through real windows and eventfds, without a device's data path.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use vbus::abi::KIND_MESSAGE;
use vbus::connector::local::{self, ConnectError};
use vbus::message::{
    CallData, DeviceCall, DeviceDropped, DeviceMemory, DeviceMemoryGranted, DeviceOpen, DeviceOpened, Empty,
    LARGEST_MESSAGE, MessageHeader, REPLY, Status, decode_body, decode_header, encode, encode_name, verb,
};
use vbus::north::{Event, Guest, GuestError, Vector0};
use vbus::private_state::PrivateState;
use vbus::ring::{Consumer, Producer, RingConfig, RingMemory, Word};
use vbus::south::{Attachment, Bus, BusConfig, Device, RingRequest};
use vbus::window::{Window, WindowRing};

/// A device with one ring that answers a call with its argument reversed.
struct Reverser {
    closed: Sender<()>,
    ring: Option<WindowRing>,
}

impl Device for Reverser {
    fn name(&self) -> &str {
        "reverser0"
    }
    fn interface(&self) -> u32 {
        0x5245_5645
    }
    fn open(&mut self, interface_version: u32) -> Result<(), Status> {
        if interface_version == 1 { Ok(()) } else { Err(Status::UnsupportedVersion) }
    }
    fn call(&mut self, function: u32, data: &CallData) -> Result<CallData, Status> {
        let mut data = *data;
        data.reverse();
        if function == 1 { Ok(data) } else { Err(Status::UnknownFunction) }
    }
    fn ring(&self, ring: u32) -> Option<RingRequest> {
        (ring == 0).then_some(RingRequest { length: 4096, largest: 1024 })
    }
    fn attach(&mut self, _ring: u32, attachment: Attachment) -> Result<(), Status> {
        self.ring = Some(attachment.ring);
        Ok(())
    }
    fn close(&mut self) {
        self.ring = None;
        let _ = self.closed.send(());
    }
    fn ring_lengths(&self) -> Vec<u64> {
        vec![4096]
    }
    fn queues(&self) -> u32 {
        1
    }
}

/// The host runs in the guest's thread, whenever the guest rings.
struct Direct(Bus);

impl Vector0 for Direct {
    fn ring(&mut self) -> io::Result<()> {
        self.0.serve().map(drop).map_err(io::Error::other)
    }
    fn wait(&mut self) -> io::Result<()> {
        Err(io::Error::other("the host has nothing more to say"))
    }
}

fn start() -> (Guest, Direct, Receiver<()>) {
    let (closed, closings) = channel();
    let bus = Bus::create(BusConfig { peer_id: 1 }, vec![Box::new(Reverser { closed, ring: None })]).unwrap();
    let mut host = Direct(bus);
    let window = Arc::clone(host.0.window());
    (Guest::start(window, &mut host).unwrap(), host, closings)
}

/// A guest's ends of the control rings, for what [`Guest`] would not say.
fn control_rings(window: &Arc<Window>, generation: u32) -> (Producer<WindowRing>, Consumer<WindowRing>) {
    let config = RingConfig { largest: LARGEST_MESSAGE, generation };
    let ring = |location| WindowRing::new(Arc::clone(window), location).unwrap();
    let header = window.header();
    let verbs = Producer::new(ring(header.verbs), config, 0).unwrap();
    (verbs, Consumer::new(ring(header.events), config, 0).unwrap())
}

fn say(verbs: &mut Producer<WindowRing>, host: &mut Direct, kind: u16, payload: &[u8]) {
    assert!(verbs.push(kind, payload, &[0; 12]).unwrap());
    verbs.publish();
    host.ring().unwrap();
}

fn hear(events: &mut Consumer<WindowRing>) -> Option<(MessageHeader, Vec<u8>)> {
    let record = events.peek().unwrap()?;
    let mut bytes = vec![0; record.payload.length as usize];
    events.copy_payload(&record, &mut bytes);
    events.advance(&record);
    events.commit();
    Some((decode_header(&bytes).unwrap(), bytes))
}

#[test]
fn a_guest_finds_opens_and_calls_a_device() {
    let (mut guest, mut host, _) = start();
    let Event::Added(added) = guest.wait_for(&mut host).unwrap() else { panic!("expected DEVADD") };
    assert_eq!((added.device, added.interface, added.name), (0, 0x5245_5645, encode_name("reverser0")));
    let open = DeviceOpen { device: 0, interface_version: 1 };
    let opened: DeviceOpened = guest.call(&mut host, "DEVOPEN", verb::DEVOPEN, &open).unwrap();
    assert_eq!((opened.queues, opened.first_doorbell, opened.first_interrupt), (1, 1, 1));
    let mut data = [0; 64];
    data[0] = 9;
    let call = DeviceCall { handle: opened.handle, function: 1, data };
    let answer: DeviceCall = guest.call(&mut host, "DEVCALL", verb::DEVCALL, &call).unwrap();
    assert_eq!(answer.data[63], 9);
    let memory = DeviceMemory { handle: opened.handle, ring: 0 };
    let granted: DeviceMemoryGranted = guest.call(&mut host, "DEVSHM", verb::DEVSHM, &memory).unwrap();
    assert_eq!((granted.length, granted.largest), (4096, 1024));
    WindowRing::new(Arc::clone(guest.window()), granted.location()).unwrap();
}

#[test]
fn mistakes_are_refused_by_name_and_do_no_harm() {
    let (mut guest, mut host, _) = start();
    let mut refused = |verb, body: DeviceOpen| match guest.call::<_, Empty>(&mut host, "it", verb, &body) {
        Err(GuestError::Refused { status, .. }) => status,
        other => panic!("{other:?}"),
    };
    let pair = |device, interface_version| DeviceOpen { device, interface_version };
    assert_eq!(refused(verb::DEVOPEN, pair(1, 1)), Status::NoSuchDevice);
    assert_eq!(refused(verb::DEVOPEN, pair(u32::MAX, 1)), Status::NoSuchDevice);
    assert_eq!(refused(verb::DEVOPEN, pair(0, 2)), Status::UnsupportedVersion);
    assert_eq!(refused(verb::DEVSHM, pair(0, 0)), Status::NoSuchDevice);
    assert_eq!(refused(verb::DEVCLOSE, pair(7, 0)), Status::NoSuchDevice);
    assert_eq!(refused(999, pair(0, 0)), Status::UnknownVerb);
    let open: DeviceOpened = guest.call(&mut host, "DEVOPEN", verb::DEVOPEN, &pair(0, 1)).unwrap();
    let mut refused = |verb, body: DeviceOpen| match guest.call::<_, Empty>(&mut host, "it", verb, &body) {
        Err(GuestError::Refused { status, .. }) => status,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(verb::DEVOPEN, pair(0, 1)), Status::Busy);
    assert_eq!(refused(verb::DEVSHM, pair(open.handle, 5)), Status::InvalidArgument);
}

#[test]
fn a_device_cannot_be_opened_before_ready() {
    let (guest, mut host, _) = start();
    let window = Arc::clone(guest.window());
    window.set_reset_generation(2);
    host.ring().unwrap();
    let open = DeviceOpen { device: 0, interface_version: 1 };
    let header = MessageHeader { verb: verb::DEVOPEN, generation: 2, sequence: 1, ..MessageHeader::default() };
    let (mut verbs, mut events) = control_rings(&window, 2);
    say(&mut verbs, &mut host, KIND_MESSAGE, &encode(header, &open));
    assert_eq!(hear(&mut events).unwrap().0.status, Status::NotReady as u32);
    let header = MessageHeader { sequence: 2, ..header };
    say(&mut verbs, &mut host, KIND_MESSAGE, &encode(MessageHeader { verb: verb::READY, ..header }, &Empty {}));
    assert_eq!(hear(&mut events).unwrap().0.status, 0);
    assert_eq!(hear(&mut events).unwrap().0.verb, verb::DEVADD);
    say(&mut verbs, &mut host, KIND_MESSAGE, &encode(MessageHeader { sequence: 3, ..header }, &open));
    assert_eq!(hear(&mut events).unwrap().0.status, 0);
}

#[test]
fn a_reply_repeats_nothing_of_a_field_that_is_zero() {
    let (guest, mut host, _) = start();
    let window = Arc::clone(guest.window());
    window.set_reset_generation(2);
    host.ring().unwrap();
    let (mut verbs, mut events) = control_rings(&window, 2);
    for (sequence, verb) in [(1, verb::READY), (2, 999)] {
        let header = MessageHeader { length: 0, verb, generation: 2, sequence, status: 7, reserved: 0xdead_beef };
        say(&mut verbs, &mut host, KIND_MESSAGE, &encode(header, &Empty {}));
        let (reply, _) = hear(&mut events).unwrap();
        assert_eq!((reply.verb, reply.sequence, reply.reserved), (verb | REPLY, sequence, 0));
        while hear(&mut events).is_some() {}
    }
}

#[test]
fn records_of_a_later_version_on_a_control_ring_are_stepped_over() {
    let (guest, mut host, _) = start();
    let window = Arc::clone(guest.window());
    window.set_reset_generation(2);
    host.ring().unwrap();
    let (mut verbs, mut events) = control_rings(&window, 2);
    let header = MessageHeader { verb: verb::READY, generation: 2, sequence: 1, ..MessageHeader::default() };
    let ready = encode(header, &Empty {});
    // Neither what looks like a verb, nor what could be none.
    for (kind, payload) in [(16, &ready[..]), (17, &[]), (u16::MAX, &[0xff; 128])] {
        say(&mut verbs, &mut host, kind, payload);
        assert!(hear(&mut events).is_none(), "kind {kind}");
    }
    say(&mut verbs, &mut host, KIND_MESSAGE, &ready);
    let (reply, _) = hear(&mut events).unwrap();
    assert_eq!((reply.verb, reply.status), (verb::READY | REPLY, 0));
}

#[test]
fn a_guest_steps_over_records_of_a_later_version() {
    let (mut guest, mut host, _) = start();
    while guest.poll(&mut host).unwrap().is_some() {}
    let window = Arc::clone(guest.window());
    let ring = WindowRing::new(Arc::clone(&window), window.header().events).unwrap();
    let start = ring.load(Word::Produced, Ordering::Acquire);
    let mut events = Producer::new(ring, RingConfig { largest: LARGEST_MESSAGE, generation: 1 }, start).unwrap();
    let header = MessageHeader { verb: verb::DEVDROP, generation: 1, ..MessageHeader::default() };
    let dropped = encode(header, &DeviceDropped { device: 0, reserved: 0 });
    for (kind, payload) in [(16, &dropped[..]), (17, &[]), (KIND_MESSAGE, &dropped)] {
        assert!(events.push(kind, payload, &[0; 12]).unwrap());
    }
    events.publish();
    assert!(matches!(guest.poll(&mut host).unwrap(), Some(Event::Dropped(_))));
    assert_eq!(guest.poll(&mut host).unwrap(), None);
}

#[test]
fn opening_and_closing_in_a_loop_uses_nothing_up() {
    let (mut guest, mut host, closings) = start();
    let mut places = Vec::new();
    for _ in 0..1000 {
        let open = DeviceOpen { device: 0, interface_version: 1 };
        let opened: DeviceOpened = guest.call(&mut host, "DEVOPEN", verb::DEVOPEN, &open).unwrap();
        let memory = DeviceMemory { handle: opened.handle, ring: 0 };
        places.push(guest.call::<_, DeviceMemoryGranted>(&mut host, "DEVSHM", verb::DEVSHM, &memory).unwrap());
        let close = vbus::message::DeviceClose { handle: opened.handle, reserved: 0 };
        guest.call::<_, Empty>(&mut host, "DEVCLOSE", verb::DEVCLOSE, &close).unwrap();
    }
    places.dedup();
    assert_eq!((places.len(), closings.try_iter().count()), (1, 1000));
}

#[test]
fn a_reset_closes_devices_and_starts_over() {
    let (mut guest, mut host, closings) = start();
    let open = DeviceOpen { device: 0, interface_version: 1 };
    guest.call::<_, DeviceOpened>(&mut host, "DEVOPEN", verb::DEVOPEN, &open).unwrap();
    let mut again = Guest::start(Arc::clone(guest.window()), &mut host).unwrap();
    assert_eq!((again.generation(), closings.try_iter().count()), (2, 1));
    assert!(matches!(again.wait_for(&mut host).unwrap(), Event::Added(_)), "cold plug is announced again");
}

#[test]
fn a_ring_keeps_its_place_for_as_long_as_the_window_lives() {
    let (mut guest, mut host, _) = start();
    let mut places = Vec::new();
    for _ in 0..50 {
        let open = DeviceOpen { device: 0, interface_version: 1 };
        let opened: DeviceOpened = guest.call(&mut host, "DEVOPEN", verb::DEVOPEN, &open).unwrap();
        let memory = DeviceMemory { handle: opened.handle, ring: 0 };
        places.push(guest.call::<_, DeviceMemoryGranted>(&mut host, "DEVSHM", verb::DEVSHM, &memory).unwrap());
        guest = Guest::start(Arc::clone(guest.window()), &mut host).unwrap();
    }
    places.dedup();
    assert_eq!(places.len(), 1);
}

#[test]
fn a_host_that_waits_for_space_in_the_event_ring_is_rung() {
    let (mut guest, mut host, _) = start();
    assert!(matches!(guest.poll(&mut host).unwrap(), Some(Event::Added(_))));
    assert_eq!(guest.poll(&mut host).unwrap(), None);
    // More than the ring of 16384 bytes holds, at 64 bytes each.
    for _ in 0..1000 {
        host.0.drop_device(0);
    }
    host.ring().unwrap();
    // From here on the host runs only if the guest rings it.
    let dropped = std::iter::from_fn(|| guest.poll(&mut host).unwrap()).count();
    assert_eq!(dropped, 1000);
}

#[test]
fn messages_have_the_c_layout() {
    let header = MessageHeader { length: 0, verb: verb::DEVADD, generation: 2, sequence: 3, status: 4, reserved: 0 };
    let mut name = [0; 32];
    name[0] = b'x';
    let bytes = encode(header, &vbus::message::DeviceAdded { device: 5, interface: 6, name });
    let words = [64u32, 0x101, 2, 3, 4, 0, 5, 6, u32::from(b'x')];
    let expected: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).chain([0; 28]).collect();
    assert_eq!(bytes, expected);
    let granted = DeviceMemoryGranted { words: 1, data: 2, length: 3, largest: 4 };
    let expected: Vec<u8> = [1u64, 2, 3, 4].iter().flat_map(|word| word.to_le_bytes()).collect();
    assert_eq!(encode(header, &granted)[24..], expected);
    let negotiate = vbus::message::Negotiate { abi_major: 0x0102, abi_minor: 3, reserved: 0, features: 4 };
    assert_eq!(encode(header, &negotiate)[24..], [2, 1, 3, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn messages_with_missing_or_surplus_bytes_are_malformed() {
    let whole = encode(
        MessageHeader { verb: verb::DEVOPEN, ..MessageHeader::default() },
        &DeviceOpen { device: 0, interface_version: 1 },
    );
    assert!(decode_body::<DeviceOpen>(&whole).is_ok());
    for length in 0..whole.len() {
        assert!(decode_body::<DeviceOpen>(&whole[..length]).is_err(), "{length} bytes");
    }
    let mut long = whole.clone();
    long.push(0);
    assert!(decode_body::<DeviceOpen>(&long).is_err());
    long[0] = long.len() as u8;
    assert!(decode_header(&long).is_ok() && decode_body::<DeviceOpen>(&long).is_err());
}

#[test]
fn private_state_is_read_by_another_process_and_unknown_fields_do_not_hurt() {
    let mut state = PrivateState::create().unwrap();
    let reopen = |state: &PrivateState| PrivateState::open(state.as_fd().try_clone_to_owned().unwrap()).unwrap().1;
    assert_eq!(reopen(&state), []);
    for round in 0..5u8 {
        let fields = vec![(1, vec![round; 8]), (999, vec![1, 2, 3]), (4, vec![])];
        state.store(&fields).unwrap();
        assert_eq!(reopen(&state), fields);
    }
    let too_much = vec![(1, vec![0; 60_000])];
    assert!(state.store(&too_much).is_err());
    assert_eq!(reopen(&state)[0], (1, vec![4; 8]), "a failed store leaves the last state");
}

fn socket_pair() -> (OwnedFd, OwnedFd) {
    let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
    rustix::net::socketpair(family, kind, rustix::net::SocketFlags::CLOEXEC, None).unwrap()
}

#[test]
fn an_old_or_new_guest_is_refused_with_a_sentence_that_names_both_versions() {
    use std::os::fd::AsFd;
    use zerocopy::{FromZeros, IntoBytes};
    for major in [0u16, 2, 9] {
        let (host, guest) = socket_pair();
        let hello = local::ClientHello { magic: local::HELLO_MAGIC, abi_major: major, abi_minor: 3, reserved: 0 };
        local::send(guest.as_fd(), hello.as_bytes(), &[]).unwrap();
        let error = local::take_hello(host.as_fd()).unwrap_err().to_string();
        assert!(error.contains("the host speaks 1.0") && error.contains(&format!("the guest {major}.3")), "{error}");
        let mut answer = local::ServerHello::new_zeroed();
        local::receive(guest.as_fd(), answer.as_mut_bytes(), rustix::net::RecvFlags::DONTWAIT).unwrap();
        let reason = vbus::message::decode_name(&answer.reason);
        assert_eq!((answer.accepted, answer.abi_major), (0, 1));
        assert!(error.starts_with(&reason) && reason.contains(&format!("the guest {major}.3")), "{reason}");
    }
}

#[test]
fn a_guest_refuses_a_host_of_another_version() {
    use std::os::fd::AsFd;
    use zerocopy::IntoBytes;
    let path = std::env::temp_dir().join(format!("vbus-version-{}", std::process::id()));
    let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
    let listener = rustix::net::socket(family, kind, None).unwrap();
    let _ = std::fs::remove_file(&path);
    rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let host = std::thread::spawn(move || {
        let socket = rustix::net::accept(&listener).unwrap();
        let mut hello = [0; 16];
        local::receive(socket.as_fd(), &mut hello, rustix::net::RecvFlags::empty()).unwrap();
        let answer = local::ServerHello {
            magic: local::HELLO_MAGIC,
            accepted: 1,
            abi_major: 2,
            abi_minor: 5,
            doorbells: 1,
            interrupts: 1,
            reason: [0; 128],
        };
        local::send(socket.as_fd(), answer.as_bytes(), &[]).unwrap();
    });
    let error = local::connect(&path).unwrap_err();
    host.join().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(error, ConnectError::Version { host_major: 2, .. }));
    assert!(error.to_string().contains("2.5") && error.to_string().contains("1.0"), "{error}");
}

#[test]
fn a_window_that_could_shrink_is_refused() {
    let file = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 20).unwrap();
    assert!(Window::open(file).unwrap_err().to_string().contains("not sealed"));
}
