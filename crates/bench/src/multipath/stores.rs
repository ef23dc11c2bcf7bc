//! Memory that is written per request: every store of a run, reported by valgrind's lackey, compared with the
//! addresses of the state that the queues of a multipath share.
//! The program runs itself under valgrind. The child prints the addresses of the shared state, stores to a
//! marker, runs requests, and stores to the marker again; the stores in between belong to the requests.

use super::stacks::{Selector, Shared, Subject};
use crate::core::{BenchRing, DEPTH, Mix, Rig};
use std::io::{self, BufRead, BufReader, Error};
use std::ops::Range;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const REQUESTS: u64 = 1600;
const PATHS: u8 = 4;
/// Size of the two reference counts before the content of an `Arc`, in bytes.
const OWNERS_LEN: usize = 2 * size_of::<usize>();

static MARKER: AtomicU64 = AtomicU64::new(0);

/// Runs the measured part; this process is the one under valgrind.
pub(super) fn child(selector: &str) -> io::Result<()> {
    let selector = Selector::ALL.into_iter().find(|known| known.name() == selector);
    let selector = selector.ok_or_else(|| Error::other("no such selector"))?;
    let shared = Shared::new::<BenchRing>(Subject::Free(selector, PATHS), 1, DEPTH);
    let Shared::Free(multipath, _) = &shared else { return Err(Error::other("a multipath without a lock")) };
    let mut rig = Rig::of_multipath(&shared, 0);
    rig.run(Mix::Half, REQUESTS);
    let [own, paths, groups] = multipath.memory();
    let all = [own.start - OWNERS_LEN..own.end, paths, groups];
    let marker = std::ptr::from_ref(&MARKER).addr();
    let all: Vec<String> = all.iter().map(|range| format!("{:x}-{:x}", range.start, range.end)).collect();
    println!("{marker:x} {}", all.join(" "));
    MARKER.store(1, Relaxed);
    rig.run(Mix::Half, REQUESTS);
    MARKER.store(2, Relaxed);
    Ok(())
}

/// Stores of the requests: all of them, and those to shared cache lines.
struct Stored {
    all: usize,
    shared: usize,
}

fn number(text: &str) -> io::Result<usize> {
    usize::from_str_radix(text, 16).map_err(Error::other)
}

/// Parses the child's output: the address of the marker, and the shared addresses.
fn places(printed: &str) -> io::Result<(usize, Vec<Range<usize>>)> {
    let mut words = printed.split_whitespace();
    let marker = number(words.next().unwrap_or_default())?;
    let range = |word: &str| {
        let (start, end) = word.split_once('-').ok_or_else(|| Error::other("not a range"))?;
        Ok(number(start)?..number(end)?)
    };
    Ok((marker, words.map(range).collect::<io::Result<_>>()?))
}

/// Parses a store in lackey's output: ` S 1ffeffe7e8,8`, or ` M …` for a load and a store in one.
fn store(line: &str) -> Option<(usize, usize)> {
    let place = line.strip_prefix(" S ").or_else(|| line.strip_prefix(" M "))?;
    let (at, len) = place.trim().split_once(',')?;
    Some((number(at).ok()?, len.parse().ok()?))
}

fn judge(printed: &str, stores: &[(usize, usize)]) -> io::Result<Stored> {
    let (marker, shared) = places(printed)?;
    let mut marked =
        stores.iter().enumerate().filter(|(_, store)| store.0 == marker).map(|(number, _)| number);
    let (Some(start), Some(end)) = (marked.next(), marked.next_back()) else {
        return Err(Error::other("the markers were not seen"));
    };
    let between = &stores[start + 1..end];
    // Data of other queues' threads is on whole cache lines.
    let line = |range: &Range<usize>| range.start & !63..(range.end + 63) & !63;
    let shared: Vec<Range<usize>> = shared.iter().map(line).collect();
    let hits =
        |&&(at, len): &&(usize, usize)| shared.iter().any(|range| at < range.end && at + len > range.start);
    Ok(Stored { all: between.len(), shared: between.iter().filter(hits).count() })
}

fn count(selector: Selector) -> io::Result<Stored> {
    let mut child = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no"])
        .arg(std::env::current_exe()?)
        .args(["multipath", "--stores-of", selector.name()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(Error::other("no output"));
    };
    let lines = BufReader::new(stderr).lines().map_while(Result::ok);
    let stores: Vec<(usize, usize)> = lines.filter_map(|line| store(&line)).collect();
    let mut printed = String::new();
    BufReader::new(stdout).read_line(&mut printed)?;
    if !child.wait()?.success() {
        return Err(Error::other("valgrind ended badly"));
    }
    judge(&printed, &stores)
}

/// Counts stores for the selectors that take paths in turn, and for one that keeps counts. Returns an error
/// if a request has written to a shared cache line.
pub(crate) fn check() -> io::Result<()> {
    for selector in [Selector::RoundRobin, Selector::Affinity, Selector::QueueLength] {
        let Stored { all, shared } = count(selector)?;
        let name = selector.name();
        println!(
            "{name}, {PATHS} paths: {all} stores in {REQUESTS} requests, {shared} to lines that queues share"
        );
        if all < REQUESTS as usize {
            return Err(Error::other("that cannot be all"));
        }
        if shared > 0 {
            return Err(Error::other(format!("{name}: a request writes what queues share")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_between_the_markers_are_counted_by_cache_line() {
        assert_eq!(store(" S 1ffe,8"), Some((0x1ffe, 8)));
        assert_eq!((store(" L 1ffe,8"), store("I  04,3"), store("==1== x")), (None, None, None));
        let stores = [(0x1000, 8), (0x10, 8), (0x103f, 2), (0x1040, 8), (0x2000, 8), (0x10, 8), (0x1001, 1)];
        let stored = judge("10 1008-1010 2000-2000", &stores).expect("two markers");
        assert_eq!((stored.all, stored.shared), (3, 1));
        assert!(judge("99 1008-1010", &stores).is_err() && judge("x", &stores).is_err());
    }
}
