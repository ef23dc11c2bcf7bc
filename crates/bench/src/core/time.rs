//! `core`: nanoseconds per request.

use super::rig::{self, Mix, Place, Rig, Stacking};
use super::ring::Pages;
use super::{DEPTH, LAYERS, LEN, PIECES, usage_error};
use crate::figures::median;
use block::Op;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use std::hint::black_box;
use std::process::ExitCode;

const USAGE: &str = "usage: blockyard-bench core [--rounds N] [--json]";
/// Requests of one round over a null device: about a tenth of a second.
const ROUND: u64 = 2_000_000;
/// Requests of one round that copies memory or splits, which takes several times as long.
const ROUND_LONG: u64 = 400_000;

/// Goals, and SPDK's figures on the machine where they were set: its null device under bdevperf, which holds
/// each request, a layer, and a child of its split.
const GOALS: [(&str, f64, &str, &str); 5] = [
    ("null, held", 29.0, "ns", "SPDK 58 to 67"),
    ("layer", 20.0, "ns", "SPDK 51"),
    ("split child", 28.0, "ns", "SPDK 56"),
    ("ram : memcpy", 1.08, "", "SPDK 1.55"),
    ("ram : memcpy, huge", 1.08, "", "SPDK not measured"),
];
/// Number of figures of each mix.
const ROWS: usize = 11;

/// Processor time of this thread, in nanoseconds.
fn processor_ns() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

fn ns_each(count: u64, run: impl FnOnce()) -> f64 {
    let before = processor_ns();
    run();
    (processor_ns() - before) / count as f64
}

/// Copies the blocks of a RAM disk's requests with `memcpy` alone.
struct Copier {
    disk: Pages,
    buffers: Pages,
    places: Vec<Place>,
}

impl Copier {
    fn new(huge: bool) -> Copier {
        Copier {
            disk: Pages::new(rig::disk_size(), huge),
            buffers: Pages::new(usize::from(DEPTH) * LEN as usize, false),
            places: rig::places(),
        }
    }

    #[inline(never)]
    fn run(&mut self, mix: Mix, count: u64) {
        const BLOCK: usize = LEN as usize;
        for number in 0..count as usize {
            let place = self.places[number & (self.places.len() - 1)];
            let at = place.offset() as usize;
            // Buffers are used from the end, as a queue's free tags are.
            let buffer = usize::from(DEPTH) - 1 - number % usize::from(DEPTH);
            let buffer = self.buffers.get_mut(buffer * BLOCK, BLOCK);
            match mix.op(place) {
                Op::Read => buffer.copy_from_slice(self.disk.get(at, BLOCK)),
                _ => self.disk.get_mut(at, BLOCK).copy_from_slice(buffer),
            }
        }
        black_box(self.buffers.get(0, BLOCK));
    }
}

/// All rounds of one mix: each figure by round.
#[derive(Default)]
struct Figures {
    held: Vec<f64>,
    null: Vec<f64>,
    layer: Vec<f64>,
    split_whole: Vec<f64>,
    split_child: Vec<f64>,
    ram: Vec<f64>,
    memcpy: Vec<f64>,
    ram_ratio: Vec<f64>,
    ram_huge: Vec<f64>,
    memcpy_huge: Vec<f64>,
    ram_ratio_huge: Vec<f64>,
}

struct Rigs {
    held: Rig,
    null: Rig,
    layers: Rig,
    whole: Rig,
    long: Rig,
    split: Rig,
}

impl Rigs {
    fn new() -> Rigs {
        Rigs {
            held: Rig::new(Stacking::Held { layers: 0 }),
            null: Rig::new(Stacking::Null { layers: 0 }),
            layers: Rig::new(Stacking::Null { layers: LAYERS }),
            whole: Rig::new(Stacking::Split { whole: true }),
            long: Rig::new(Stacking::Long),
            split: Rig::new(Stacking::Split { whole: false }),
        }
    }

    /// Measures everything once, close together in time, which removes drift from differences and ratios.
    fn round(&mut self, mix: Mix, scale: u64, into: &mut Figures) {
        let (short, long) = (ROUND / scale, ROUND_LONG / scale);
        let held = ns_each(short, || self.held.run(mix, short));
        let null = ns_each(short, || self.null.run(mix, short));
        let layers = ns_each(short, || self.layers.run(mix, short));
        let whole = ns_each(short, || self.whole.run(mix, short));
        let uncut = ns_each(long, || self.long.run(mix, long));
        let split = ns_each(long, || self.split.run(mix, long));
        let [ram, memcpy] = copies(mix, long, false);
        let [ram_huge, memcpy_huge] = copies(mix, long, true);
        into.held.push(held);
        into.null.push(null);
        into.layer.push((layers - null) / f64::from(LAYERS));
        into.split_whole.push(whole - null);
        into.split_child.push((split - uncut) / PIECES as f64);
        into.ram.push(ram);
        into.memcpy.push(memcpy);
        into.ram_ratio.push(ram / memcpy);
        into.ram_huge.push(ram_huge);
        into.memcpy_huge.push(memcpy_huge);
        into.ram_ratio_huge.push(ram_huge / memcpy_huge);
    }
}

/// Measures a RAM disk and `memcpy`. Both are allocated anew in each round, as the location of memory has
/// more effect than the measured difference; and both are accessed once before, as the first pass over new
/// memory is slower.
fn copies(mix: Mix, count: u64, huge: bool) -> [f64; 2] {
    let (mut ram, mut copier) = (Rig::new(Stacking::Ram { huge }), Copier::new(huge));
    ram.run(mix, count / 4);
    copier.run(mix, count / 4);
    [ns_each(count, || ram.run(mix, count)), ns_each(count, || copier.run(mix, count))]
}

impl Figures {
    fn rows(&self) -> [(&'static str, &[f64], &'static str); ROWS] {
        [
            ("null, held", &self.held, "ns"),
            ("null, at once", &self.null, "ns"),
            ("layer", &self.layer, "ns"),
            ("split, nothing to cut", &self.split_whole, "ns"),
            ("split child", &self.split_child, "ns"),
            ("ram", &self.ram, "ns"),
            ("memcpy", &self.memcpy, "ns"),
            ("ram : memcpy", &self.ram_ratio, ""),
            ("ram, huge", &self.ram_huge, "ns"),
            ("memcpy, huge", &self.memcpy_huge, "ns"),
            ("ram : memcpy, huge", &self.ram_ratio_huge, ""),
        ]
    }
}

fn print_table(rounds: usize, all: &[(Mix, Figures)]) {
    println!(
        "one thread, {LEN} bytes a request, {DEPTH} in flight, statistics and histograms on, {rounds} rounds\n\
         median (least..greatest) of the thread's processor time; a layer of {LAYERS}, a child of {PIECES}\n"
    );
    print!("{:<24}", "");
    all.iter().for_each(|(mix, _)| print!("{:>24}", mix.name()));
    println!("   goal");
    for index in 0..ROWS {
        let name = all[0].1.rows()[index].0;
        print!("{name:<24}");
        for (_, figures) in all {
            let (_, values, unit) = figures.rows()[index];
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let digits = if unit.is_empty() { 2 } else { 1 };
            let text = format!("{:.digits$} ({least:.digits$}..{greatest:.digits$})", median(values));
            print!("{text:>24}");
        }
        match GOALS.iter().find(|goal| goal.0 == name) {
            Some((_, goal, unit, peer)) => println!("   <= {goal} {unit} ({peer})"),
            None => println!(),
        }
    }
    for (name, goal, unit, _) in GOALS {
        for (mix, figures) in all {
            let row = figures.rows().into_iter().find(|row| row.0 == name);
            let value = row.map_or(0.0, |row| median(row.1));
            if value > goal {
                println!("missed: {name}, {}: {value:.2} {unit}, goal {goal}", mix.name());
            }
        }
    }
}

fn print_json(rounds: usize, all: &[(Mix, Figures)]) {
    let mixes: serde_json::Map<String, serde_json::Value> = all
        .iter()
        .map(|(mix, figures)| {
            let rows: serde_json::Map<String, serde_json::Value> = figures
                .rows()
                .into_iter()
                .map(|(name, values, _)| {
                    (name.to_owned(), json!({ "median": median(values), "rounds": values }))
                })
                .collect();
            (mix.name().to_owned(), rows.into())
        })
        .collect();
    println!("{}", json!({ "depth": DEPTH, "bytes": LEN, "rounds": rounds, "mixes": mixes }));
}

/// Runs `core [--rounds N] [--json]`.
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    let (mut rounds, mut as_json) = (9, false);
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => as_json = true,
            "--rounds" => match arguments.next().and_then(|text| text.parse().ok()) {
                Some(number) if number >= 1 => rounds = number,
                _ => return usage_error("--rounds takes a number from 1", USAGE),
            },
            other => return usage_error(&format!("{other} is not known"), USAGE),
        }
    }
    let mut rigs = Rigs::new();
    let mut all = Vec::new();
    for mix in Mix::ALL {
        rigs.round(mix, 10, &mut Figures::default());
        let mut figures = Figures::default();
        (0..rounds).for_each(|_| rigs.round(mix, 1, &mut figures));
        all.push((mix, figures));
    }
    if as_json {
        print_json(rounds, &all)
    } else {
        print_table(rounds, &all)
    }
    ExitCode::SUCCESS
}
