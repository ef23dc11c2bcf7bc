//! A timeline of the log around a cut as a page of HTML without scripts or foreign files.

use super::{Finding, seconds};
use crate::log::Event;
use crate::view::View;
use std::fmt::Write as _;

/// The most events before the cut that are drawn.
const BEFORE_MAX: u32 = 600;
/// The most events after the cut that are drawn.
const AFTER_MAX: u32 = 40;
const WIDTH: f64 = 1100.0;
const HEIGHT: f64 = 360.0;

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Draws the writes, flushes and marks around a finding's cut, the cut, and what is lost.
pub fn timeline(view: &View, finding: &Finding) -> String {
    let log = view.log();
    let start = finding.lost.iter().map(|lost| log.writes[lost.write as usize].submitted).min();
    let start = start.unwrap_or(finding.cut).min(finding.cut).saturating_sub(40);
    let start = start.max(finding.cut.saturating_sub(BEFORE_MAX));
    let end = finding.cut.saturating_add(AFTER_MAX).min(log.events.len() as u32);
    let x = |event: u32| {
        60.0 + f64::from(event.clamp(start, end) - start) * (WIDTH - 80.0) / f64::from((end - start).max(1))
    };
    let y = |offset: u64| 20.0 + offset as f64 * (HEIGHT - 60.0) / view.size().max(1) as f64;
    let mut drawn = String::new();
    let mut line = |event: u32, class: &str, title: &str| {
        let at = x(event);
        let _ = writeln!(
            drawn,
            "<line class=\"{class}\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"15\" y2=\"{:.1}\"><title>{}</title></line>",
            HEIGHT - 35.0,
            escape(title)
        );
    };
    for at in start..end {
        match log.events[at as usize] {
            Event::Flush(number) => line(at, "flush", &format!("flush {number} submitted")),
            Event::Flushed(number) => line(at, "flushed", &format!("flush {number} completed")),
            Event::Mark(number) => line(at, "mark", &log.marks[number as usize].text),
            Event::Submit(_) | Event::Complete(_) => {}
        }
    }
    line(finding.cut, "cut", "the power cut");
    let in_range = |write: &&crate::log::Write| {
        write.submitted < end && write.completed.is_none_or(|done| done >= start)
    };
    for (number, write) in log.writes.iter().enumerate().filter(|(_, write)| in_range(write)) {
        let of = finding.lost.iter().filter(|lost| lost.write as usize == number);
        let class = match of.clone().count() {
            0 if write.submitted >= finding.cut => "later",
            0 => "present",
            _ => "lost",
        };
        let (from, to) = (x(write.submitted), x(write.completed.unwrap_or(end)));
        let height = (y(write.offset + write.len) - y(write.offset)).max(4.0);
        let title = format!(
            "write {number}: {} bytes at {:#x}, {}{}{}",
            write.len,
            write.offset,
            seconds(write.time_ns),
            if write.fua { ", FUA" } else { "" },
            if class == "lost" { ", lost" } else { "" }
        );
        let _ = writeln!(
            drawn,
            "<rect class=\"{class}\" x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{height:.1}\"><title>{}</title></rect>",
            y(write.offset),
            (to - from).max(3.0),
            escape(&title)
        );
    }
    format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>{id}</title>\n<style>\n\
         body {{ font: 15px sans-serif; margin: 2em; }} pre {{ background: #f4f4f4; padding: 1em; }}\n\
         .present {{ fill: #4a7ebb; }} .lost {{ fill: #d62728; }} .later {{ fill: #cccccc; }}\n\
         .flush {{ stroke: #2ca02c; stroke-dasharray: 3; }} .flushed {{ stroke: #2ca02c; }}\n\
         .mark {{ stroke: #9467bd; }} .cut {{ stroke: #d62728; stroke-width: 3; }}\n\
         </style>\n<h1>{id}</h1>\n<pre>{text}</pre>\n\
         <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"100%\" role=\"img\" aria-label=\"timeline\">\n{drawn}\
         <text x=\"60\" y=\"{low:.0}\">events {start} to {end}; offset downwards</text></svg>\n\
         <p>Blue: present. Red: lost. Grey: after the cut. Green: flushes, dashed when submitted, solid when \
         completed. Violet: marks. Red line: the power cut.</p></html>\n",
        id = escape(&finding.id),
        text = escape(&finding.text()),
        low = HEIGHT - 10.0,
    )
}
