//! The process that keeps the privileges: makes ports, accepts guests, and hands everything to the data process.

use crate::channel::{self, Answer, DeviceSpec, Order};
use crate::config::{Class, Config, GuestConfig};
use crate::data_process_handle::DataProcessHandle;
use crate::listener::Listener;
use crate::status::{DeviceStatus, GuestStatus, Status};
use crate::tap_port::TapPort;
use crate::warnings;
use anyhow::{Context, Result};
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::net::SocketType;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};
use vbus::connector::local::{self, ConnectError};
use vbus::connector::notifier::Vector;
use vbus::layout::Layout;
use vbus::private_state::PrivateState;
use vbus::window::Window;
use venet::port::interface::Interfaces;

/// How the data process is started: this program again, with these arguments.
#[derive(Clone, Debug)]
pub struct Reexecute(pub Vec<String>);

/// Runs the daemon until SIGTERM or SIGINT.
pub fn run(config: Config, data_process: &Reexecute) -> Result<()> {
    let signals = signals()?;
    let mut supervisor = Supervisor::start(config, data_process.clone())?;
    supervisor.watch(signals.as_fd(), SIGNALS)?;
    supervisor.serve()
}

const SIGNALS: u64 = 0;
const DATA_PROCESS: u64 = 1;
const CONTROL: u64 = 2;
const LINKS: u64 = 3;
/// Listeners follow from here.
const LISTENERS: u64 = 1 << 16;
/// Connected guests, by the number of the connection.
const CONNECTIONS: u64 = 1 << 32;
/// Sockets whose hello has not arrived yet.
const GREETINGS: u64 = 1 << 62;
/// Greetings that may be pending at once; more are closed.
const MOST_GREETINGS: usize = 64;

struct Supervisor {
    config: Config,
    reexecute: Reexecute,
    epoll: OwnedFd,
    data: DataProcessHandle,
    control: Listener,
    links: OwnedFd,
    guests: Vec<Guest>,
    greetings: BTreeMap<u64, (usize, OwnedFd)>,
    next_number: u64,
    user: String,
}

struct Guest {
    config: GuestConfig,
    listener: Listener,
    ports: Vec<Option<TapPort>>,
    links: Vec<bool>,
    connection: Option<Connected>,
    connections: u64,
}

/// Everything of a connection that outlives the data process.
struct Connected {
    peer_id: u64,
    socket: OwnedFd,
    _window: Window,
    _private: PrivateState,
    _doorbells: Vec<Vector>,
    _interrupts: Vec<Vector>,
}

impl Supervisor {
    fn start(config: Config, reexecute: Reexecute) -> Result<Self> {
        // The data process comes first: it needs none of the descriptors that follow.
        let data = DataProcessHandle::spawn(&reexecute, &config.user)?;
        let control = Listener::bind(&config.control, SocketType::STREAM, 0o660, None)?;
        let guests = config.guests.iter().map(Guest::new).collect::<Result<Vec<_>>>()?;
        let supervisor = Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            data,
            control,
            links: link_events()?,
            guests,
            greetings: BTreeMap::new(),
            next_number: 1,
            user: config.user.clone(),
            config,
            reexecute,
        };
        supervisor.watch(supervisor.data.socket.as_fd(), DATA_PROCESS)?;
        supervisor.watch(supervisor.control.socket().as_fd(), CONTROL)?;
        supervisor.watch(supervisor.links.as_fd(), LINKS)?;
        for (number, guest) in supervisor.guests.iter().enumerate() {
            supervisor.watch(guest.listener.socket().as_fd(), LISTENERS.wrapping_add(number as u64))?;
            tracing::info!("{}: waiting at {}", guest.config.name, guest.config.socket.display());
        }
        Ok(supervisor)
    }

    fn watch(&self, descriptor: BorrowedFd<'_>, token: u64) -> Result<()> {
        epoll::add(&self.epoll, descriptor, EventData::new_u64(token), EventFlags::IN | EventFlags::RDHUP)?;
        Ok(())
    }

    fn serve(&mut self) -> Result<()> {
        loop {
            let mut space = [const { MaybeUninit::<Event>::uninit() }; 32];
            let events = match epoll::wait(&self.epoll, &mut space, None) {
                Ok((events, _)) => events,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for event in events {
                match event.data.u64() {
                    SIGNALS => return Ok(()),
                    DATA_PROCESS => self.data_process_spoke()?,
                    CONTROL => self.tell_status(),
                    LINKS => self.look_at_links()?,
                    token if token >= GREETINGS => self.greet(token)?,
                    token if token >= CONNECTIONS => self.lose(token.wrapping_sub(CONNECTIONS))?,
                    token => self.accept(token.wrapping_sub(LISTENERS) as usize)?,
                }
            }
        }
    }

    fn accept(&mut self, guest: usize) -> Result<()> {
        while let Some(socket) = self.guests.get(guest).and_then(|guest| guest.listener.accept()) {
            if self.greetings.len() >= MOST_GREETINGS {
                local::refuse(socket.as_fd(), "too many connections wait for their handshake");
                continue;
            }
            let token = GREETINGS.wrapping_add(self.next_number);
            self.next_number = self.next_number.wrapping_add(1);
            self.watch(socket.as_fd(), token)?;
            self.greetings.insert(token, (guest, socket));
        }
        Ok(())
    }

    /// A hello arrived, or the socket closed before it did.
    fn greet(&mut self, token: u64) -> Result<()> {
        let Some((_, socket)) = self.greetings.get(&token) else { return Ok(()) };
        let hello = local::take_hello(socket.as_fd());
        if matches!(&hello, Err(ConnectError::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock) {
            return Ok(());
        }
        let Some((number, socket)) = self.greetings.remove(&token) else { return Ok(()) };
        epoll::delete(&self.epoll, &socket)?;
        let Some(guest) = self.guests.get_mut(number) else { return Ok(()) };
        if let Err(error) = hello {
            tracing::warn!("{}: connection refused: {error}", guest.config.name);
            return Ok(());
        }
        if let Some(connected) = &guest.connection {
            // A guest that was killed and came back may be quicker than our notice of its end.
            if !ended(connected.socket.as_fd()) {
                local::refuse(socket.as_fd(), "another guest is connected to this socket");
                tracing::warn!("{}: a second connection was refused", guest.config.name);
                return Ok(());
            }
            let peer_id = connected.peer_id;
            self.lose(peer_id)?;
        }
        self.connect(number, socket)
    }

    fn connect(&mut self, number: usize, socket: OwnedFd) -> Result<()> {
        let peer_id = self.next_number;
        self.next_number = self.next_number.wrapping_add(1);
        let Some(guest) = self.guests.get_mut(number) else { return Ok(()) };
        let name = guest.config.name.clone();
        let uid = rustix::net::sockopt::socket_peercred(&socket).map(|credentials| credentials.uid.as_raw());
        match guest.hand_over(peer_id, socket, &self.data) {
            Ok(connected) => {
                let token = EventData::new_u64(CONNECTIONS.wrapping_add(peer_id));
                epoll::add(&self.epoll, &connected.socket, token, EventFlags::IN | EventFlags::RDHUP)?;
                guest.connections = guest.connections.wrapping_add(1);
                guest.connection = Some(connected);
                tracing::info!("{name}: connected, user {}", uid.map_or("unknown".into(), |uid| uid.to_string()));
            }
            Err(error) => {
                // The data process may have it already; then it must not keep it.
                self.data.tell(&Order::Disconnect { peer_id });
                tracing::error!("{name}: cannot serve the connection: {error:#}");
            }
        }
        Ok(())
    }

    /// A guest's socket ended, or it said something that it should not.
    fn lose(&mut self, peer_id: u64) -> Result<()> {
        let of = |guest: &Guest| guest.connection.as_ref().is_some_and(|connected| connected.peer_id == peer_id);
        let Some(guest) = self.guests.iter_mut().find(|guest| of(guest)) else { return Ok(()) };
        if let Some(connected) = guest.connection.take() {
            epoll::delete(&self.epoll, &connected.socket)?;
            self.data.tell(&Order::Disconnect { peer_id });
            tracing::info!("{}: disconnected", guest.config.name);
        }
        Ok(())
    }

    /// Outside of a status request the data process says nothing: this is its end.
    fn data_process_spoke(&mut self) -> Result<()> {
        match channel::receive::<Answer>(&self.data.socket) {
            Ok(Some(_)) => return Ok(()),
            // A status request has read meanwhile what was announced.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Ok(None) => {}
            Err(error) => tracing::error!("the data process cannot be understood: {error}"),
        }
        epoll::delete(&self.epoll, &self.data.socket)?;
        let status = self.data.end()?;
        if self.data.gave_up(status) {
            anyhow::bail!("the data process ended as soon as it had started; what it said is above");
        }
        tracing::error!("the data process ended ({status}); all guests are disconnected, and a new one starts");
        for guest in &mut self.guests {
            guest.connection = None;
        }
        self.data = DataProcessHandle::spawn(&self.reexecute, &self.user)?;
        self.watch(self.data.socket.as_fd(), DATA_PROCESS)
    }

    /// Some interface changed: tell guests whose port went up or down.
    fn look_at_links(&mut self) -> Result<()> {
        let mut nothing = [0; 8192];
        while rustix::net::recv(&self.links, &mut nothing[..], rustix::net::RecvFlags::DONTWAIT).is_ok() {}
        let interfaces = Interfaces::open()?;
        for guest in &mut self.guests {
            for (device, port) in guest.ports.iter().enumerate() {
                let Some(port) = port else { continue };
                let up = interfaces.is_up(&port.name).unwrap_or(false);
                let Some(known) = guest.links.get_mut(device) else { continue };
                if *known != up {
                    *known = up;
                    tracing::info!("{}: {} is {}", guest.config.name, port.name, if up { "up" } else { "down" });
                    if let Some(Connected { peer_id, .. }) = guest.connection {
                        self.data.tell(&Order::Link { peer_id, device, up });
                    }
                }
            }
        }
        Ok(())
    }

    fn tell_status(&mut self) {
        while let Some(socket) = self.control.accept() {
            let answer = self.status().and_then(|status| Ok(serde_json::to_vec(&status)?));
            match answer {
                Ok(bytes) => {
                    let mut stream = std::os::unix::net::UnixStream::from(socket);
                    // A reader that does not read loses its answer, and holds nobody up for long.
                    let _ = stream.set_nonblocking(false);
                    let _ = stream.set_write_timeout(Some(Duration::from_millis(500)));
                    let _ = stream.write_all(&bytes);
                }
                Err(error) => tracing::error!("cannot tell the status: {error:#}"),
            }
        }
    }

    fn status(&mut self) -> Result<Status> {
        let dropped = kernel_drops();
        let mut guests: Vec<GuestStatus> = self.guests.iter().map(|guest| guest.status(&dropped)).collect();
        // What came too late for an earlier request is no answer to this one.
        while let Ok(Some(_)) = channel::receive::<Answer>(&self.data.socket) {}
        channel::send(self.data.socket.as_fd(), &Order::Status, &[])?;
        let asked = Instant::now();
        let patience = Duration::from_secs(1);
        loop {
            match channel::receive(&self.data.socket) {
                Ok(Some((Answer::Connection { peer_id, resets, quarantines, devices }, _))) => {
                    let of = |guest: &&Guest| {
                        guest.connection.as_ref().is_some_and(|connected| connected.peer_id == peer_id)
                    };
                    let Some(number) = self.guests.iter().position(|guest| of(&guest)) else { continue };
                    let (Some(guest), Some(status)) = (self.guests.get(number), guests.get_mut(number)) else {
                        continue;
                    };
                    (status.resets, status.quarantines) = (resets, quarantines);
                    for ((device, report), link) in status.devices.iter_mut().zip(devices).zip(&guest.links) {
                        device.report(report, *link);
                    }
                }
                Ok(Some((Answer::StatusEnd, _))) => break,
                Ok(None) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && asked.elapsed() < patience => {
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(error) => return Err(error).context("the data process does not answer"),
            }
        }
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").into(),
            supervisor: std::process::id(),
            data_process: self.data.id(),
            guests,
        })
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        for guest in &mut self.guests {
            guest.connection = None;
        }
        if let Err(error) = self.data.end() {
            tracing::error!("cannot see the data process end: {error}");
        }
        tracing::info!("ended; {} guests were configured", self.config.guests.len());
    }
}

impl Guest {
    fn new(config: &GuestConfig) -> Result<Self> {
        let attach = |device: &crate::config::DeviceConfig| match device.class {
            Class::VenetTap => TapPort::attach(config, device).map(Some),
            Class::VenetLoopback => Ok(None),
        };
        let ports = config.devices.iter().map(attach).collect::<Result<Vec<_>>>()?;
        for (port, device) in ports.iter().zip(&config.devices) {
            if let (Some(port), Some(bridge)) = (port, &device.bridge) {
                let found = warnings::about(bridge, port.bridge_mtu, &port.name, port.mtu);
                found.iter().for_each(|warning| tracing::warn!("{warning}"));
            }
        }
        let listener = Listener::bind(&config.socket, SocketType::SEQPACKET, config.mode, config.group.as_deref())?;
        let links = vec![true; ports.len()];
        Ok(Self { config: config.clone(), listener, ports, links, connection: None, connections: 0 })
    }

    /// Makes a fresh window and fresh vectors, and passes them to both sides.
    fn hand_over(&self, peer_id: u64, socket: OwnedFd, data: &DataProcessHandle) -> Result<Connected> {
        let specs = self.specs();
        let lengths: Vec<u64> = specs.iter().flat_map(|spec| [spec.ring; 2]).collect();
        let window = Window::create(Layout::window_size(&lengths))?;
        let private = PrivateState::create()?;
        let vectors = || (0..=specs.len()).map(|_| Vector::new()).collect::<io::Result<Vec<_>>>();
        let (doorbells, interrupts) = (vectors()?, vectors()?);
        let mut descriptors = vec![window.as_fd(), private.as_fd()];
        descriptors.extend(doorbells.iter().chain(&interrupts).map(AsFd::as_fd));
        descriptors.extend(self.ports.iter().flatten().map(|port| port.tap.as_fd()));
        let order = Order::Connect { guest: self.config.name.clone(), peer_id, devices: specs };
        channel::send(data.socket.as_fd(), &order, &descriptors)?;
        // The data process writes the header, while we are here. Passed on before all of it is there, the window would show
        // the guest rings that lie nowhere. The guest's first look is later than our answer, and the answer waits for this.
        wait_for_header(&window)?;
        local::accept(socket.as_fd(), window.as_fd(), &doorbells, &interrupts)?;
        Ok(Connected {
            peer_id,
            socket,
            _window: window,
            _private: private,
            _doorbells: doorbells,
            _interrupts: interrupts,
        })
    }

    fn specs(&self) -> Vec<DeviceSpec> {
        let devices = self.config.devices.iter().zip(&self.ports).zip(&self.links);
        let spec = |((device, port), link): ((&crate::config::DeviceConfig, &Option<TapPort>), &bool)| DeviceSpec {
            name: device.name.clone(),
            tap: port.is_some(),
            mac: device.guest_mac(&self.config),
            mtu: port.as_ref().map_or(device.mtu.unwrap_or(1500), |port| port.mtu),
            groups: device.offloads.bits(),
            ring: device.ring,
            policy: device.policy.to_string(),
            cpus: device.cpus.to_string(),
            link: *link,
        };
        devices.map(spec).collect()
    }

    fn status(&self, dropped: &BTreeMap<String, u64>) -> GuestStatus {
        let device = |(spec, (config, port)): (DeviceSpec, (&crate::config::DeviceConfig, &Option<TapPort>))| {
            let tap = port.as_ref().map(|port| port.name.clone());
            let mut status = DeviceStatus::idle(&spec.name, tap, config.bridge.clone(), spec.mac, spec.mtu);
            status.tap_dropped = status.tap.as_ref().and_then(|tap| dropped.get(tap)).copied().unwrap_or(0);
            status
        };
        GuestStatus {
            name: self.config.name.clone(),
            socket: self.config.socket.display().to_string(),
            connected: self.connection.is_some(),
            connections: self.connections,
            resets: 0,
            quarantines: 0,
            devices: self.specs().into_iter().zip(self.config.devices.iter().zip(&self.ports)).map(device).collect(),
        }
    }
}

/// Whether the other end of a connected socket is closed.
fn ended(socket: BorrowedFd<'_>) -> bool {
    let mut poll = [rustix::event::PollFd::from_borrowed_fd(socket, rustix::event::PollFlags::RDHUP)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ready| ready > 0)
}

fn wait_for_header(window: &Window) -> Result<()> {
    let (start, patience) = (Instant::now(), Duration::from_secs(1));
    while !window.has_header() {
        if start.elapsed() > patience {
            anyhow::bail!("the data process does not set up the window");
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}

/// SIGTERM and SIGINT as a descriptor.
fn signals() -> Result<OwnedFd> {
    // SAFETY: an all-zero sigset_t is valid for sigemptyset, and both calls only touch `set`.
    let set = unsafe {
        let mut set: libc::sigset_t = core::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::sigaddset(&mut set, libc::SIGINT);
        set
    };
    // SAFETY: `set` is initialised; no thread runs yet that would need another mask.
    let descriptor = unsafe {
        libc::sigprocmask(libc::SIG_BLOCK, &set, core::ptr::null_mut());
        libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if descriptor < 0 {
        return Err(io::Error::last_os_error()).context("cannot watch signals");
    }
    // SAFETY: signalfd returned a fresh descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// The kernel's announcements of changed interfaces, see `rtnetlink(7)`.
fn link_events() -> Result<OwnedFd> {
    const RTMGRP_LINK: u32 = 1;
    let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
    let family = rustix::net::AddressFamily::NETLINK;
    let socket = rustix::net::socket_with(family, SocketType::RAW, flags, None)?;
    rustix::net::bind(&socket, &rustix::net::netlink::SocketAddrNetlink::new(0, RTMGRP_LINK))?;
    Ok(socket)
}

/// Frames that the kernel dropped on their way out of each interface: for a TAP, because its queue was full.
fn kernel_drops() -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    let line = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        Some((name.trim().to_owned(), numbers.split_whitespace().nth(11)?.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}
