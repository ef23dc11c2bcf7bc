//! Distribution of work over threads. Each round has a seed of its own, and a command line that repeats it.

use super::options::Options;
use super::stores::Store;
use super::{Tally, guarded};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between lines of progress.
const REPORT_EVERY: Duration = Duration::from_secs(20);

/// A unit of work on one store.
pub struct Round<'a> {
    /// The options of the run.
    pub options: &'a Options,
    /// The store.
    pub store: Store,
    /// The seed that determines everything in this round.
    pub seed: u64,
    /// Number of kills, states or calls of this round.
    pub count: u64,
    /// The arguments that repeat it.
    pub replay: String,
}

/// Runs `units` units of work on the given number of threads, until the time is up, and adds their results.
/// `figures` are printed even if they are 0.
pub fn spread(
    options: &Options,
    threads: usize,
    units: u64,
    figures: &[&'static str],
    work: impl Fn(u64, &mut Tally) + Sync,
) -> Tally {
    let mut tally = Tally::default();
    for figure in figures {
        tally.count(figure, 0);
    }
    let (next, total) = (AtomicU64::new(0), Mutex::new((tally, Instant::now())));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= units || options.is_over() {
                        break;
                    }
                    let mut tally = Tally::default();
                    work(number, &mut tally);
                    let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                    let (sum, reported) = &mut *total;
                    sum.add(tally);
                    if reported.elapsed() > REPORT_EVERY {
                        println!("  {sum}");
                        *reported = Instant::now();
                    }
                }
            });
        }
    });
    total.into_inner().unwrap_or_else(PoisonError::into_inner).0
}

/// Runs `options.count` kills, states or calls in rounds of `each`, alternating between the stores.
pub fn over_stores(
    part: &str,
    options: &Options,
    each: u64,
    figures: &[&'static str],
    work: impl Fn(&Round<'_>, &mut Tally) -> Result<(), String> + Sync,
) -> Tally {
    let stores = options.stores();
    spread(options, options.workers, options.count.div_ceil(each), figures, |number, tally| {
        let seed = options.seed.wrapping_add(number);
        let Some(&store) = stores.get((seed % stores.len().max(1) as u64) as usize) else { return };
        let count = each.min(options.count - number * each);
        let replay = format!("{part} --store={} --seed={seed} --count={count}", store.name());
        let round = Round { options, store, seed, count, replay };
        if let Err(why) = guarded(|| work(&round, tally)) {
            tally.find("broken", format!("{}: {why}", round.replay));
        }
    })
}
