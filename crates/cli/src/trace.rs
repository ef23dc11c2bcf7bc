//! `trace`: what happens to a device's requests, as blktrace files, as blkparse's lines, or as a Chrome trace.
//!
//! The process that serves the device records and sends; everything else is done here, so that neither a full disk
//! nor a slow terminal is that process's matter.

mod sink;

use crate::args::{TraceArgs, TraceFormat};
use crate::failure::Failure;
use crate::listing::{block_on, client_of, run_dir};
use crate::signals::Signals;
use engine::change::Change;
use engine::control::ControlClient;
use engine::spec::Bytes;
use engine::trace::{TraceChange, TraceOptions};
use sink::{Chrome, Files, Sink, Text};
use std::collections::BTreeMap;
use std::process::ExitCode;
use trace::FilterText;
use trace::wire::{Decoder, Frame};

/// The lowest priority that there is.
const NICE: i32 = 19;

pub(crate) fn trace(args: &TraceArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("trace")?;
    let filter = FilterText {
        actions: args.actions.clone().unwrap_or_default(),
        ops: args.ops.clone().unwrap_or_default(),
        sectors: args.sectors.clone().unwrap_or_default(),
    };
    // Both are found out before anything is asked of the device, or written.
    trace::Filter::new(&filter).map_err(|why| Failure::usage("trace", &args.name, why))?;
    let change = change(args, &filter)?;
    let client = client_of(&run, "trace", &args.name)?;
    let failed = |why| Failure::new("trace", &args.name, why);
    if let Some(change) = change {
        block_on("trace", client.change(&args.name, &Change::Trace(change)))?.map_err(failed)?;
        return Ok(ExitCode::SUCCESS);
    }
    let buffer = args.buffer.as_deref().map(str::parse::<Bytes>).transpose();
    let buffer = buffer.map_err(|why| Failure::usage("trace", &args.name, why))?;
    let format = match (args.format, &args.output) {
        (Some(TraceFormat::Blktrace), None) => {
            return Err(Failure::usage(
                "trace",
                &args.name,
                "blktrace files need a name (add -o PREFIX, or -o -)",
            ));
        }
        (Some(format), _) => format,
        (None, Some(_)) => TraceFormat::Blktrace,
        (None, None) => TraceFormat::Text,
    };
    let mut options = TraceOptions {
        filter,
        queue_children: args.queue_children,
        coarse: args.coarse,
        buffer: buffer.map(|bytes| bytes.0),
        seconds: args.seconds,
    };
    if format == TraceFormat::Perfetto {
        options.filter = options.filter.with_ends();
    } else if options.filter.asks_for_ends().is_ok_and(|asks| asks) {
        let why = "only a Chrome trace tells of \"done\" (add --format perfetto, or ask for complete)";
        return Err(Failure::usage("trace", &args.name, why));
    }
    let open = || -> std::io::Result<Box<dyn Sink>> {
        Ok(match format {
            TraceFormat::Blktrace => Box::new(Files::new(args.output.as_deref().unwrap_or("-"))?),
            TraceFormat::Text => Box::new(Text::new(args.output.as_deref())?),
            TraceFormat::Perfetto => Box::new(Chrome::new(args.output.as_deref())?),
        })
    };
    // What it takes is time that the server leaves; refused, it goes on as it is.
    let _ = rustix::process::setpriority_process(None, NICE);
    block_on("trace", run_trace(args, client, options, open))?
}

/// What is to become of a trace that runs, if that was asked for.
fn change(args: &TraceArgs, filter: &FilterText) -> Result<Option<TraceChange>, Failure> {
    let change = match args.action.as_deref() {
        None => return Ok(None),
        Some("start") => TraceChange::Start,
        Some("stop") => TraceChange::Stop,
        Some("end") => TraceChange::End,
        Some("filter") => TraceChange::Filter(filter.clone()),
        Some(other) => {
            let why =
                format!("\"{other}\" cannot be done to a trace (there are start, stop, end and filter)");
            return Err(Failure::usage("trace", &args.name, why));
        }
    };
    if args.output.is_some() || args.format.is_some() {
        let why = "where it goes is settled when it begins (leave out -o and --format)";
        return Err(Failure::usage("trace", &args.name, why));
    }
    if args.seconds.is_some() || args.buffer.is_some() || args.queue_children || args.coarse {
        let why =
            "how it listens is settled when it begins (leave out -w, -b, --queue-children and --coarse)";
        return Err(Failure::usage("trace", &args.name, why));
    }
    if !matches!(change, TraceChange::Filter(_)) && *filter != FilterText::default() {
        let why = "what is told is changed by filter (leave out --actions, --ops and --sectors)";
        return Err(Failure::usage("trace", &args.name, why));
    }
    Ok(Some(change))
}

/// What came of one queue.
#[derive(Default)]
struct Tally {
    events: u64,
    dropped: u64,
}

async fn run_trace(
    args: &TraceArgs,
    client: ControlClient,
    options: TraceOptions,
    open: impl Fn() -> std::io::Result<Box<dyn Sink>>,
) -> Result<ExitCode, Failure> {
    let failed = |why: &dyn std::fmt::Display| Failure::new("trace", &args.name, why);
    let mut signals = Signals::new().map_err(|why| failed(&why))?;
    let mut stream = client.trace(&args.name, &options).await.map_err(|why| failed(&why))?;
    let mut sink = None;
    let mut tallies = BTreeMap::<u32, Tally>::new();
    let mut decoder = Decoder::default();
    let mut asked = false;
    let closed = loop {
        let chunk = tokio::select! {
            chunk = stream.next() => chunk,
            _ = signals.next() => {
                if std::mem::replace(&mut asked, true) {
                    break true;
                }
                end(&args.name, &client).await;
                continue;
            }
        };
        let Some(chunk) = chunk.map_err(|why| failed(&why))? else { break false };
        decoder.feed(&chunk);
        // Files are there once everything is heard, which is when the first of it comes.
        let sink =
            match &mut sink {
                Some(sink) => sink,
                none => none.insert(open().map_err(|why| {
                    failed(&format!("{}: {why}", args.output.as_deref().unwrap_or("stdout")))
                })?),
            };
        let mut over = false;
        while let Some(frame) = decoder.next_frame().map_err(|why| failed(&why))? {
            match &frame {
                Frame::Records(queue, records) => {
                    let count: usize = records.iter().map(|record| record.events().count()).sum();
                    tallies.entry(*queue).or_default().events += count as u64;
                }
                Frame::Dropped(queue, count) => tallies.entry(*queue).or_default().dropped += count,
                _ => {}
            }
            if let Err(why) = sink.frame(&frame) {
                return unwritten(why).map_err(|why| failed(&why));
            }
            over |= frame == Frame::Closed;
        }
        if let Err(why) = sink.flush() {
            return unwritten(why).map_err(|why| failed(&why));
        }
        if over {
            break true;
        }
    };
    tell(args, &tallies);
    match closed {
        true => Ok(ExitCode::SUCCESS),
        false => Err(failed(
            &"it ended before its time: what was heard until then is written (is its server still there?)",
        )),
    }
}

/// It cannot be written any more: if that is because whoever read it has seen enough, all is well.
fn unwritten(why: std::io::Error) -> std::io::Result<ExitCode> {
    if why.kind() == std::io::ErrorKind::BrokenPipe { Ok(ExitCode::SUCCESS) } else { Err(why) }
}

/// Have the trace end; what was heard to the last still comes.
async fn end(name: &str, client: &ControlClient) {
    // One that has ended by itself needs no more telling.
    let _ = client.change(name, &Change::Trace(TraceChange::End)).await;
}

/// How much there was of each queue, on stderr: the trace itself may be on stdout.
fn tell(args: &TraceArgs, tallies: &BTreeMap<u32, Tally>) {
    let dropped: u64 = tallies.values().map(|tally| tally.dropped).sum();
    if args.output.is_some() {
        for (queue, tally) in tallies {
            eprintln!("{}: queue {queue}: {} events, {} dropped", args.name, tally.events, tally.dropped);
        }
    }
    if dropped > 0 {
        eprintln!(
            "blockyard: {dropped} events of {} are missing: they came faster than they were taken (try --buffer 64M)",
            args.name
        );
    }
}
