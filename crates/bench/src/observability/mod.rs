//! `./x bench observability`: the cost of observing a device, compared with none, in one run.
//!
//! Each device has its own server, which stays. A round runs the devices and, for each, the watchers,
//! beginning with another one every time; a watcher runs during the load only. A figure is the median of
//! the rounds; a cost is the median of the rounds' own ratios to no watcher, which removes drift during a
//! run.
//!
//! There are two costs. The cost of requests a second includes all effects of a watcher, on a machine whose
//! processors the load keeps busy. The cost of the serving thread is the cost on a machine with a free
//! processor.

mod devices;
mod watchers;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::figures::{ratio, spread};
use crate::options;
use devices::{DEVICES, Served};
use watchers::{WATCHERS, Watcher};

/// The limits of watchers, in per cent of requests a second: see docs/benchmarks/observability.md.
const GOALS: [(&str, &str, f64); 2] = [("null", "trace", 15.0), ("file", "trace", 5.0)];

/// If rounds without a watcher differ by more than this factor, other programs kept the machine busy.
const UNSTEADY: f64 = 2.5;

const USAGE: &str = "\
usage: ./x bench observability [OPTIONS]
  --rounds N       (5)     --seconds S  of each measurement (1)
  --devices A,B    whose names begin so, =A: that one alone (all)
  --watchers A,B   likewise; nothing is always there
  --out PATH       where observability.csv goes (target/bench)
";

/// The result of one measurement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// Requests a second.
    pub(crate) rate: f64,
    /// The serving thread's processor time for each request, in microseconds.
    pub(crate) thread_us: f64,
    /// Share of a trace's events that were dropped, 0 to 1.
    pub(crate) dropped: Option<f64>,
    /// Answers a second of a page that is requested continuously.
    pub(crate) answers: Option<f64>,
}

/// All rounds of one watcher at one device.
struct Row {
    device: &'static str,
    watcher: &'static str,
    samples: Vec<Sample>,
}

struct Options {
    rounds: usize,
    seconds: f64,
    devices: Vec<&'static devices::Device>,
    watchers: Vec<&'static Watcher>,
    out: PathBuf,
}

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    options::command("observability", USAGE, arguments, parse, run)
}

fn parse(arguments: &[String]) -> Result<Options> {
    let mut options = Options {
        rounds: 5,
        seconds: 1.0,
        devices: DEVICES.iter().collect(),
        watchers: WATCHERS.iter().collect(),
        out: "target/bench".into(),
    };
    let (all_devices, all_watchers) = (options.devices.clone(), options.watchers.clone());
    options::each(arguments, |name, value| {
        match name {
            "--rounds" => options.rounds = options::count(name, value)? as usize,
            "--seconds" => options.seconds = options::number(name, value)?,
            "--devices" => options.devices = options::chosen(name, value, &all_devices, |one| one.name)?,
            "--watchers" => {
                options.watchers = options::chosen(name, value, &all_watchers, |one| one.name)?;
                options.watchers.retain(|one| one.name != WATCHERS[0].name);
                options.watchers.insert(0, &WATCHERS[0]);
            }
            "--out" => options.out = value.into(),
            _ => return Err(Error(format!("no such option: {name}"))),
        }
        Ok(())
    })?;
    if !(0.1..=60.0).contains(&options.seconds) {
        return Err(Error("--seconds: from 0.1 to 60".into()));
    }
    Ok(options)
}

fn run(options: &Options) -> Result<()> {
    let served: Vec<Served> = options.devices.iter().map(|device| device.serve()).collect::<Result<_>>()?;
    let mut rows: Vec<Row> = Vec::new();
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        for device in &served {
            for turn in 0..options.watchers.len() {
                let watcher = options.watchers[(turn + round) % options.watchers.len()];
                if !watcher.watches(device) {
                    continue;
                }
                let sample = measure(device, watcher, Duration::from_secs_f64(options.seconds))?;
                let known =
                    rows.iter_mut().find(|row| row.device == device.name && row.watcher == watcher.name);
                match known {
                    Some(row) => row.samples.push(sample),
                    None => {
                        rows.push(Row { device: device.name, watcher: watcher.name, samples: vec![sample] })
                    }
                }
            }
        }
    }
    print!("{}", page(options, &rows));
    std::fs::create_dir_all(&options.out)
        .and_then(|()| std::fs::write(options.out.join("observability.csv"), csv(&rows)))
        .map_err(|error| Error(format!("{}: {error}", options.out.display())))
}

fn measure(device: &Served, watcher: &Watcher, time: Duration) -> Result<Sample> {
    let watching = watcher.start(device)?;
    let sample = device.under_load(time)?;
    let seen = watching.finish()?;
    let dropped = seen.events.map(|events| share_dropped(events, sample.rate * time.as_secs_f64()));
    let failed = |error: Error| Error(format!("{} of {}: {}", watcher.name, device.name, error.0));
    Ok(Sample { dropped: dropped.transpose().map_err(failed)?, answers: seen.answers, ..sample })
}

/// Returns the share of a trace's events that were dropped, if the trace is complete: more than one event for
/// each request.
fn share_dropped([had, dropped]: [f64; 2], requests: f64) -> Result<f64> {
    let all = had + dropped;
    if all < 2.0 * requests {
        return Err(Error(format!(
            "{all:.0} events of {requests:.0} requests: it was not there all the time"
        )));
    }
    Ok(dropped / all)
}

impl Row {
    fn of(&self, what: fn(&Sample) -> f64) -> Vec<f64> {
        self.samples.iter().map(what).collect()
    }
}

/// Returns the cost of a watcher in per cent: of requests a second, and of the serving thread's time.
fn costs(rows: &[Row], row: &Row) -> Option<(f64, f64)> {
    let nothing =
        rows.iter().find(|other| other.device == row.device && other.watcher == WATCHERS[0].name)?;
    let rate = ratio(&row.of(|sample| sample.rate), &nothing.of(|sample| sample.rate));
    let time = ratio(&row.of(|sample| sample.thread_us), &nothing.of(|sample| sample.thread_us));
    Some(((1.0 - rate) * 100.0, (time - 1.0) * 100.0))
}

fn page(options: &Options, rows: &[Row]) -> String {
    let mut text = format!(
        "one client, 4 KiB, half reads and half writes at random, 32 in flight, {} rounds of {} s\n\n\
         | device | watched by | op/s (least..greatest) | cost of op/s | thread us/op | its cost | dropped | answers/s |\n\
         |---|---|---|---|---|---|---|---|\n",
        options.rounds, options.seconds
    );
    for row in rows {
        let (least, rate, greatest) = spread(&row.of(|sample| sample.rate));
        let (_, thread, _) = spread(&row.of(|sample| sample.thread_us));
        let (cost, own) = costs(rows, row).unwrap_or((f64::NAN, f64::NAN));
        let median = |of: fn(&Sample) -> Option<f64>| {
            let all: Vec<f64> = row.samples.iter().filter_map(of).collect();
            (!all.is_empty()).then(|| spread(&all).1)
        };
        let dropped = median(|sample| sample.dropped)
            .map_or_else(|| "-".into(), |share| format!("{:.0} %", share * 100.0));
        let answers = median(|sample| sample.answers).map_or_else(|| "-".into(), |rate| format!("{rate:.0}"));
        text += &format!(
            "| {} | {} | {rate:.0} ({least:.0}..{greatest:.0}) | {cost:.1} % | {thread:.3} | {own:.1} % | {dropped} | {answers} |\n",
            row.device, row.watcher
        );
    }
    text.push('\n');
    for (device, watcher, goal) in GOALS {
        let row = rows.iter().find(|row| row.device == device && row.watcher == watcher);
        if let Some((cost, own)) = row.and_then(|row| costs(rows, row)) {
            let (least, _, greatest) = spread(&unwatched(rows, device));
            let met = match cost <= goal {
                // Other load on the machine had more effect than the watcher.
                _ if greatest > UNSTEADY * least => "not measurable on a machine that is this busy",
                true => "met",
                false => "missed",
            };
            text += &format!(
                "{watcher} on {device}: {cost:.1} % of requests a second, at most {goal} %: {met} (thread {own:.1} %)\n"
            );
        }
    }
    text
}

/// Returns requests a second of a device without a watcher.
fn unwatched(rows: &[Row], device: &str) -> Vec<f64> {
    let nothing = rows.iter().find(|row| row.device == device && row.watcher == WATCHERS[0].name);
    nothing.map(|row| row.of(|sample| sample.rate)).unwrap_or_default()
}

fn csv(rows: &[Row]) -> String {
    let mut text = String::from("device,watcher,round,rate,thread_us,dropped,answers\n");
    for row in rows {
        for (round, sample) in row.samples.iter().enumerate() {
            let [dropped, answers] = [sample.dropped, sample.answers]
                .map(|figure| figure.map(|figure| format!("{figure:.4}")).unwrap_or_default());
            text += &format!(
                "{},{},{round},{:.0},{:.4},{dropped},{answers}\n",
                row.device, row.watcher, sample.rate, sample.thread_us
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_ratios_to_the_rounds_without_a_watcher() {
        let words: Vec<String> = ["--watchers", "trace", "--rounds", "2"].map(str::to_owned).into();
        let options = parse(&words).expect("valid");
        assert_eq!(options.watchers[0].name, "nothing");
        assert!(options.watchers[1..].iter().all(|watcher| watcher.name.starts_with("trace")));
        let row = |watcher, rates: [f64; 2]| Row {
            device: "null",
            watcher,
            samples: rates.map(|rate| Sample { rate, thread_us: 1e6 / rate, ..Sample::default() }).into(),
        };
        let rows = [row("nothing", [100.0, 200.0]), row("trace", [80.0, 160.0])];
        let (cost, own) = costs(&rows, &rows[1]).expect("both exist");
        assert!((cost - 20.0).abs() < 1e-9 && (own - 25.0).abs() < 1e-9);
        assert!(
            page(&options, &rows)
                .contains("trace on null: 20.0 % of requests a second, at most 15 %: missed")
        );
    }

    #[test]
    fn an_incomplete_trace_is_an_error() {
        assert!(share_dropped([300.0, 0.0], 1000.0).is_err());
        assert!(share_dropped([4000.0, 1000.0], 1000.0).is_ok_and(|share| share == 0.2));
    }

    #[test]
    fn bad_options_are_refused() {
        for line in ["--rounds 0", "--seconds 0", "--watchers none", "--no-such 1", "--rounds"] {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert!(parse(&words).is_err(), "{line}");
        }
    }
}
