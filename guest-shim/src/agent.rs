//! The life of the shim: wait for a daemon, connect, move frames, and start over when the daemon is gone.

use crate::guest_interface::{Cidr, GuestInterface, enter};
use crate::status::{self, Status};
use crate::vector_wait::VectorWait;
use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use vbus::connector::local::{self, ConnectError, Connection};
use vbus::north::{Event, Guest};
use venet::counters::Counters;
use venet::driver::Driver;
use venet::frame::Limits;
use venet::offload::Groups;
use venet::port::Port;
use venet::port::tap::Tap;
use venet::pump::placement::Placement;
use venet::pump::policy::Policy;
use venet::pump::{Attention, Pump, PumpConfig, PumpError};
use venet::queue::RingPair;

/// What the shim is asked to do.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// The daemon's socket.
    pub connect: PathBuf,
    /// Name of the interface.
    pub interface: String,
    /// The guest's network namespace; that of the caller if absent.
    pub namespace: Option<String>,
    /// Addresses of the interface.
    pub addresses: Vec<Cidr>,
    /// Set the interface up even without addresses.
    pub up: bool,
    /// The interface outlives the shim.
    pub persist: bool,
    /// Offloads to ask for.
    pub groups: Groups,
    /// When to notify.
    pub policy: Policy,
    /// Where to run.
    pub placement: Placement,
    /// Where `guest-shim status` asks.
    pub status: Option<PathBuf>,
}

/// Runs until SIGTERM or SIGINT. The process must have one thread.
pub fn run(config: AgentConfig) -> Result<()> {
    let signals = signals()?;
    let status = config.status.as_deref().map(StatusSocket::bind).transpose()?;
    if let Some(namespace) = &config.namespace {
        enter(namespace)?;
    }
    let interface = GuestInterface::open(&config.interface, config.persist, config.addresses.clone(), config.up)?;
    config.placement.apply().with_context(|| format!("cannot run on CPUs {}", config.placement))?;
    let seen =
        Status { version: env!("CARGO_PKG_VERSION").into(), interface: config.interface.clone(), ..Status::default() };
    Agent { config, interface, signals, status, seen, counters: Arc::default(), complaint: None }.serve()
}

/// How long to wait between two attempts to connect.
const RETRY: Duration = Duration::from_millis(200);

struct Agent {
    config: AgentConfig,
    interface: GuestInterface,
    signals: OwnedFd,
    status: Option<StatusSocket>,
    seen: Status,
    counters: Arc<Counters>,
    /// What was last said about why there is no connection; not said again.
    complaint: Option<String>,
}

/// Why a connection ended.
enum End {
    /// A signal asked the shim to end.
    Asked,
    /// The daemon is gone, or broke the protocol.
    Lost(String),
}

impl Agent {
    fn serve(&mut self) -> Result<()> {
        loop {
            let end = match local::connect(&self.config.connect) {
                Ok(connection) => self.connected(&connection),
                Err(error @ ConnectError::Version { .. }) => return Err(error.into()),
                Err(error) => Ok(End::Lost(format!("{}: {error}", self.config.connect.display()))),
            };
            self.interface.set_carrier(false)?;
            (self.seen.connected, self.seen.link) = (false, false);
            match end {
                Ok(End::Asked) => return Ok(()),
                Ok(End::Lost(reason)) => self.complain(reason),
                Err(error)
                    if error.downcast_ref::<PumpError>().is_some_and(|error| matches!(error, PumpError::Port(_))) =>
                {
                    return Err(error).context("the interface is gone");
                }
                Err(error) => self.complain(format!("{error:#}")),
            }
            if self.wait()? {
                return Ok(());
            }
        }
    }

    fn complain(&mut self, reason: String) {
        if self.complaint.as_ref() != Some(&reason) {
            tracing::warn!("{}: waiting for the daemon: {reason}", self.config.interface);
            self.complaint = Some(reason);
        }
    }

    /// Waits before the next attempt; `true` if a signal asks the shim to end.
    fn wait(&mut self) -> Result<bool> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: RETRY.as_nanos() as i64 };
        let mut watched = vec![PollFd::new(&self.signals, PollFlags::IN)];
        if let Some(status) = &self.status {
            watched.push(PollFd::new(&status.0, PollFlags::IN));
        }
        match rustix::event::poll(&mut watched, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.answer_status();
        Ok(ready(self.signals.as_fd()))
    }

    /// From the handshake to the end of the connection.
    fn connected(&mut self, connection: &Connection) -> Result<End> {
        let mut vector = VectorWait::new(connection)?;
        let window = Arc::new(vbus::window::Window::open(connection.window.as_fd().try_clone_to_owned()?)?);
        let mut guest = Guest::start(window, &mut vector)?;
        let driver = Driver::open(&mut guest, &mut vector)?;
        self.interface.configure(driver.description.mac, driver.description.mtu)?;
        // Only what our own kernel can take: what is agreed on, the host may send.
        let mut port = self.interface.port()?;
        let possible = port.set_offloads(self.config.groups)?;
        let (queue, groups) = driver.link_up(&mut guest, &mut vector, possible)?;
        port.set_offloads(groups)?;
        let mut pump = self.pump(connection, &driver, port, queue, groups)?;
        (self.seen.connected, self.seen.device) = (true, driver.name.clone());
        self.seen.connections = self.seen.connections.wrapping_add(1);
        self.seen.offloads = groups.names().into_iter().map(str::to_owned).collect();
        self.complaint = None;
        tracing::info!("{}: connected to {}, offloads {groups}", self.config.interface, driver.name);
        if !groups.contains(Groups::LINK_EVENTS) {
            self.set_link(true)?;
        }
        loop {
            match pump.run() {
                Ok(()) => {}
                Err(error @ PumpError::Port(_)) => return Err(error.into()),
                Err(error) => return Ok(End::Lost(error.to_string())),
            }
            if let Some(link) = pump.take_link() {
                self.set_link(link.up != 0)?;
            }
            self.answer_status();
            if ready(self.signals.as_fd()) {
                return Ok(End::Asked);
            }
            if ready(connection.socket.as_fd()) {
                return Ok(End::Lost("the daemon closed the connection".into()));
            }
            while let Some(event) = guest.poll(&mut vector)? {
                if matches!(event, Event::Dropped(_)) {
                    return Ok(End::Lost("the host took the device away".into()));
                }
            }
        }
    }

    fn pump(
        &self,
        connection: &Connection,
        driver: &Driver,
        port: Tap,
        queue: RingPair,
        groups: Groups,
    ) -> Result<Pump<RingPair, Tap>> {
        let vector = |vectors: &[vbus::connector::notifier::Vector], number: u32| {
            let vector = vectors.get(number as usize).context("the host names a vector that it did not pass")?;
            Ok::<_, anyhow::Error>(vector.try_clone()?)
        };
        let config = PumpConfig {
            limits: Limits { mtu: driver.description.mtu, groups },
            policy: self.config.policy,
            back_pressure: true,
            notify: vector(&connection.doorbells, driver.doorbell)?,
            notified: vector(&connection.interrupts, driver.interrupt)?,
            counters: Arc::clone(&self.counters),
        };
        let mut pump = Pump::new(queue, port, config)?;
        pump.watch(&Watched(self.signals.as_fd()))?;
        pump.watch(&Watched(connection.socket.as_fd()))?;
        if let Some(interrupt) = connection.interrupts.first() {
            pump.watch(interrupt)?;
        }
        if let Some(status) = &self.status {
            pump.watch(&Watched(status.0.as_fd()))?;
        }
        Ok(pump)
    }

    fn set_link(&mut self, up: bool) -> Result<()> {
        if self.seen.link == up {
            return Ok(());
        }
        self.seen.link = up;
        tracing::info!("{}: link {}", self.config.interface, if up { "up" } else { "down" });
        self.interface.set_carrier(up)
    }

    fn answer_status(&mut self) {
        let Some(socket) = &self.status else { return };
        while let Ok((stream, _)) = socket.0.accept() {
            self.seen.counters = (&*self.counters).into();
            if let Err(error) = status::answer(stream, &self.seen) {
                tracing::debug!("status: {error:#}");
            }
        }
    }
}

struct Watched<'a>(BorrowedFd<'a>);

impl Attention for Watched<'_> {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.0
    }
}

/// The socket that `guest-shim status` asks; its path is removed when it is dropped.
struct StatusSocket(UnixListener, PathBuf);

impl StatusSocket {
    fn bind(path: &std::path::Path) -> Result<Self> {
        use std::os::unix::fs::FileTypeExt;
        let stale = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        if let Ok(found) = std::fs::symlink_metadata(path) {
            if !found.file_type().is_socket() {
                bail!("{} exists and is no socket; remove it or choose another path", path.display());
            }
            if std::os::unix::net::UnixStream::connect(path).is_err_and(|error| stale(&error)) {
                std::fs::remove_file(path).with_context(|| format!("cannot remove the stale {}", path.display()))?;
            }
        }
        let listener = UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
        listener.set_nonblocking(true)?;
        Ok(Self(listener, path.into()))
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.1);
    }
}

/// Whether something can be read, or has ended.
fn ready(descriptor: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN | PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut watched, Some(&now)).is_ok_and(|count| count > 0)
}

/// SIGTERM and SIGINT as a descriptor.
fn signals() -> Result<OwnedFd> {
    // SAFETY: an all-zero sigset_t is valid for sigemptyset, and all three calls only touch `set`.
    let set = unsafe {
        let mut set: libc::sigset_t = core::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::sigaddset(&mut set, libc::SIGINT);
        set
    };
    // SAFETY: `set` is initialised; the process has one thread.
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
