//! What is read before and after a measurement, and the metrics that follow from the difference.

use crate::arguments::{Workload, WorkloadKind};
use crate::lab::{Lab, Notifications};
use crate::workload::Counts;
use anyhow::{Result, bail};
use hdrhistogram::Histogram;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The metrics in the order in which they are shown: name, heading, digits after the point.
pub const METRICS: [(&str, &str, usize); 12] = [
    ("rtt_p50_us", "p50 µs", 1),
    ("rtt_p99_us", "p99 µs", 1),
    ("transactions_per_s", "trans./s", 0),
    ("cpu_us_per_transaction", "CPU µs/trans.", 1),
    ("gbps", "Gb/s", 2),
    ("cpu_s_per_gb", "CPU s/GB", 3),
    ("frames_per_s", "frames/s", 0),
    ("cpu_ns_per_frame", "CPU ns/frame", 0),
    ("notifications_per_frame", "notif./frame", 4),
    ("lost_ratio", "lost", 2),
    ("socket_lost_ratio", "lost at socket", 2),
    ("foreign_cpus", "foreign CPUs", 2),
];

/// A task that used less during a measurement is not looked at more closely.
const NOTICEABLE_NS: u64 = 1_000_000;
/// Bytes of a datagram that is one frame at an MTU of 1500.
const ONE_FRAME: usize = 1472;

/// The metrics of one run, by name; one that the arm has not is absent.
#[derive(Clone, Debug, Default)]
pub struct Measurement(pub BTreeMap<&'static str, f64>);

/// Reads the counters of one lab.
pub struct Sampler<'a> {
    lab: &'a Lab,
}

/// All counters at one moment.
pub struct Sample {
    at: Instant,
    notifications: Option<Notifications>,
    /// Nanoseconds of CPU per task of the machine, by process and thread.
    machine: HashMap<(u32, u32), u64>,
    /// Nanoseconds of CPU of the arm's processes; `None` if the arm has none.
    data_path: Option<u64>,
    frames: [u64; 2],
    transactions: u64,
    sent: u64,
    received: u64,
}

impl<'a> Sampler<'a> {
    /// For one lab.
    pub fn new(lab: &'a Lab) -> Self {
        Self { lab }
    }

    /// Reads everything at the start of a measurement: what takes long and disturbs first.
    pub fn open(&self, counts: &Counts) -> Result<Sample> {
        let notifications = self.lab.notifications()?;
        let machine = tasks_of_the_machine();
        Ok(Sample { notifications, machine, ..self.quick(counts)? })
    }

    /// Reads everything at the end of a measurement, the other way round, so that asking the arm's processes how much they
    /// notified does not count as their work. The machine's interval is longer than the others' by two looks at all tasks,
    /// about a hundredth of it, in every arm alike.
    pub fn close(&self, counts: &Counts) -> Result<Sample> {
        let quick = self.quick(counts)?;
        let machine = tasks_of_the_machine();
        let notifications = self.lab.notifications()?;
        Ok(Sample { notifications, machine, ..quick })
    }

    fn quick(&self, counts: &Counts) -> Result<Sample> {
        let mut data_path = (!self.lab.processes.is_empty()).then_some(0);
        for process in &self.lab.processes {
            let tasks = tasks_of(process.pid);
            if tasks.is_empty() {
                bail!("{} of arm {} has ended: what was measured says nothing", process.role, self.lab.arm.text);
            }
            let used: u64 = tasks.iter().map(|(_, used)| used).sum();
            data_path = data_path.map(|sum| sum + used);
        }
        // Relaxed: statistics.
        Ok(Sample {
            at: Instant::now(),
            notifications: None,
            machine: HashMap::new(),
            data_path,
            frames: self.lab.received()?,
            transactions: counts.transactions.load(Ordering::Relaxed),
            sent: counts.sent.load(Ordering::Relaxed),
            received: counts.received.load(Ordering::Relaxed),
        })
    }
}

impl Measurement {
    /// What happened between two samples of one workload. `ours` are the processes of all arms. An error if nothing did: an
    /// arm that stalls has no figures.
    pub fn between(workload: &Workload, before: &Sample, after: &Sample, ours: &[u32]) -> Result<Self> {
        let kind = workload.kind;
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        let mut machine_ns = 0;
        let mut foreign_ns = 0;
        for (task @ (process, _), used) in &after.machine {
            let used = used.saturating_sub(before.machine.get(task).copied().unwrap_or(0));
            machine_ns += used;
            if used > NOTICEABLE_NS && !ours.contains(process) && is_program(*process) {
                foreign_ns += used;
            }
        }
        let frames = delivered(kind, before.frames, after.frames);
        if frames == 0.0 {
            bail!("no frame was delivered while {} was measured", workload.text);
        }
        let mut metrics = BTreeMap::new();
        let mut put = |name, value: f64| {
            if value.is_finite() {
                metrics.insert(name, value);
            }
        };
        if kind == WorkloadKind::TcpRequestResponse {
            let transactions = (after.transactions - before.transactions) as f64;
            put("transactions_per_s", transactions / seconds);
            put("cpu_us_per_transaction", machine_ns as f64 / 1e3 / transactions);
        } else {
            let received = (after.received - before.received) as f64;
            put("gbps", received * 8.0 / 1e9 / seconds);
            put("cpu_s_per_gb", machine_ns as f64 / received);
        }
        if kind == WorkloadKind::UdpStream {
            let sent = (after.sent - before.sent) as f64;
            let received = (after.received - before.received) as f64;
            // What is on its way at either moment may make it a little negative.
            put("lost_ratio", (1.0 - received / sent).max(0.0));
            if workload.size <= ONE_FRAME {
                put("socket_lost_ratio", (1.0 - received / workload.size as f64 / frames).max(0.0));
            }
        }
        put("frames_per_s", frames / seconds);
        if let (Some(before), Some(after)) = (before.data_path, after.data_path) {
            put("cpu_ns_per_frame", after.saturating_sub(before) as f64 / frames);
        }
        if let (Some(before), Some(after)) = (before.notifications, after.notifications) {
            let frames = delivered(kind, before.delivered, after.delivered);
            put("notifications_per_frame", after.sent.saturating_sub(before.sent) as f64 / frames);
        }
        put("foreign_cpus", foreign_ns as f64 / 1e9 / seconds);
        Ok(Self(metrics))
    }

    /// Adds what the sessions measured by themselves.
    pub fn add_round_trips(&mut self, round_trips: &Histogram<u64>) {
        if round_trips.is_empty() {
            return;
        }
        self.0.insert("rtt_p50_us", round_trips.value_at_quantile(0.50) as f64 / 1e3);
        self.0.insert("rtt_p99_us", round_trips.value_at_quantile(0.99) as f64 / 1e3);
    }
}

/// Frames delivered to the receiving guest; with requests and replies both receive.
fn delivered(kind: WorkloadKind, before: [u64; 2], after: [u64; 2]) -> f64 {
    let [first, second] = [0, 1].map(|guest: usize| after[guest].saturating_sub(before[guest]));
    let frames = match kind {
        WorkloadKind::TcpRequestResponse => first + second,
        WorkloadKind::TcpMaerts => first,
        WorkloadKind::TcpStream | WorkloadKind::UdpStream => second,
    };
    frames as f64
}

/// CPU time of every task that can be seen, kernel threads included, but not of the one that measures.
fn tasks_of_the_machine() -> HashMap<(u32, u32), u64> {
    let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    let with_process = |process| tasks_of(process).into_iter().map(move |(task, used)| ((process, task), used));
    numbers_in(Path::new("/proc")).flat_map(with_process).filter(|((_, task), _)| *task != own).collect()
}

/// Whether a process is a program, and no thread of the kernel: those work for the load.
fn is_program(process: u32) -> bool {
    fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|line| !line.is_empty())
}

/// CPU time of a process's threads in nanoseconds.
fn tasks_of(pid: u32) -> Vec<(u32, u64)> {
    let directory = format!("/proc/{pid}/task");
    let used = |task| {
        let text = fs::read_to_string(format!("{directory}/{task}/schedstat")).ok()?;
        Some((task, text.split_whitespace().next()?.parse().ok()?))
    };
    numbers_in(Path::new(&directory)).filter_map(used).collect()
}

fn numbers_in(directory: &Path) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: Instant, factor: u64) -> Sample {
        Sample {
            at,
            notifications: Some(Notifications { sent: 10 * factor, delivered: [100 * factor, 200 * factor] }),
            machine: HashMap::from([((1, 1), 1_000_000 * factor), ((1, 2), 2_000_000 * factor)]),
            data_path: Some(1_000_000 * factor),
            frames: [100 * factor, 200 * factor],
            transactions: 50 * factor,
            sent: 4_000_000 * factor,
            received: 1_000_000 * factor,
        }
    }

    fn between(kind: &str, before: &Sample, after: &Sample) -> BTreeMap<&'static str, f64> {
        Measurement::between(&kind.parse().unwrap(), before, after, &[1]).unwrap().0
    }

    #[test]
    fn metrics_follow_from_the_difference_of_two_samples() {
        let start = Instant::now();
        let (before, after) = (sample(start, 1), sample(start + std::time::Duration::from_millis(100), 2));
        let metrics = between("udp_stream:size=1000", &before, &after);
        let close = |name: &str, expected: f64| {
            assert!((metrics[name] - expected).abs() < 1e-9 * expected.abs(), "{name}: {}", metrics[name]);
        };
        close("gbps", 0.08);
        close("cpu_s_per_gb", 3.0);
        close("frames_per_s", 2000.0);
        close("cpu_ns_per_frame", 5000.0);
        close("notifications_per_frame", 0.05);
        close("lost_ratio", 0.75);
        // 1000 datagrams arrived at the program, 200 frames at the interface: more than all.
        assert_eq!(metrics["socket_lost_ratio"], 0.0);
        assert!(!metrics.contains_key("transactions_per_s"));
        let metrics = between("tcp_rr", &before, &after);
        assert_eq!(metrics["transactions_per_s"].round(), 500.0);
        assert_eq!(metrics["cpu_us_per_transaction"], 60.0);
        assert!((metrics["cpu_ns_per_frame"] - 1_000_000.0 / 300.0).abs() < 1e-6);
        assert!(!metrics.contains_key("gbps"));
    }

    #[test]
    fn what_an_arm_has_not_is_absent() {
        let start = Instant::now();
        let without = |factor| Sample { notifications: None, data_path: None, ..sample(start, factor) };
        let metrics = between("tcp_stream", &without(1), &without(2));
        assert!(!metrics.contains_key("cpu_ns_per_frame") && !metrics.contains_key("notifications_per_frame"));
    }

    #[test]
    fn an_arm_that_stalls_has_no_figures() {
        let stalled = sample(Instant::now(), 1);
        let error = Measurement::between(&"tcp_stream".parse().unwrap(), &stalled, &stalled, &[]).unwrap_err();
        assert!(error.to_string().contains("no frame was delivered"), "{error}");
    }

    #[test]
    fn every_metric_has_a_column() {
        let start = Instant::now();
        for kind in ["tcp_rr", "tcp_maerts", "udp_stream"] {
            let after = sample(start + std::time::Duration::from_secs(1), 2);
            for name in between(kind, &sample(start, 1), &after).keys() {
                assert!(METRICS.iter().any(|(known, ..)| known == name), "{name}");
            }
        }
    }

    #[test]
    fn our_own_time_can_be_read() {
        let before: u64 = tasks_of(std::process::id()).iter().map(|(_, used)| used).sum();
        assert!(before > 0, "this kernel shows no /proc/PID/task/*/schedstat");
    }
}
