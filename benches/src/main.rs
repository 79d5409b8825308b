//! **vbus-ab** compares venet with a plain forwarder and with the kernel alone, side by side, in namespaces of its own.
//!
//! | question | module |
//! |---|---|
//! | what may be given on the command line? | [`arguments`] |
//! | how does it get away from the host's network? | [`namespaces`] |
//! | what is an arm made of? | [`lab`], [`children`], [`veth`], [`forwarder`] |
//! | what load? | [`workload`] |
//! | what is counted, and what follows from it? | [`sampling`], [`statistics`] |
//! | in which order? | [`session`] |
//! | what is shown? | [`report`], [`machine`] |

mod arguments;
mod children;
mod forwarder;
mod lab;
mod machine;
mod namespaces;
mod report;
mod sampling;
mod session;
mod statistics;
mod veth;
mod workload;

use anyhow::{Context, Result, bail};
use arguments::{Arm, DEFAULT_ARMS, DEFAULT_WORKLOADS, Workload};
use children::Role;
use clap::{CommandFactory, Parser, Subcommand};
use report::Report;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use session::Session;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Compares venet with a plain forwarder and with the kernel alone, in namespaces of its own: no root, nothing installed,
/// nothing on the host touched.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
struct Arguments {
    /// An arm: venet, forwarder or veth, with keys cpus= (as 0 or 0+2-3), offloads= (as none or csum+tso4), policy= [default: all three]
    #[arg(long = "arm", value_name = "NAME[:key=value,...]")]
    arms: Vec<Arm>,
    /// A workload: tcp_rr, tcp_stream, tcp_maerts or udp_stream, with keys size= (bytes) and sessions= [default: all four]
    #[arg(long = "workload", value_name = "NAME[:key=value,...]")]
    workloads: Vec<Workload>,
    /// Seconds in all, if a round takes no longer; more make the intervals narrower
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=86400))]
    time: u64,
    /// Write the results to a file as JSON, too; - is the standard output instead of the table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Order>,
}

const EXAMPLES: &str = "Examples:
  vbus-ab
  vbus-ab --time 300 --json result.json
  vbus-ab --arm venet --arm forwarder --workload udp_stream:size=64
  vbus-ab --arm venet:cpus=0 --arm forwarder:cpus=0 --workload tcp_rr:sessions=4

The ratios are those of each arm to every arm after it. Everything on the machine counts as CPU per transaction and per
gigabyte: stop what else is running.";

#[derive(Clone, Debug, Subcommand)]
enum Order {
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page
    Man,
    #[command(flatten)]
    Role(Role),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_target(false).with_writer(io::stderr).init();
    let done = match arguments.command {
        None => compare(arguments),
        Some(Order::Role(role)) => role.play(),
        Some(Order::Completions { shell }) => {
            clap_complete::generate(shell, &mut Arguments::command(), "vbus-ab", &mut io::stdout());
            Ok(())
        }
        Some(Order::Man) => clap_mangen::Man::new(Arguments::command()).render(&mut io::stdout()).map_err(Into::into),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "vbus-ab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn compare(arguments: Arguments) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(arguments.time);
    if cfg!(debug_assertions) {
        bail!("this is a debug build, whose figures mean nothing; use: cargo run --release --bin vbus-ab");
    }
    let arms = or_default(arguments.arms, &DEFAULT_ARMS)?;
    let workloads = or_default(arguments.workloads, &DEFAULT_WORKLOADS)?;
    // Before anything else is done, and before the host's directories may be out of sight.
    for (number, arm) in arms.iter().enumerate() {
        if arms.iter().take(number).any(|other| other.text == arm.text) {
            bail!("the arm {0:?} is given twice; to compare it with itself write it as \"{0}:\" once", arm.text);
        }
    }
    let mut json = arguments.json.map(Output::create).transpose()?;
    namespaces::enter_own()?;
    let mut random = fastrand::Rng::new();
    raise_descriptor_limit();
    let mut session = Session::new(&arms, workloads)?;
    let done = session.run(deadline, &mut random);
    if session.rounds() == 0 {
        return done;
    }
    let report = Report::of(&session, &mut random);
    if !matches!(json, Some(Output::Standard)) {
        io::stdout().write_all(report.table().as_bytes())?;
    }
    if let Some(output) = &mut json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        output.write(text.as_bytes()).context("cannot write the results as JSON")?;
    }
    done.context("the run was cut short; what is shown is from before")
}

/// Four descriptors per session may be more than the usual limit. Best effort: beyond the hard limit an error will say so.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn or_default<T: std::str::FromStr<Err = String>>(given: Vec<T>, names: &[&str]) -> Result<Vec<T>> {
    if !given.is_empty() {
        return Ok(given);
    }
    names.iter().map(|name| name.parse().map_err(anyhow::Error::msg)).collect()
}

/// Where the JSON goes.
enum Output {
    Standard,
    File(File),
}

impl Output {
    fn create(path: PathBuf) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Ok(Self::Standard);
        }
        File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map(Self::File)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Standard => io::stdout().write_all(bytes),
            // Not before there is something better to put in its place.
            Self::File(file) => file.set_len(0).and_then(|()| file.write_all(bytes)),
        }
    }
}
