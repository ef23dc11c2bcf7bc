//! A queue over the file backend on the kernel's ring, and a front-end that keeps it busy: one thread, as in
//! a reactor.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backends::{Direct, File, FileSpec};
use block::{Bytes, Data, Flags, Op, Request, Segment, Tag};
use queue::{Owner, Queue, QueueConfig, QueueId, Queues, Ring, Stack};
use ring::{Event, KernelRing, RingConfig, Wait};
use serde_json::{Value, json};
use std::os::fd::AsFd;

use super::Job;
use crate::core::{LEN, Mix};
use crate::error::{Error, Result};
use crate::tools;

/// Number of random places before they repeat: a power of two.
const PLACES: usize = 1 << 16;

/// Runs a job in a process of its own. Returns the number of requests and their number a second.
pub(super) fn start(job: &Job<'_>) -> Result<(f64, f64)> {
    let own = std::env::current_exe().map_err(|error| Error(format!("this program: {error}")))?;
    let (own, path) = (own.display().to_string(), job.path.display().to_string());
    let direct = if job.is_direct { "direct" } else { "buffered" };
    let (depth, millis) = (job.depth.to_string(), job.time.as_millis().to_string());
    let text = tools::output(&[&own, "file", "--child", &path, direct, job.mix.name(), &depth, &millis])?;
    let report: Value =
        serde_json::from_str(&text).map_err(|error| Error(format!("our own report: {error}")))?;
    let number = |name: &str| report[name].as_f64().ok_or_else(|| Error(format!("no {name} in {report}")));
    Ok((number("requests")?, number("rate")?))
}

/// Runs the child of [`start`]: `PATH direct|buffered MIX DEPTH MILLISECONDS`.
pub(super) fn child(arguments: &[String]) -> ExitCode {
    match run(arguments) {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bench file: {}", error.0);
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<Value> {
    let [path, direct, mix, depth, millis] = arguments else {
        return Err(Error("--child PATH direct|buffered MIX DEPTH MILLISECONDS".into()));
    };
    let mix = Mix::ALL.into_iter().find(|known| known.name() == mix);
    let mix = mix.ok_or_else(|| Error("no such mix".into()))?;
    let number = |word: &String| word.parse::<u64>().map_err(|_| Error(format!("{word}: not a number")));
    let direct = if direct == "direct" { Direct::On } else { Direct::Off };
    let spec = FileSpec { direct, ..FileSpec::new(path) };
    let mut rig = Rig::new(&spec, mix, number(depth)? as u16)?;
    let (requests, took) = rig.run(Duration::from_millis(number(millis)?))?;
    Ok(json!({ "requests": requests, "rate": requests as f64 / took.as_secs_f64() }))
}

struct Rig {
    ring: KernelRing,
    queues: Queues<KernelRing>,
    id: QueueId,
    /// The memory of each tag's request.
    memory: Vec<Segment>,
    places: Vec<(u64, Op)>,
    next: usize,
}

impl Rig {
    fn new(spec: &FileSpec, mix: Mix, depth: u16) -> Result<Rig> {
        let fail = |why: &dyn std::fmt::Display| Error(format!("{}: {why}", spec.path.display()));
        let file = File::open(spec).map_err(|why| fail(&why))?;
        let mut ring = KernelRing::new(RingConfig::default()).map_err(|why| fail(&why))?;
        let handle = file.as_fd().try_clone_to_owned().map_err(|why| fail(&why))?;
        let handle = ring.add_file(Arc::new(handle)).map_err(|why| fail(&why))?;
        let mut random = fastrand::Rng::with_seed(1);
        let blocks = backends::Backend::size(&*file).0 / LEN;
        let mut place = || {
            let op = match mix {
                Mix::Reads => Op::Read,
                Mix::Writes => Op::Write,
                Mix::Half if random.bool() => Op::Read,
                Mix::Half => Op::Write,
            };
            (random.u64(..blocks.max(1)) * LEN, op)
        };
        let places = (0..PLACES).map(|_| place()).collect();
        let mut stack = Stack::default();
        stack.backend(Box::new(file.node(handle)));
        let mut queues = Queues::default();
        let id = queues.vacant();
        let config = QueueConfig { id, depth, segments_per_tag: 1, timeout_ns: None };
        queues.insert(Queue::new(config, stack).map_err(|why| fail(&why))?);
        let memory: Option<Vec<Segment>> = (0..depth).map(|_| ring.allocate(LEN as u32)).collect();
        let memory = memory.ok_or_else(|| fail(&"no memory for its requests"))?;
        Ok(Rig { ring, queues, id, memory, places, next: 0 })
    }

    #[inline]
    fn submit(&mut self, tag: Tag) {
        let (offset, op) = self.places[self.next & (PLACES - 1)];
        self.next += 1;
        let segment = self.memory[tag.index()];
        let data = Data::One(segment);
        let request = Request { offset: Bytes(offset), len: Bytes(LEN), data, op, flags: Flags::empty() };
        self.queues.touch(self.id).submit(tag, Owner(0), request, &mut self.ring);
    }

    /// Keeps all tags busy for `time`. Returns the number of completed requests, and the elapsed time.
    fn run(&mut self, time: Duration) -> Result<(u64, Duration)> {
        let start = Instant::now();
        let (mut requests, mut stopping) = (0, false);
        let (mut touched, mut done) = (Vec::new(), Vec::new());
        while let Some(tag) = self.queues.get_mut(self.id).tag() {
            self.submit(tag);
        }
        loop {
            // Processes the last submissions, whether initial or replacing completed requests; the backend
            // may have answered some inline.
            self.queues.turn(&mut self.ring, &mut touched);
            self.queues.get_mut(self.id).swap_done(&mut done);
            if done.is_empty() {
                self.ring.turn(Wait::UntilEvent).map_err(|error| Error(format!("the ring: {error}")))?;
                self.ring.read_clock();
                while let Some(event) = self.ring.next_event() {
                    if let Event::Io { queue, cookie, result } = event {
                        self.queues.touch(queue).complete(cookie, result, &mut self.ring);
                    }
                }
                self.queues.turn(&mut self.ring, &mut touched);
                self.queues.get_mut(self.id).swap_done(&mut done);
            }
            let now = self.ring.read_clock();
            self.queues.get_mut(self.id).account(now);
            stopping |= start.elapsed() >= time;
            for end in done.drain(..) {
                if !end.status.is_ok() {
                    return Err(Error(format!("a request ended with {:?}", end.status)));
                }
                requests += 1;
                self.queues.get_mut(self.id).release(end.tag);
                if !stopping && let Some(tag) = self.queues.get_mut(self.id).tag() {
                    self.submit(tag);
                }
            }
            if stopping && self.queues.get_mut(self.id).in_flight() == 0 {
                return Ok((requests, start.elapsed()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rig_completes_requests_until_its_time_is_over() {
        let folder = std::env::temp_dir();
        let path = folder.join(format!("blockyard-bench-rig-{}", std::process::id()));
        std::fs::write(&path, vec![7; 1 << 20]).expect("a file");
        let words = [path.to_str().expect("a path"), "buffered", "50/50", "8", "20"].map(str::to_owned);
        let report = run(&words).expect("it runs");
        std::fs::remove_file(&path).expect("it exists");
        assert!(report["requests"].as_u64() > Some(8), "{report}");
        assert!(run(&words).is_err(), "a file that is missing");
    }
}
