//! What is read before and after a measurement, and the metrics that follow from the difference.

use crate::arguments::WorkloadKind;
use crate::lab::{Lab, Notifications};
use crate::workload::Counts;
use anyhow::Result;
use hdrhistogram::Histogram;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The metrics in the order in which they are shown: name, heading, digits after the point.
pub const METRICS: [(&str, &str, usize); 10] = [
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
];

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
    /// Nanoseconds of CPU per task of the machine.
    machine: HashMap<u32, u64>,
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

    /// Reads everything, always in the same order, so that each counter's own interval is as long as any other's.
    pub fn take(&self, counts: &Counts) -> Result<Sample> {
        let notifications = self.lab.notifications()?;
        let machine = tasks_of_the_machine();
        let processes = &self.lab.processes;
        let data_path = (!processes.is_empty())
            .then(|| processes.iter().flat_map(|process| tasks_of(process.pid)).map(|(_, used)| used).sum());
        // Relaxed: statistics.
        Ok(Sample {
            at: Instant::now(),
            notifications,
            machine,
            data_path,
            frames: self.lab.received()?,
            transactions: counts.transactions.load(Ordering::Relaxed),
            sent: counts.sent.load(Ordering::Relaxed),
            received: counts.received.load(Ordering::Relaxed),
        })
    }
}

impl Measurement {
    /// What happened between two samples.
    pub fn between(kind: WorkloadKind, before: &Sample, after: &Sample) -> Self {
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        let machine_ns: u64 = after
            .machine
            .iter()
            .map(|(task, used)| used.saturating_sub(before.machine.get(task).copied().unwrap_or(0)))
            .sum();
        let frames = delivered(kind, before.frames, after.frames);
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
            // What is on its way at either moment may make it a little negative.
            put("lost_ratio", (1.0 - (after.received - before.received) as f64 / sent).max(0.0));
        }
        put("frames_per_s", frames / seconds);
        if let (Some(before), Some(after)) = (before.data_path, after.data_path) {
            put("cpu_ns_per_frame", after.saturating_sub(before) as f64 / frames);
        }
        if let (Some(before), Some(after)) = (before.notifications, after.notifications) {
            let frames = delivered(kind, before.delivered, after.delivered);
            put("notifications_per_frame", after.sent.saturating_sub(before.sent) as f64 / frames);
        }
        Self(metrics)
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
fn tasks_of_the_machine() -> HashMap<u32, u64> {
    let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    numbers_in(Path::new("/proc")).flat_map(tasks_of).filter(|(task, _)| *task != own).collect()
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
            machine: HashMap::from([(1, 1_000_000 * factor), (2, 2_000_000 * factor)]),
            data_path: Some(1_000_000 * factor),
            frames: [100 * factor, 200 * factor],
            transactions: 50 * factor,
            sent: 4_000_000 * factor,
            received: 1_000_000 * factor,
        }
    }

    #[test]
    fn metrics_follow_from_the_difference_of_two_samples() {
        let start = Instant::now();
        let (before, after) = (sample(start, 1), sample(start + std::time::Duration::from_millis(100), 2));
        let metrics = Measurement::between(WorkloadKind::UdpStream, &before, &after).0;
        let close = |name: &str, expected: f64| {
            assert!((metrics[name] - expected).abs() < 1e-9 * expected.abs(), "{name}: {}", metrics[name]);
        };
        close("gbps", 0.08);
        close("cpu_s_per_gb", 3.0);
        close("frames_per_s", 2000.0);
        close("cpu_ns_per_frame", 5000.0);
        close("notifications_per_frame", 0.05);
        close("lost_ratio", 0.75);
        assert!(!metrics.contains_key("transactions_per_s"));
        let metrics = Measurement::between(WorkloadKind::TcpRequestResponse, &before, &after).0;
        assert_eq!(metrics["transactions_per_s"].round(), 500.0);
        assert_eq!(metrics["cpu_us_per_transaction"], 60.0);
        assert!((metrics["cpu_ns_per_frame"] - 1_000_000.0 / 300.0).abs() < 1e-6);
        assert!(!metrics.contains_key("gbps"));
    }

    #[test]
    fn what_an_arm_has_not_is_absent() {
        let start = Instant::now();
        let without = |factor| Sample { notifications: None, data_path: None, ..sample(start, factor) };
        let metrics = Measurement::between(WorkloadKind::TcpStream, &without(1), &without(2)).0;
        assert!(!metrics.contains_key("cpu_ns_per_frame") && !metrics.contains_key("notifications_per_frame"));
        // No frame at all: a quotient by zero is no figure either.
        let metrics = Measurement::between(WorkloadKind::TcpStream, &sample(start, 1), &sample(start, 1)).0;
        assert!(metrics.is_empty(), "{metrics:?}");
    }

    #[test]
    fn every_metric_has_a_column() {
        let start = Instant::now();
        let kinds = [WorkloadKind::TcpRequestResponse, WorkloadKind::TcpMaerts, WorkloadKind::UdpStream];
        for kind in kinds {
            let after = sample(start + std::time::Duration::from_secs(1), 2);
            for name in Measurement::between(kind, &sample(start, 1), &after).0.keys() {
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
