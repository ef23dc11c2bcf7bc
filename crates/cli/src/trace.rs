//! `trace`: records the events of a device's requests as blktrace files, as blkparse's text, or as a Chrome trace.
//!
//! The server records and sends events. This process encodes and writes them, so a full disk or a slow terminal does
//! not affect the server.

mod reader;
mod sink;

use crate::args::{TraceArgs, TraceFormat};
use crate::failure::Failure;
use crate::listing::{block_on, client_of, run_dir};
use crate::signals::Signals;
use engine::change::Change;
use engine::control::{ClientError, ControlClient, ControlError, TraceStream};
use engine::observe::trace::{TraceChange, TraceOptions};
use engine::spec::Bytes;
use reader::Reader;
use sink::{Chrome, Files, Sink, Text};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;
use trace::FilterText;
use trace::wire::{Decoder, Frame};

/// The lowest scheduling priority, nice 19.
const NICE: i32 = 19;
/// Attempts to start a trace while another one ends, and the pause between them.
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) fn trace(args: &TraceArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("trace")?;
    let filter = FilterText {
        actions: args.actions.clone().unwrap_or_default(),
        ops: args.ops.clone().unwrap_or_default(),
        sectors: args.sectors.clone().unwrap_or_default(),
    };
    // Invalid filters and actions are reported before a request is sent or a file is created.
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
        // btt counts requests by Q events, so it needs the Q events of split requests, too.
        queue_children: args.queue_children.unwrap_or(format == TraceFormat::Blktrace),
        coarse: args.coarse,
        buffer: buffer.map(|bytes| bytes.0),
        seconds: args.seconds,
    };
    if format == TraceFormat::Perfetto {
        options.filter = options.filter.with_ends();
    } else if options.filter.asks_for_ends().is_ok_and(|asks| asks) {
        let why = "only a Chrome trace records \"done\" (add --format perfetto, or ask for complete)";
        return Err(Failure::usage("trace", &args.name, why));
    }
    let open = || -> std::io::Result<Box<dyn Sink>> {
        Ok(match format {
            TraceFormat::Blktrace => Box::new(Files::new(args.output.as_deref().unwrap_or("-"))?),
            TraceFormat::Text => Box::new(Text::new(args.output.as_deref())?),
            TraceFormat::Perfetto => Box::new(Chrome::new(args.output.as_deref())?),
        })
    };
    // Encoding must not take CPU time from the server. If the priority cannot be lowered, the trace continues.
    let _ = rustix::process::setpriority_process(None, NICE);
    block_on("trace", run_trace(args, client, options, open))?
}

/// Returns the change to a running trace that the arguments ask for, if any.
fn change(args: &TraceArgs, filter: &FilterText) -> Result<Option<TraceChange>, Failure> {
    let change = match args.action.as_deref() {
        None => return Ok(None),
        Some("start") => TraceChange::Start,
        Some("stop") => TraceChange::Stop,
        Some("end") => TraceChange::End,
        Some("filter") => TraceChange::Filter(filter.clone()),
        Some(other) => {
            let why = format!("unknown action \"{other}\" (actions: start, stop, end, filter)");
            return Err(Failure::usage("trace", &args.name, why));
        }
    };
    if args.output.is_some() || args.format.is_some() {
        let why = "the output of a running trace cannot be changed (leave out -o and --format)";
        return Err(Failure::usage("trace", &args.name, why));
    }
    if args.seconds.is_some() || args.buffer.is_some() || args.queue_children.is_some() || args.coarse {
        let why = "these options cannot be changed while a trace runs (leave out -w, -b, --queue-children and --coarse)";
        return Err(Failure::usage("trace", &args.name, why));
    }
    if !matches!(change, TraceChange::Filter(_)) && *filter != FilterText::default() {
        let why = "only the action filter changes filters (leave out --actions, --ops and --sectors)";
        return Err(Failure::usage("trace", &args.name, why));
    }
    Ok(Some(change))
}

/// Counts of one queue's events.
#[derive(Default)]
struct Tally {
    events: u64,
    dropped: u64,
}

/// Starts a trace. The previous trace ends within [`ATTEMPTS`] × [`PAUSE`] when the process that read it has exited, as with
/// `trace | head`.
async fn begin(
    client: &ControlClient,
    name: &str,
    options: &TraceOptions,
) -> Result<TraceStream, ClientError> {
    let mut attempts = 1..ATTEMPTS;
    loop {
        match client.trace(name, options).await {
            Err(ClientError::Refused(ControlError::Busy(_))) if attempts.next().is_some() => {
                tokio::time::sleep(PAUSE).await;
            }
            begun => return begun,
        }
    }
}

async fn run_trace(
    args: &TraceArgs,
    client: ControlClient,
    options: TraceOptions,
    open: impl Fn() -> std::io::Result<Box<dyn Sink>>,
) -> Result<ExitCode, Failure> {
    let failed = |why: &dyn std::fmt::Display| Failure::new("trace", &args.name, why);
    let mut signals = Signals::new().map_err(|why| failed(&why))?;
    let mut stream = begin(&client, &args.name, &options).await.map_err(|why| failed(&why))?;
    let reader = Reader::new(args.output.as_deref());
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
            () = reader.gone() => {
                abandon(&args.name, &client, &mut stream, &mut signals).await;
                return Ok(ExitCode::SUCCESS);
            }
        };
        let Some(chunk) = chunk.map_err(|why| failed(&why))? else { break false };
        decoder.feed(&chunk);
        // The files are created when the first data arrives: from then on all events are recorded.
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
                abandon(&args.name, &client, &mut stream, &mut signals).await;
                return unwritten(why).map_err(|why| failed(&why));
            }
            over |= frame == Frame::Closed;
        }
        if let Err(why) = sink.flush() {
            abandon(&args.name, &client, &mut stream, &mut signals).await;
            return unwritten(why).map_err(|why| failed(&why));
        }
        if over {
            break true;
        }
    };
    report(args, &tallies);
    match closed {
        true => Ok(ExitCode::SUCCESS),
        false => Err(failed(
            &"it ended early: events until then were written (does its server still run? see blockyard list)",
        )),
    }
}

/// Turns a write error into the result of the command: a reader that closed the pipe is no failure.
fn unwritten(why: std::io::Error) -> std::io::Result<ExitCode> {
    if why.kind() == std::io::ErrorKind::BrokenPipe { Ok(ExitCode::SUCCESS) } else { Err(why) }
}

/// Asks the server to end the trace; events recorded until then still arrive.
async fn end(name: &str, client: &ControlClient) {
    // An error means that the trace has ended already.
    let _ = client.change(name, &Change::Trace(TraceChange::End)).await;
}

/// Ends a trace whose output cannot be written any more, and waits until the device can be traced again. Events that
/// still arrive are discarded. A signal ends the wait.
async fn abandon(name: &str, client: &ControlClient, stream: &mut TraceStream, signals: &mut Signals) {
    let ended = async {
        end(name, client).await;
        // The server closes the stream after it has released the device's session.
        while let Ok(Some(_)) = stream.next().await {}
    };
    tokio::select! {
        () = ended => {}
        _ = signals.next() => {}
    }
}

/// Prints the events and drops of each queue on stderr, as the trace itself may be on stdout.
fn report(args: &TraceArgs, tallies: &BTreeMap<u32, Tally>) {
    let dropped: u64 = tallies.values().map(|tally| tally.dropped).sum();
    if args.output.is_some() {
        for (queue, tally) in tallies {
            eprintln!("{}: queue {queue}: {} events, {} dropped", args.name, tally.events, tally.dropped);
        }
    }
    if dropped > 0 {
        eprintln!(
            "blockyard: {dropped} events of {} were dropped: they arrived faster than they were written (try --buffer 64M)",
            args.name
        );
    }
}
