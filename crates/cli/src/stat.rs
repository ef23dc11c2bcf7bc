//! `stat`: iostat's reports over our devices, from their control sockets.

pub(crate) mod layers;
mod report;
mod when;

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
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use when::Clock;

/// The shortest interval: each report asks every process for all counters.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// The longest interval, some 136 years.
const INTERVAL_MAX: Duration = Duration::from_secs(u32::MAX as u64);

/// `[NAME] [INTERVAL [COUNT]]`, told apart as iostat does: what is a number is an interval.
#[derive(Debug, PartialEq, Eq)]
struct Words {
    name: Option<String>,
    interval: Option<Duration>,
    /// `None`: until interrupted.
    count: Option<u64>,
}

impl Words {
    fn parse(words: &[String]) -> Result<Words, String> {
        let is_number = |word: &String| is_decimal(word);
        let (name, rest) = match words {
            [name, rest @ ..] if !is_number(name) => (Some(name.clone()), rest),
            rest => (None, rest),
        };
        let number = |word: &String| match word.parse::<u64>() {
            Ok(number) if (1..=u64::from(u32::MAX)).contains(&number) => Ok(number),
            _ => Err(format!("\"{word}\" is not a number from 1 on (write [NAME] [INTERVAL [COUNT]])")),
        };
        let seconds = |word: &String| interval(word).map(Some);
        match rest {
            [] => Ok(Words { name, interval: None, count: Some(1) }),
            [interval] => Ok(Words { name, interval: seconds(interval)?, count: None }),
            [interval, count] => {
                Ok(Words { name, interval: seconds(interval)?, count: Some(number(count)?) })
            }
            [_, _, more, ..] => {
                Err(format!("\"{more}\" is one word too many (write [NAME] [INTERVAL [COUNT]])"))
            }
        }
    }
}

/// Whether a word is a number of seconds rather than a name: digits, and at most one point among them.
fn is_decimal(word: &str) -> bool {
    let (whole, fraction) = word.split_once('.').unwrap_or((word, "0"));
    [whole, fraction].iter().all(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// Seconds, which may have a fraction.
fn interval(word: &str) -> Result<Duration, String> {
    let seconds = Some(word).filter(|word| is_decimal(word)).and_then(|word| word.parse::<f64>().ok());
    match seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()) {
        Some(interval) if (INTERVAL_MIN..=INTERVAL_MAX).contains(&interval) => Ok(interval),
        _ => Err(format!(
            "\"{word}\" is not an interval in seconds from 0.1 on (write [NAME] [INTERVAL [COUNT]])"
        )),
    }
}

pub(crate) fn stat(args: &StatArgs) -> Result<ExitCode, Failure> {
    let words = Words::parse(&args.words).map_err(|why| Failure::usage("stat", "", why))?;
    let run = run_dir("stat")?;
    let client = match &words.name {
        Some(name) => Some(client_of(&run, "stat", name)?),
        None => None,
    };
    block_on("stat", report(args, &words, &run, client))?
}

async fn report(
    args: &StatArgs,
    words: &Words,
    run: &RunDir,
    client: Option<ControlClient>,
) -> Result<ExitCode, Failure> {
    let name = words.name.as_deref().unwrap_or_default();
    let period = words.interval.unwrap_or(Duration::from_secs(1));
    let mut ticks = interval_at(Instant::now(), period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // A document is to be closed, however it ends; without one, a signal just ends it.
    let mut signals = match args.format {
        Some(_) => Some(Signals::new().map_err(|why| Failure::new("stat", name, why))?),
        None => None,
    };
    let mut before: HashMap<String, DeviceStats> = HashMap::new();
    let mut reports = 0;
    let mut outcome = Ok(ExitCode::SUCCESS);
    let mut omits = args.omit_first && words.interval.is_some();
    while words.count.is_none_or(|count| reports < count) {
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
        if !omitted && !print(&one_report(args, &before, &now, reports == 0)) {
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

/// Somebody ends it; never, if signals are not waited for.
async fn interrupted(signals: &mut Option<Signals>) {
    match signals {
        Some(signals) => drop(signals.next().await),
        None => std::future::pending().await,
    }
}

/// What comes after the reports of iostat's document.
const DOCUMENT_END: &str = "]}]}}\n";

/// One report of what happened since the last.
fn one_report(
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
    let when = args.timestamps.then(|| Clock::of_environment().timestamp());
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

/// iostat's document up to its reports.
fn document_start() -> String {
    let system = rustix::system::uname();
    let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
    let facts = json!({
        "nodename": text(system.nodename()),
        "sysname": text(system.sysname()),
        "release": text(system.release()),
        "machine": text(system.machine()),
        "number-of-cpus": std::thread::available_parallelism().map_or(1, usize::from),
        "date": Clock::of_environment().date(),
    });
    let facts = facts.to_string();
    format!("{{\"sysstat\":{{\"hosts\":[{},\"statistics\":[", facts.trim_end_matches('}'))
}

async fn all_stats(run: &RunDir) -> Result<Vec<DeviceStats>, ClientError> {
    let mut all = Vec::new();
    for (client, info) in devices(run).await? {
        match client.stats(&info.name).await {
            Ok(stats) => all.push(stats),
            // It went between the two questions.
            Err(ClientError::Refused(ControlError::NotFound) | ClientError::Connect { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Words, String> {
        Words::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn numbers_are_interval_and_count_and_a_word_is_a_name() {
        let words = |name: Option<&str>, seconds: Option<u64>, count| Words {
            name: name.map(str::to_owned),
            interval: seconds.map(Duration::from_secs),
            count,
        };
        assert_eq!(parse(""), Ok(words(None, None, Some(1))));
        assert_eq!(parse("disk"), Ok(words(Some("disk"), None, Some(1))));
        assert_eq!(parse("2"), Ok(words(None, Some(2), None)));
        assert_eq!(parse("disk 2 5"), Ok(words(Some("disk"), Some(2), Some(5))));
        let half = Words { name: None, interval: Some(Duration::from_millis(500)), count: None };
        assert_eq!(parse("0.5"), Ok(half));
        assert_eq!(parse("disk 2.25 3").unwrap().interval, Some(Duration::from_millis(2250)));
        assert_eq!(parse("0.5.1"), Ok(words(Some("0.5.1"), None, Some(1))), "a name");
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
