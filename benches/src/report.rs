//! What a session found, as a table for people and as JSON for programs.

use crate::arguments::Workload;
use crate::machine::Environment;
use crate::sampling::METRICS;
use crate::session::Session;
use crate::statistics::{LEAST_PAIRS, PairedRatio, median, paired_ratio};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Shares that may be next to nothing: their quotient would say nothing.
const WITHOUT_RATIO: [&str; 3] = ["lost_ratio", "socket_lost_ratio", "foreign_cpus"];
/// More of the machine than this, used by others, makes figures worth little.
const DISTURBED: f64 = 0.1;

/// The report. Later versions only add to it.
#[derive(Debug, Serialize)]
pub struct Report {
    schema: u32,
    env: Environment,
    arms: Vec<ArmResult>,
    ratios: Vec<Ratio>,
}

/// One arm under one workload; medians over all rounds.
#[derive(Debug, Serialize)]
struct ArmResult {
    arm: String,
    lab: &'static str,
    workload: String,
    params: Map<String, Value>,
    metrics: BTreeMap<&'static str, f64>,
}

/// One arm by another.
#[derive(Debug, Serialize)]
struct Ratio {
    a: String,
    b: String,
    workload: String,
    params: Map<String, Value>,
    metric: &'static str,
    ratio: f64,
    ci95: [f64; 2],
    pairs: usize,
    /// So few that the interval is none.
    few_pairs: bool,
}

impl Report {
    /// Sums a session up.
    pub fn of(session: &Session, random: &mut fastrand::Rng) -> Self {
        let env = Environment::of(session);
        let (mut arms, mut ratios) = (Vec::new(), Vec::new());
        for (workload, results) in session.workloads.iter().zip(&session.results) {
            let series = |arm: usize, metric: &str| -> Vec<Option<f64>> {
                results.get(arm).into_iter().flatten().map(|run| run.0.get(metric).copied()).collect()
            };
            for (number, lab) in session.labs.iter().enumerate() {
                let mut params = parameters(workload);
                params.extend(lab.arm.given.iter().map(|(key, value)| (key.clone(), json!(value))));
                let metrics = METRICS
                    .iter()
                    .filter_map(|(name, ..)| {
                        let values: Vec<f64> = series(number, name).into_iter().flatten().collect();
                        Some((*name, median(&values)?))
                    })
                    .collect();
                let arm = lab.arm.text.clone();
                arms.push(ArmResult { arm, lab: "namespaces", workload: workload.text.clone(), params, metrics });
                for (other, floor) in session.labs.iter().enumerate().skip(number + 1) {
                    for (metric, ..) in METRICS.iter().filter(|(metric, ..)| !WITHOUT_RATIO.contains(metric)) {
                        let found = paired_ratio(&series(number, metric), &series(other, metric), random);
                        let Some(PairedRatio { ratio, ci95, pairs }) = found else { continue };
                        ratios.push(Ratio {
                            a: lab.arm.text.clone(),
                            b: floor.arm.text.clone(),
                            workload: workload.text.clone(),
                            params: parameters(workload),
                            metric,
                            ratio,
                            ci95,
                            pairs,
                            few_pairs: pairs < LEAST_PAIRS,
                        });
                    }
                }
            }
        }
        Self { schema: 1, env, arms, ratios }
    }

    /// As a table.
    pub fn table(&self) -> String {
        let mut text = self.heading();
        let mut workloads: Vec<&str> = Vec::new();
        for arm in &self.arms {
            if !workloads.contains(&arm.workload.as_str()) {
                workloads.push(&arm.workload);
            }
        }
        for workload in workloads {
            self.workload_table(workload, &mut text);
        }
        text
    }

    fn heading(&self) -> String {
        let env = &self.env;
        let mut text = format!(
            "vbus-ab {}, {} build; {}; {} CPUs of {}{}\n",
            env.version,
            env.build,
            env.kernel,
            env.cpus,
            env.processor,
            if env.virtual_machine { ", virtual machine" } else { "" },
        );
        let _ = writeln!(text, "measurements of {} ms after {} ms of load; processes:", env.measure_ms, env.warm_up_ms);
        for process in &env.processes {
            let _ = writeln!(
                text,
                "  {:<24} {:<30} pid {:<8} CPUs {}",
                process.arm, process.role, process.pid, process.cpus_allowed
            );
        }
        let foreign = self
            .arms
            .iter()
            .filter_map(|arm| arm.metrics.get("foreign_cpus"))
            .fold(0.0f64, |most, &cpus| most.max(cpus));
        if foreign > DISTURBED {
            let _ = writeln!(text, "other programs used {foreign:.2} CPUs meanwhile: stop them and measure again");
        }
        text
    }

    fn workload_table(&self, workload: &str, text: &mut String) {
        let arms: Vec<&ArmResult> = self.arms.iter().filter(|arm| arm.workload == workload).collect();
        let ratios: Vec<&Ratio> = self.ratios.iter().filter(|ratio| ratio.workload == workload).collect();
        let columns: Vec<_> =
            METRICS.iter().filter(|(name, ..)| arms.iter().any(|arm| arm.metrics.contains_key(name))).collect();
        let mut pairs: Vec<(&str, &str)> = Vec::new();
        for ratio in &ratios {
            if !pairs.contains(&(&ratio.a, &ratio.b)) {
                pairs.push((&ratio.a, &ratio.b));
            }
        }
        let labels = arms.iter().map(|arm| arm.arm.len()).chain(pairs.iter().map(|(a, b)| a.len() + b.len() + 3));
        let width = labels.chain([workload.len()]).max().unwrap_or(0);
        let params = arms
            .first()
            .map_or(String::new(), |arm| format!("{} bytes, {} sessions", arm.params["size"], arm.params["sessions"]));
        let _ =
            writeln!(text, "\n{workload}: {params}; median of {} rounds, ratios with 95 % confidence", self.env.rounds);
        let _ = write!(text, "{:<width$}", "");
        for (_, heading, _) in &columns {
            let _ = write!(text, " {heading:>17}");
        }
        text.push('\n');
        for arm in &arms {
            let _ = write!(text, "{:<width$}", arm.arm);
            for (name, _, digits) in &columns {
                let cell = arm.metrics.get(name).map_or("-".into(), |value| format!("{value:.digits$}"));
                let _ = write!(text, " {cell:>17}");
            }
            text.push('\n');
        }
        for (a, b) in pairs {
            let _ = write!(text, "{:<width$}", format!("{a} : {b}"));
            for (name, ..) in &columns {
                let found = ratios.iter().find(|ratio| ratio.a == a && ratio.b == b && ratio.metric == *name);
                let cell = found.map_or("-".into(), |ratio| {
                    let [low, high] = ratio.ci95;
                    let interval = if ratio.few_pairs { "too few".into() } else { format!("{low:.2}-{high:.2}") };
                    format!("{:.2} ({interval})", ratio.ratio)
                });
                let _ = write!(text, " {cell:>17}");
            }
            text.push('\n');
        }
    }
}

fn parameters(workload: &Workload) -> Map<String, Value> {
    Map::from_iter([("size".into(), json!(workload.size)), ("sessions".into(), json!(workload.sessions))])
}
