//! All runs of one call: every workload over every arm, in rounds, until the time is used up.

use crate::arguments::{Arm, Workload};
use crate::lab::Lab;
use crate::sampling::Measurement;
use crate::workload::{self, GeneratorCpus, Timing};
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::{Duration, Instant};

/// Load before each measurement.
const WARM_UP: Duration = Duration::from_millis(60);
/// Length of each measurement: short, so that there are many pairs and slow drifts of the machine hit both arms.
const MEASURE: Duration = Duration::from_millis(220);

/// All that was measured.
#[derive(Debug)]
pub struct Session {
    /// The arms, ready for load.
    pub labs: Vec<Lab>,
    /// The loads.
    pub workloads: Vec<Workload>,
    /// `results[workload][arm][round]`.
    pub results: Vec<Vec<Vec<Measurement>>>,
    /// Where the generator's threads run.
    pub cpus: GeneratorCpus,
    /// How long one measurement lasts.
    pub timing: Timing,
}

impl Session {
    /// Builds every arm.
    pub fn new(arms: &[Arm], workloads: Vec<Workload>) -> Result<Self> {
        let cpus = GeneratorCpus::find()?;
        let labs = arms
            .iter()
            .enumerate()
            .map(|(number, arm)| Lab::build(arm, number).with_context(|| format!("cannot build arm {}", arm.text)))
            .collect::<Result<Vec<_>>>()?;
        let results = vec![vec![Vec::new(); arms.len()]; workloads.len()];
        Ok(Self { labs, workloads, results, cpus, timing: Timing { warm_up: WARM_UP, measure: MEASURE } })
    }

    /// Measures until `deadline`, at least one round. In each round the arms follow each other in random order. After an
    /// error the rounds before it are still there.
    pub fn run(&mut self, deadline: Instant, random: &mut fastrand::Rng) -> Result<()> {
        let progress = progress(deadline.saturating_duration_since(Instant::now()));
        let start = Instant::now();
        let mut longest_round = Duration::ZERO;
        let processes = self.labs.iter().flat_map(|lab| &lab.processes);
        let ours: Vec<u32> = processes.map(|process| process.pid).chain([std::process::id()]).collect();
        loop {
            let round = Instant::now();
            for (workload, results) in self.workloads.iter().zip(&mut self.results) {
                let mut order: Vec<usize> = (0..self.labs.len()).collect();
                random.shuffle(&mut order);
                let mut measured = Vec::new();
                for arm in order {
                    let Some(lab) = self.labs.get_mut(arm) else { continue };
                    progress.set_message(format!("{} over {}", workload.text, lab.arm.text));
                    progress.set_position(start.elapsed().as_millis() as u64);
                    let found = workload::run(lab, workload, self.timing, self.cpus, &ours).and_then(|found| {
                        lab.check()?;
                        Ok(found)
                    });
                    measured.push((arm, found.with_context(|| format!("{} over {}", workload.text, lab.arm.text))?));
                }
                // Only whole rounds, so that the pairs belong together whatever happens.
                for (arm, found) in measured {
                    if let Some(results) = results.get_mut(arm) {
                        results.push(found);
                    }
                }
            }
            longest_round = longest_round.max(round.elapsed());
            if Instant::now() + longest_round > deadline {
                break;
            }
        }
        progress.finish_and_clear();
        Ok(())
    }

    /// Rounds that every workload went through.
    pub fn rounds(&self) -> usize {
        self.results.iter().flatten().map(Vec::len).min().unwrap_or(0)
    }
}

fn progress(length: Duration) -> ProgressBar {
    let bar = ProgressBar::new(length.as_millis() as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3} %  {msg}") {
        bar.set_style(style);
    }
    bar
}
