//! On which cores the pump runs.

use core::fmt;
use core::str::FromStr;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use thiserror::Error;

/// Where a thread may run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Wherever the scheduler puts it.
    #[default]
    None,
    /// On these CPUs only.
    Cpus(Vec<usize>),
}

impl Placement {
    /// Places the calling thread.
    pub fn apply(&self) -> io::Result<()> {
        let Placement::Cpus(cpus) = self else { return Ok(()) };
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu));
        Ok(sched_setaffinity(None, &set)?)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::None => formatter.write_str("none"),
            Placement::Cpus(cpus) => {
                let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
                formatter.write_str(&cpus.join("+"))
            }
        }
    }
}

/// A text that is no placement.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0:?} is no placement: expected none, or CPU numbers such as 0 or 0+2-3")]
pub struct UnknownPlacement(String);

impl FromStr for Placement {
    type Err = UnknownPlacement;
    fn from_str(text: &str) -> Result<Self, UnknownPlacement> {
        if text == "none" {
            return Ok(Placement::None);
        }
        let number = |word: &str| word.parse().ok().filter(|&cpu: &usize| cpu < CpuSet::MAX_CPU);
        let mut cpus = Vec::new();
        for part in text.split([',', '+']) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (number(first), number(last)) {
                (Some(first), Some(last)) if first <= last => cpus.extend(first..=last),
                _ => return Err(UnknownPlacement(text.into())),
            }
        }
        Ok(Placement::Cpus(cpus))
    }
}
