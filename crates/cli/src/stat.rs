//! `stat`: iostat's reports for our devices, from their control sockets.

pub(crate) mod layers;
mod report;
mod time_format;

pub(crate) use report::{EachSecond, Rates};

use crate::args::StatArgs;
use crate::failure::{Failure, print};
use crate::listing::{block_on, client_of, devices, run_dir};
use crate::signals::Signals;
use engine::control::{ClientError, ControlClient, ControlError, DeviceStats};
use engine::rundir::RunDir;
use layers::Shown;
use report::{Form, disks, text_report};
use serde_json::json;
use std::collections::HashMap;
use std::process::ExitCode;
use std::time::Duration;
use time_format::TimeFormat;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// The shortest interval. Each report requests all counters from every process.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// The longest interval, about 136 years.
const INTERVAL_MAX: Duration = Duration::from_secs(u32::MAX as u64);

/// `[NAME] [INTERVAL [COUNT]]`. As in iostat, a number is an interval.
#[derive(Debug, PartialEq, Eq)]
struct Arguments {
    name: Option<String>,
    interval: Option<Duration>,
    /// `None`: until interrupted.
    count: Option<u64>,
}

impl Arguments {
    fn parse(args: &[String]) -> Result<Arguments, String> {
        let is_number = |arg: &String| is_decimal(arg);
        let (name, rest) = match args {
            [name, rest @ ..] if !is_number(name) => (Some(name.clone()), rest),
            rest => (None, rest),
        };
        let number = |arg: &String| match arg.parse::<u64>() {
            Ok(number) if (1..=u64::from(u32::MAX)).contains(&number) => Ok(number),
            _ => Err(format!("\"{arg}\" is not a positive number (usage: [NAME] [INTERVAL [COUNT]])")),
        };
        let seconds = |arg: &String| interval(arg).map(Some);
        match rest {
            [] => Ok(Arguments { name, interval: None, count: Some(1) }),
            [interval] => Ok(Arguments { name, interval: seconds(interval)?, count: None }),
            [interval, count] => {
                Ok(Arguments { name, interval: seconds(interval)?, count: Some(number(count)?) })
            }
            [_, _, more, ..] => {
                Err(format!("unexpected argument \"{more}\" (usage: [NAME] [INTERVAL [COUNT]])"))
            }
        }
    }
}

/// Returns whether an argument is a number of seconds rather than a name: digits with at most one decimal
/// point.
fn is_decimal(arg: &str) -> bool {
    let (whole, fraction) = arg.split_once('.').unwrap_or((arg, "0"));
    [whole, fraction].iter().all(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// Parses an interval in seconds, which may have a fraction.
fn interval(arg: &str) -> Result<Duration, String> {
    let seconds = Some(arg).filter(|arg| is_decimal(arg)).and_then(|arg| arg.parse::<f64>().ok());
    match seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
        Some(interval) if (INTERVAL_MIN..=INTERVAL_MAX).contains(&interval) => Ok(interval),
        _ => Err(format!(
            "\"{arg}\" is not an interval of at least 0.1 seconds (usage: [NAME] [INTERVAL [COUNT]])"
        )),
    }
}

pub(crate) fn stat(args: &StatArgs) -> Result<ExitCode, Failure> {
    let arguments = Arguments::parse(&args.arguments).map_err(|why| Failure::usage("stat", "", why))?;
    let run = run_dir("stat")?;
    let client = match &arguments.name {
        Some(name) => Some(client_of(&run, "stat", name)?),
        None => None,
    };
    block_on("stat", report(args, &arguments, &run, client))?
}

async fn report(
    args: &StatArgs,
    arguments: &Arguments,
    run: &RunDir,
    client: Option<ControlClient>,
) -> Result<ExitCode, Failure> {
    let name = arguments.name.as_deref().unwrap_or_default();
    let period = arguments.interval.unwrap_or(Duration::from_secs(1));
    let mut ticks = interval_at(Instant::now(), period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // A JSON document has to be completed, even after a signal; without one, the signal ends the process.
    let mut signals = match args.format {
        Some(_) => Some(Signals::new().map_err(|why| Failure::new("stat", name, why))?),
        None => None,
    };
    let mut before: HashMap<String, DeviceStats> = HashMap::new();
    let mut reports = 0;
    let mut outcome = Ok(ExitCode::SUCCESS);
    let mut omits = args.omit_first && arguments.interval.is_some();
    while arguments.count.is_none_or(|count| reports < count) {
        let next = async {
            ticks.tick().await;
            match &client {
                Some(client) => client.stats(name).await.map(|stats| vec![stats]),
                None => all_stats(run).await,
            }
        };
        let now = tokio::select! {
            now = next => now,
            () = interrupted(&mut signals) => break,
        };
        let now = match now {
            Ok(now) => now,
            Err(why) => {
                outcome = Err(Failure::new("stat", name, why));
                break;
            }
        };
        let omitted = std::mem::take(&mut omits);
        if !omitted && !print(&format_report(args, &before, &now, reports == 0)) {
            break;
        }
        before = now.into_iter().map(|stats| (stats.name.clone(), stats)).collect();
        reports += u64::from(!omitted);
    }
    match (&args.format, reports) {
        (Some(_), 0) => print(&format!("{}{DOCUMENT_END}", document_start())),
        (Some(_), _) => print(DOCUMENT_END),
        (None, _) => true,
    };
    outcome
}

/// Waits for a signal; never returns if signals are not handled.
async fn interrupted(signals: &mut Option<Signals>) {
    match signals {
        Some(signals) => drop(signals.next().await),
        None => std::future::pending().await,
    }
}

/// The end of iostat's JSON document.
const DOCUMENT_END: &str = "]}]}}\n";

/// Formats the report of one interval.
fn format_report(
    args: &StatArgs,
    before: &HashMap<String, DeviceStats>,
    now: &[DeviceStats],
    first: bool,
) -> String {
    let mut rates = Vec::new();
    let mut nodes = Vec::new();
    let shown = if args.paths { Shown::Paths } else { Shown::Layers };
    let form = Form { extended: args.extended, megabytes: args.megabytes };
    for stats in now {
        let before = before.get(&stats.name);
        let device = Rates::new(before, stats);
        if args.active && device.is_idle() {
            continue;
        }
        rates.push(device);
        if args.queues {
            let queues = Rates::of_queues(before, stats).into_iter();
            rates.extend(queues.filter(|queue| !args.active || !queue.is_idle()));
        }
        if args.layers || args.paths {
            nodes.extend(layers::rows(before, stats, shown));
        }
    }
    let when = args.timestamps.then(|| TimeFormat::of_environment().timestamp());
    if !args.output.json && args.format.is_none() {
        let mut text = when.map_or(String::new(), |when| when + "\n");
        text += &text_report(&rates, form);
        if args.layers || args.paths {
            text += &layers::text(&nodes);
        }
        return text;
    }
    let mut report = json!({ "disk": disks(&rates, form) });
    if args.layers || args.paths {
        report["layer"] = layers::json(&nodes);
    }
    if let Some(when) = when {
        report["timestamp"] = when.into();
    }
    match (args.format.is_some(), first) {
        (false, _) => format!("{report}\n"),
        (true, true) => format!("{}{report}", document_start()),
        (true, false) => format!(",{report}"),
    }
}

/// Returns iostat's JSON document up to its reports.
fn document_start() -> String {
    let system = rustix::system::uname();
    let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
    let facts = json!({
        "nodename": text(system.nodename()),
        "sysname": text(system.sysname()),
        "release": text(system.release()),
        "machine": text(system.machine()),
        "number-of-cpus": std::thread::available_parallelism().map_or(1, usize::from),
        "date": TimeFormat::of_environment().date(),
    });
    let facts = facts.to_string();
    format!("{{\"sysstat\":{{\"hosts\":[{},\"statistics\":[", facts.trim_end_matches('}'))
}

async fn all_stats(run: &RunDir) -> Result<Vec<DeviceStats>, ClientError> {
    let mut all = Vec::new();
    for (client, info) in devices(run).await? {
        match client.stats(&info.name).await {
            Ok(stats) => all.push(stats),
            // The device was removed meanwhile.
            Err(ClientError::Refused(ControlError::NotFound) | ClientError::Connect { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Arguments, String> {
        Arguments::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn numbers_are_interval_and_count_and_other_arguments_a_name() {
        let arguments = |name: Option<&str>, seconds: Option<u64>, count| Arguments {
            name: name.map(str::to_owned),
            interval: seconds.map(Duration::from_secs),
            count,
        };
        assert_eq!(parse(""), Ok(arguments(None, None, Some(1))));
        assert_eq!(parse("disk"), Ok(arguments(Some("disk"), None, Some(1))));
        assert_eq!(parse("2"), Ok(arguments(None, Some(2), None)));
        assert_eq!(parse("disk 2 5"), Ok(arguments(Some("disk"), Some(2), Some(5))));
        let half = Arguments { name: None, interval: Some(Duration::from_millis(500)), count: None };
        assert_eq!(parse("0.5"), Ok(half));
        assert_eq!(parse("disk 2.25 3").unwrap().interval, Some(Duration::from_millis(2250)));
        assert_eq!(parse("0.5.1"), Ok(arguments(Some("0.5.1"), None, Some(1))), "a name");
        for text in [
            "0",
            "0.0",
            "0.05",
            "disk .5",
            "disk 1.",
            "disk 1e3",
            "disk inf",
            "1 0.5",
            "1 0",
            "disk x",
            "1 2 3",
            "disk 1 x",
            "99999999999",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
