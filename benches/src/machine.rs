//! What a result must name: machine, kernel, build and placement.

use crate::lab::Process;
use crate::session::Session;
use serde::Serialize;
use std::fs;

/// Where and with what the figures came about.
#[derive(Debug, Serialize)]
pub struct Environment {
    /// Of vbus-ab.
    pub version: &'static str,
    /// Of the build.
    pub build: &'static str,
    /// Model of the processor.
    pub processor: String,
    /// Whether this is a virtual machine.
    pub virtual_machine: bool,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// Of the kernel.
    pub kernel: String,
    /// CPU of the first guest's generator threads.
    pub generator_cpu_first_guest: usize,
    /// CPU of the second guest's generator threads.
    pub generator_cpu_second_guest: usize,
    /// Load before each measurement, in milliseconds.
    pub warm_up_ms: u64,
    /// Length of each measurement, in milliseconds.
    pub measure_ms: u64,
    /// Rounds; each measured every arm under every workload.
    pub rounds: usize,
    /// Every process of every arm; the generator's threads are vbus-ab's own.
    pub processes: Vec<Process>,
}

impl Environment {
    /// Looks at this machine.
    pub fn of(session: &Session) -> Self {
        let Session { labs, cpus, timing, .. } = session;
        let information = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            let line = information.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let kernel = rustix::system::uname();
        let generator = Process {
            arm: "all".into(),
            role: "vbus-ab: load generator".into(),
            pid: std::process::id(),
            cpus_allowed: format!("{} for guest 1, {} for guest 2", cpus.first, cpus.last),
        };
        let processes = labs.iter().flat_map(|lab| lab.processes.clone());
        Self {
            version: env!("CARGO_PKG_VERSION"),
            build: if cfg!(debug_assertions) { "debug" } else { "release" },
            processor: field("model name").unwrap_or_else(|| "unknown".into()),
            virtual_machine: field("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: format!("{} {}", kernel.sysname().to_string_lossy(), kernel.release().to_string_lossy()),
            generator_cpu_first_guest: cpus.first,
            generator_cpu_second_guest: cpus.last,
            warm_up_ms: timing.warm_up.as_millis() as u64,
            measure_ms: timing.measure.as_millis() as u64,
            rounds: session.rounds(),
            processes: processes.chain([generator]).collect(),
        }
    }
}
