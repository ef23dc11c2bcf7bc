//! Simulates with fresh seeds for a given time: `soak [SECONDS] [FIRST_SEED]`. Prints runs per second, and
//! stops at the first failure with its seed.
#![forbid(unsafe_code)]

use blockyard_tests::simulation::{Scenario, current_story, run, run_sessions, run_targets};
use std::hash::{BuildHasher, RandomState};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time between lines of progress.
const REPORT_EVERY: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let numbers: Result<Vec<u64>, _> = std::env::args().skip(1).map(|text| text.parse()).collect();
    let Ok(numbers) = numbers else {
        eprintln!("usage: soak [SECONDS] [FIRST_SEED]");
        return ExitCode::from(2);
    };
    let seconds = numbers.first().copied().unwrap_or(60);
    let first = numbers.get(1).copied().unwrap_or_else(|| RandomState::new().hash_one(0));
    // Release builds abort on a panic: the story must be printed before.
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        before(panic);
        eprintln!("{}", current_story().unwrap_or_default());
    }));
    soak(Duration::from_secs(seconds), first)
}

fn soak(time: Duration, first: u64) -> ExitCode {
    println!("seeds from {first}");
    let start = Instant::now();
    let (mut runs, mut requests, mut cuts, mut reported) = (0u64, 0, 0, Duration::ZERO);
    while start.elapsed() < time {
        let seed = first.wrapping_add(runs);
        let outcome = match runs % 3 {
            0 => run(seed, Scenario::default()),
            1 => run_targets(seed, Scenario::default()),
            _ => run_sessions(seed, None),
        };
        match outcome {
            Ok(outcome) => {
                runs += 1;
                requests += outcome.requests;
                cuts += outcome.power_cuts;
            }
            Err(failure) => {
                eprintln!("{failure}");
                return ExitCode::FAILURE;
            }
        }
        if start.elapsed() - reported >= REPORT_EVERY || start.elapsed() >= time {
            reported = start.elapsed();
            let rate = runs as f64 / reported.as_secs_f64();
            println!("{runs} runs, {rate:.0} a second; {requests} requests, {cuts} power cuts");
        }
    }
    ExitCode::SUCCESS
}
