//! Which memory is written per request: every store of a run, as valgrind's lackey sees it, held against where that lies
//! which the queues of a multipath share.
//!
//! The program runs itself under valgrind. It says where that memory is, stores to a marker, carries requests, and stores to
//! the marker again; what was stored in between is what the requests stored.

use super::stacks::{Selector, Shared, Subject};
use crate::core::{BenchRing, DEPTH, Mix, Rig};
use std::io::{self, BufRead, BufReader, Error};
use std::ops::Range;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const REQUESTS: u64 = 1600;
const PATHS: u8 = 4;
/// An `Arc` counts its owners in two words before what it holds.
const OWNERS_LEN: usize = 2 * size_of::<usize>();

static MARKER: AtomicU64 = AtomicU64::new(0);

/// What runs under valgrind.
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

/// What requests stored: how often in all, and how often where queues share.
struct Stored {
    all: usize,
    shared: usize,
}

fn number(text: &str) -> io::Result<usize> {
    usize::from_str_radix(text, 16).map_err(Error::other)
}

/// What the child said: the marker, and what is shared.
fn places(said: &str) -> io::Result<(usize, Vec<Range<usize>>)> {
    let mut words = said.split_whitespace();
    let marker = number(words.next().unwrap_or_default())?;
    let range = |word: &str| {
        let (start, end) = word.split_once('-').ok_or_else(|| Error::other("not a range"))?;
        Ok(number(start)?..number(end)?)
    };
    Ok((marker, words.map(range).collect::<io::Result<_>>()?))
}

/// A line of lackey's, if it tells of a store: ` S 1ffeffe7e8,8`, or ` M …` for a load and a store in one.
fn store(line: &str) -> Option<(usize, usize)> {
    let place = line.strip_prefix(" S ").or_else(|| line.strip_prefix(" M "))?;
    let (at, len) = place.trim().split_once(',')?;
    Some((number(at).ok()?, len.parse().ok()?))
}

fn judge(said: &str, stores: &[(usize, usize)]) -> io::Result<Stored> {
    let (marker, shared) = places(said)?;
    let mut marked =
        stores.iter().enumerate().filter(|(_, store)| store.0 == marker).map(|(number, _)| number);
    let (Some(start), Some(end)) = (marked.next(), marked.next_back()) else {
        return Err(Error::other("the markers were not seen"));
    };
    let between = &stores[start + 1..end];
    // Another queue's thread has what lies on the same lines.
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
    let mut said = String::new();
    BufReader::new(stdout).read_line(&mut said)?;
    if !child.wait()?.success() {
        return Err(Error::other("valgrind ended badly"));
    }
    judge(&said, &stores)
}

/// Count for the selectors that take paths in turn, and for one that counts; an error when a request has stored anything
/// where queues share.
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
    fn stores_between_the_markers_are_judged_by_their_lines() {
        assert_eq!(store(" S 1ffe,8"), Some((0x1ffe, 8)));
        assert_eq!((store(" L 1ffe,8"), store("I  04,3"), store("==1== x")), (None, None, None));
        let stores = [(0x1000, 8), (0x10, 8), (0x103f, 2), (0x1040, 8), (0x2000, 8), (0x10, 8), (0x1001, 1)];
        let stored = judge("10 1008-1010 2000-2000", &stores).expect("two markers");
        assert_eq!((stored.all, stored.shared), (3, 1));
        assert!(judge("99 1008-1010", &stores).is_err() && judge("x", &stores).is_err());
    }
}
