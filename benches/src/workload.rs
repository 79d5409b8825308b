//! The load generator: kernel sockets in the two guests' namespaces, one thread per session and side.
//!
//! The first guest's threads run on the first CPU that we may use, the second guest's on the last, in every arm.

use crate::arguments::{Workload, WorkloadKind};
use crate::lab::Lab;
use crate::sampling::{Measurement, Sampler};
use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;
use std::time::{Duration, Instant};

/// How long one run lasts.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Load before the measurement.
    pub warm_up: Duration,
    /// The measurement.
    pub measure: Duration,
}

/// Where the generator's threads run.
#[derive(Clone, Copy, Debug)]
pub struct GeneratorCpus {
    /// Those of the first guest.
    pub first: usize,
    /// Those of the second guest.
    pub last: usize,
}

/// What the generator counted; all of it only grows.
#[derive(Debug, Default)]
pub struct Counts {
    /// Requests that were answered.
    pub transactions: AtomicU64,
    /// Payload bytes that were sent.
    pub sent: AtomicU64,
    /// Payload bytes that arrived.
    pub received: AtomicU64,
}

const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const MEASURED: u8 = 2;
const STOP: u8 = 3;

/// Bytes that a datagram's receiver may leave waiting.
const RECEIVE_BUFFER: usize = 8 << 20;
const PORT: u16 = 5201;
/// How long the sessions may take to connect.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest round trip that is told apart, in nanoseconds: ten seconds.
const LONGEST: u64 = 10_000_000_000;
/// How long a datagram's receiver waits before it looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);

impl GeneratorCpus {
    /// The first and the last CPU that this process may use.
    pub fn find() -> Result<Self> {
        let allowed = sched_getaffinity(None).context("cannot ask on which CPUs we may run")?;
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        let first = cpus.next().context("there is no CPU that we may use")?;
        Ok(Self { first, last: cpus.next_back().unwrap_or(first) })
    }
}

/// Loads the lab once, and measures.
pub fn run(lab: &Lab, workload: &Workload, timing: Timing, cpus: GeneratorCpus, ours: &[u32]) -> Result<Measurement> {
    let load = Load {
        lab,
        workload,
        cpus,
        ours,
        phase: AtomicU8::new(WARM_UP),
        connected: AtomicUsize::new(0),
        counts: Counts::default(),
    };
    std::thread::scope(|scope| load.run(scope, timing))
}

/// One run.
struct Load<'a> {
    lab: &'a Lab,
    workload: &'a Workload,
    cpus: GeneratorCpus,
    /// The processes of all arms, and our own.
    ours: &'a [u32],
    phase: AtomicU8,
    connected: AtomicUsize,
    counts: Counts,
}

/// What the threads tell the one that measures.
struct Reports {
    /// Sockets, to be shut down in the end, so that nobody waits for a peer that has ended.
    streams: Sender<TcpStream>,
    failures: Sender<anyhow::Error>,
    histograms: Sender<Histogram<u64>>,
}

impl Load<'_> {
    fn run<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, timing: Timing) -> Result<Measurement> {
        let (streams, all_streams) = channel();
        let (failures, all_failures) = channel();
        let (histograms, all_histograms) = channel();
        let reports = Reports { streams, failures, histograms };
        let result = self.start(scope, &reports).and_then(|()| self.measure(timing, &all_failures));
        // Relaxed: the threads need to see it soon, and order nothing by it.
        self.phase.store(STOP, Ordering::Relaxed);
        for stream in all_streams.try_iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(reports);
        // What a thread says is nearer to the cause than what was seen of it here.
        let mut measurement = result.map_err(|error| all_failures.try_recv().unwrap_or(error))?;
        if self.workload.kind == WorkloadKind::TcpRequestResponse {
            let mut all = Histogram::new_with_max(LONGEST, 3)?;
            // Ends when the last session has ended and dropped its sender.
            for histogram in all_histograms {
                all.add(&histogram)?;
            }
            measurement.add_round_trips(&all);
        }
        Ok(measurement)
    }

    fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, reports: &Reports) -> Result<()> {
        if self.workload.kind == WorkloadKind::UdpStream {
            return self.start_datagrams(scope, reports);
        }
        let (ready, listening) = channel();
        let on_failure = reports.failures.clone();
        self.spawn(scope, 1, on_failure, move || {
            let [_, second] = &self.lab.guests;
            let listener = TcpListener::bind(SocketAddrV4::new(second.address, PORT))?;
            ready.send(listener).context("nobody waits for the listener")
        });
        let listener = listening.recv().context("the second guest cannot listen")?;
        for _ in 0..self.workload.sessions {
            let streams = reports.streams.clone();
            let histograms = reports.histograms.clone();
            self.spawn(scope, 0, reports.failures.clone(), move || {
                let [_, second] = &self.lab.guests;
                let stream = connect(SocketAddrV4::new(second.address, PORT))?;
                streams.send(stream.try_clone()?)?;
                self.client(stream, &histograms)
            });
            let (stream, _) = accept(&listener)?;
            reports.streams.send(stream.try_clone()?)?;
            self.spawn(scope, 1, reports.failures.clone(), move || self.server(stream));
        }
        self.wait_until_connected(self.workload.sessions * 2)
    }

    fn start_datagrams<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, reports: &Reports) -> Result<()> {
        let [_, second] = &self.lab.guests;
        let address = second.address;
        for session in 0..self.workload.sessions {
            let to = SocketAddrV4::new(address, PORT + session as u16);
            let (ready, bound) = channel();
            self.spawn(scope, 1, reports.failures.clone(), move || {
                let socket = UdpSocket::bind(to)?;
                socket.set_read_timeout(Some(LOOK))?;
                // Best effort: what the path delivered is not to be lost again because the receiver had to wait for its CPU.
                let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER);
                ready.send(()).context("nobody waits for the socket")?;
                self.receive_datagrams(&socket)
            });
            bound.recv().context("the second guest cannot receive datagrams")?;
            self.spawn(scope, 0, reports.failures.clone(), move || {
                let socket = UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
                socket.connect(to)?;
                self.send_datagrams(&socket)
            });
        }
        self.wait_until_connected(self.workload.sessions * 2)
    }

    /// Starts a thread of a guest's.
    fn spawn<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        guest: usize,
        failures: Sender<anyhow::Error>,
        work: impl FnOnce() -> Result<()> + Send + 'scope,
    ) {
        let [first, second] = &self.lab.guests;
        let (guest, cpu) = if guest == 0 { (first, self.cpus.first) } else { (second, self.cpus.last) };
        scope.spawn(move || {
            let prepared = || {
                let mut set = CpuSet::new();
                set.set(cpu);
                sched_setaffinity(None, &set).context("cannot run on the CPU of the generator")?;
                guest.namespace.enter()?;
                work()
            };
            if let Err(error) = prepared() {
                let _ = failures.send(error);
            }
        });
    }

    fn measure(&self, timing: Timing, failures: &Receiver<anyhow::Error>) -> Result<Measurement> {
        std::thread::sleep(timing.warm_up);
        let sampler = Sampler::new(self.lab);
        let before = sampler.open(&self.counts)?;
        // Relaxed: a session that sees it a moment later loses one round trip. What the samples disturb is not recorded.
        self.phase.store(MEASURE, Ordering::Relaxed);
        std::thread::sleep(timing.measure);
        self.phase.store(MEASURED, Ordering::Relaxed);
        let after = sampler.close(&self.counts)?;
        if let Ok(error) = failures.try_recv() {
            return Err(error);
        }
        Measurement::between(self.workload, &before, &after, self.ours)
    }

    fn wait_until_connected(&self, threads: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        // Relaxed: nothing else is read by this.
        while self.connected.load(Ordering::Relaxed) < threads {
            if Instant::now() > deadline {
                bail!("not all sessions are connected after {} s", PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn phase(&self) -> u8 {
        // Relaxed: see the stores.
        self.phase.load(Ordering::Relaxed)
    }

    fn running(&self) -> bool {
        self.phase() != STOP
    }

    fn client(&self, stream: TcpStream, histograms: &Sender<Histogram<u64>>) -> Result<()> {
        self.connected.fetch_add(1, Ordering::Relaxed);
        match self.workload.kind {
            WorkloadKind::TcpRequestResponse => self.request(stream, histograms),
            WorkloadKind::TcpStream => self.send(stream),
            _ => self.receive(stream),
        }
    }

    fn server(&self, stream: TcpStream) -> Result<()> {
        self.connected.fetch_add(1, Ordering::Relaxed);
        match self.workload.kind {
            WorkloadKind::TcpRequestResponse => self.reply(stream),
            WorkloadKind::TcpStream => self.receive(stream),
            _ => self.send(stream),
        }
    }

    fn request(&self, mut stream: TcpStream, histograms: &Sender<Histogram<u64>>) -> Result<()> {
        let mut round_trips = Histogram::new_with_max(LONGEST, 3)?;
        let mut buffer = vec![0; self.workload.size];
        while self.running() {
            let start = Instant::now();
            let done = stream.write_all(&buffer).and_then(|()| stream.read_exact(&mut buffer));
            if !self.go_on(done)? {
                break;
            }
            self.counts.transactions.fetch_add(1, Ordering::Relaxed);
            if self.phase() == MEASURE {
                round_trips.saturating_record(start.elapsed().as_nanos() as u64);
            }
        }
        let _ = histograms.send(round_trips);
        Ok(())
    }

    fn reply(&self, mut stream: TcpStream) -> Result<()> {
        let mut buffer = vec![0; self.workload.size];
        while self.running() {
            let done = stream.read_exact(&mut buffer).and_then(|()| stream.write_all(&buffer));
            if !self.go_on(done)? {
                break;
            }
        }
        Ok(())
    }

    fn send(&self, mut stream: TcpStream) -> Result<()> {
        let buffer = vec![0; self.workload.size];
        while self.running() {
            let done = stream.write_all(&buffer);
            if !self.go_on(done)? {
                break;
            }
            self.counts.sent.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    fn receive(&self, mut stream: TcpStream) -> Result<()> {
        let mut buffer = vec![0; 1 << 17];
        while self.running() {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => {
                    self.counts.received.fetch_add(length as u64, Ordering::Relaxed);
                }
                Err(error) => {
                    self.go_on(Err(error))?;
                }
            }
        }
        Ok(())
    }

    fn send_datagrams(&self, socket: &UdpSocket) -> Result<()> {
        self.connected.fetch_add(1, Ordering::Relaxed);
        let buffer = vec![0; self.workload.size];
        while self.running() {
            match socket.send(&buffer) {
                Ok(length) => {
                    self.counts.sent.fetch_add(length as u64, Ordering::Relaxed);
                }
                // Open loop: what a full queue does not take is lost.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error()) => {}
                Err(error) => {
                    self.go_on(Err(error))?;
                }
            }
        }
        Ok(())
    }

    fn receive_datagrams(&self, socket: &UdpSocket) -> Result<()> {
        self.connected.fetch_add(1, Ordering::Relaxed);
        let mut buffer = vec![0; 1 << 16];
        while self.running() {
            match socket.recv(&mut buffer) {
                Ok(length) => {
                    self.counts.received.fetch_add(length as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => {
                    self.go_on(Err(error))?;
                }
            }
        }
        Ok(())
    }

    /// Whether a session goes on. After the end its socket is shut down under it, which is no failure.
    fn go_on(&self, done: io::Result<()>) -> Result<bool> {
        match done {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
            Err(_) if !self.running() => Ok(false),
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
                // The peer may have seen the end first.
                std::thread::sleep(LOOK);
                if self.running() { Err(error).context("a session was cut off") } else { Ok(false) }
            }
            Err(error) => Err(error).context("a session failed"),
        }
    }
}

/// Connects; the first frames may be lost while the bridge does not forward yet.
fn connect(to: SocketAddrV4) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&to.into(), PATIENCE).with_context(|| format!("cannot connect to {to}"))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Accepts one connection, with an end.
fn accept(listener: &TcpListener) -> Result<(TcpStream, std::net::SocketAddr)> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok((stream, from)) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                return Ok((stream, from));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error).context("nobody connects between the guests: frames do not pass"),
        }
    }
}
