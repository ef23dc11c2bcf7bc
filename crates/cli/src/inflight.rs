//! `inflight`: lists a device's requests in flight. SIGUSR1 writes the list of all devices to the log.

use crate::args::InflightArgs;
use crate::failure::{Failure, print};
use crate::listing::{block_on, client_of, run_dir};
use crate::log::{self, Level, Line, Value};
use engine::control::inflight::{InFlight, InFlightList};
use engine::host::Host;
use std::fmt::Write;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::signal::unix::Signal;

pub(crate) fn inflight(args: &InflightArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("inflight")?;
    let client = client_of(&run, "inflight", &args.name)?;
    let list = block_on("inflight", client.in_flight(&args.name))?;
    let list = list.map_err(|why| Failure::new("inflight", &args.name, why))?;
    if args.output.json {
        // Serialization cannot fail: the structures have only text as keys.
        print(&format!("{}\n", serde_json::to_string_pretty(&list).unwrap_or_default()));
    } else {
        print(&table(&list));
    }
    Ok(ExitCode::SUCCESS)
}

fn milliseconds(nanos: u64) -> String {
    format!("{}.{:03}", nanos / 1_000_000, nanos / 1_000 % 1_000)
}

fn node(request: &InFlight) -> &str {
    request.node.as_deref().unwrap_or("-")
}

/// Formats requests as columns as wide as their widest entry, with two spaces between; empty without requests.
fn table(list: &InFlightList) -> String {
    let mut rows =
        vec![["QUEUE", "TAG", "OF", "OP", "SECTOR", "BYTES", "MS", "STATE", "AT"].map(str::to_owned)];
    rows.extend(list.requests.iter().map(|request| {
        [
            request.queue.to_string(),
            request.tag.to_string(),
            request.parent.map_or_else(String::new, |parent| parent.to_string()),
            request.op.clone(),
            request.sector.to_string(),
            request.bytes.to_string(),
            milliseconds(request.age_ns),
            request.state.clone(),
            node(request).to_owned(),
        ]
    }));
    let width = |i: usize| rows.iter().map(|row| row[i].len()).max().unwrap_or_default();
    let widths: [usize; 9] = std::array::from_fn(width);
    let mut text = String::new();
    for row in rows.iter().filter(|_| !list.requests.is_empty()) {
        let mut line = String::new();
        for (i, (cell, width)) in row.iter().zip(widths).enumerate() {
            // Numbers are aligned to the right.
            let _ = match i {
                0 | 1 | 2 | 4 | 5 | 6 => write!(line, "{cell:>width$}  "),
                _ => write!(line, "{cell:<width$}  "),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    if list.more > 0 {
        let _ = writeln!(text, "and {} more", list.more);
    }
    for reactor in &list.silent {
        let _ = writeln!(text, "reactor {reactor} does not answer");
    }
    text
}

/// Logs the requests in flight of all devices at each signal, until the future is dropped.
pub(crate) async fn on_signal(host: Arc<Host>, mut signal: Signal) {
    while signal.recv().await.is_some() {
        for device in host.devices() {
            let list = host.in_flight(&device).await;
            log::write_all(lines(device.name().as_str(), &list)).await;
        }
    }
}

fn lines(device: &str, list: &InFlightList) -> Vec<Line> {
    let requests = Value::number(list.requests.len() + list.more);
    let fields = vec![("device", device.into()), ("requests", requests)];
    let mut lines = vec![Line::new(Level::INFO, "requests in flight", fields)];
    for request in &list.requests {
        let mut fields = vec![
            ("device", request.device.as_str().into()),
            ("queue", Value::number(request.queue)),
            ("reactor", Value::number(request.reactor)),
            ("tag", Value::number(request.tag)),
            ("op", request.op.as_str().into()),
            ("sector", Value::number(request.sector)),
            ("bytes", Value::number(request.bytes)),
            ("node", node(request).into()),
            ("state", request.state.as_str().into()),
            ("age_ms", Value::number(milliseconds(request.age_ns))),
        ];
        if let Some(parent) = request.parent {
            fields.push(("parent", Value::number(parent)));
        }
        lines.push(Line::new(Level::INFO, "in flight", fields));
    }
    if list.more > 0 {
        let fields = vec![("device", device.into()), ("requests", Value::number(list.more))];
        lines.push(Line::new(Level::INFO, "and more in flight", fields));
    }
    for reactor in &list.silent {
        let fields = vec![("device", device.into()), ("reactor", Value::number(reactor))];
        lines.push(Line::new(Level::WARN, "a reactor does not answer", fields));
    }
    lines
}
