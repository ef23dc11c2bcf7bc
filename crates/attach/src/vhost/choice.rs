//! Which reactor serves a virtqueue: those that the export's options name, or the least busy ones.
//!
//! The virtqueues of an export are spread evenly. Of the reactors that have as many of them, the one whose
//! thread used the least processor time in a short sample is next, then the one with the fewest virtqueues of
//! other exports.

use engine::host::{Host, HostError, HostErrorKind};
use spec::VhostUserSpec;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Length of the sample of processor time.
const SAMPLE: Duration = Duration::from_millis(20);
/// Loads are compared in steps of an eighth of a processor: smaller differences are noise.
const STEPS: u128 = 8;

/// Number of virtqueues that each reactor of this process was given. Exports that were removed still count:
/// the number only spreads virtqueues of idle exports.
static GIVEN: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Chooses a reactor for each of `queues` virtqueues.
///
/// # Errors
/// The options name an I/O thread that does not exist.
pub(super) async fn reactors(
    host: &Arc<Host>,
    spec: &VhostUserSpec,
    queues: u16,
) -> Result<Vec<usize>, HostError> {
    let count = host.reactors().len();
    if let Some(missing) = spec.threads.iter().find(|thread| **thread >= count) {
        let text = format!("there is no I/O thread {missing} (there are {count}, from 0 on; see --queues)");
        return Err(HostError::new(HostErrorKind::Refused, text));
    }
    if !spec.threads.is_empty() {
        return Ok(spec.threads.iter().copied().cycle().take(queues.into()).collect());
    }
    let times = || host.reactors().iter().map(|reactor| reactor.cpu_time());
    let mut load = vec![0; count];
    if count > 1 {
        let before: Vec<Duration> = times().collect();
        tokio::time::sleep(SAMPLE).await;
        let used = times().zip(before).map(|(now, before)| now.saturating_sub(before));
        load = used.map(|used| (used.as_nanos() * STEPS / SAMPLE.as_nanos()) as u64).collect();
    }
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = given.len().max(count);
    given.resize(known, 0);
    Ok(spread(&load, &mut given, queues))
}

/// Spreads virtqueues over reactors with these loads, which have `given` virtqueues.
fn spread(load: &[u64], given: &mut [u64], queues: u16) -> Vec<usize> {
    let mut own = vec![0u64; load.len()];
    let next = |_| {
        let key = |reactor: &usize| (own[*reactor], load[*reactor], given[*reactor]);
        let reactor = (0..load.len()).min_by_key(key)?;
        own[reactor] += 1;
        given[reactor] += 1;
        Some(reactor)
    };
    (0..queues).filter_map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_reactors_get_virtqueues_in_turn() {
        let mut given = [0; 3];
        let chosen: Vec<usize> = (0..4).flat_map(|_| spread(&[0; 3], &mut given, 1)).collect();
        assert_eq!(chosen, [0, 1, 2, 0]);
        assert_eq!(spread(&[0; 3], &mut given, 5), [1, 2, 0, 1, 2]);
    }

    #[test]
    fn a_busy_reactor_is_chosen_last() {
        let mut given = [0, 5, 2];
        assert_eq!(spread(&[8, 0, 0], &mut given, 1), [2]);
        assert_eq!(spread(&[8, 1, 0], &mut given, 4), [2, 1, 0, 2], "all are used before one is used again");
    }
}
