//! `top`: all devices of all processes, live in the terminal, or as text.
//!
//! ```text
//! gather   samples every process       input    keys → actions
//! model    state of the screen         view     model → screen
//! terminal entered and restored        batch    model → text
//! ```
//!
//! One thread owns the model, and handles samples, keys, answers and signals one after the other. Separate
//! tasks ask the processes, so that a process that does not answer delays neither keys nor the exit.

mod batch;
mod columns;
mod detail;
mod gather;
mod input;
mod model;
mod numbers;
mod rows;
mod terminal;
#[cfg(test)]
mod tests;
mod theme;
mod view;

use crate::args::TopArgs;
use crate::failure::{Failure, print};
use crate::listing::{block_on, client_of, run_dir};
use crate::signals::{Signals, status_of};
use engine::control::ControlClient;
use engine::rundir::RunDir;
use engine::tables::TableCall;
use gather::{Snapshot, snapshot};
use model::{Model, PathOrder, TopRequest};
use ratatui::crossterm::event::Event;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use terminal::Screen;
use theme::Theme;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};

/// The shortest and the longest interval, in seconds.
const SECONDS: std::ops::RangeInclusive<f64> = 0.1..=3600.0;

pub(crate) fn top(args: &TopArgs) -> Result<ExitCode, Failure> {
    if !SECONDS.contains(&args.delay) {
        return Err(Failure::usage("top", "", "an interval is from 0.1 to 3600 seconds"));
    }
    let run = run_dir("top")?;
    // Devices that are given by name must exist at the start; one that is removed later disappears.
    args.names.iter().try_for_each(|name| client_of(&run, "top", name).map(drop))?;
    if args.batch {
        return block_on("top", in_batches(args, &run))?;
    }
    let is_dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
    if !std::io::stdout().is_terminal() || is_dumb {
        let why = "stdout is not a terminal (as text: blockyard top -b -n 1)";
        return Err(Failure::usage("top", "", why));
    }
    block_on("top", on_the_screen(args, run))?
}

/// Returns the time of day, UTC.
fn clock() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    format!("{:02}:{:02}:{:02} UTC", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
}

async fn in_batches(args: &TopArgs, run: &RunDir) -> Result<ExitCode, Failure> {
    let mut model = Model::new((args.delay * 1000.0) as u64);
    model.take(snapshot(run, &args.names).await, clock());
    let mut next = Instant::now();
    let mut pages = 0;
    while args.count.is_none_or(|count| pages < count) {
        next += Duration::from_secs_f64(args.delay);
        sleep_until(next).await;
        model.take(snapshot(run, &args.names).await, clock());
        if !print(&batch::page(&model)) {
            break;
        }
        pages += 1;
    }
    Ok(ExitCode::SUCCESS)
}

/// Result of a task that runs while the screen is shown.
enum Answer {
    Sampled(Snapshot),
    /// The result of failing or reinstating a path.
    Changed(PathOrder, Result<(), String>),
}

async fn on_the_screen(args: &TopArgs, run: RunDir) -> Result<ExitCode, Failure> {
    let failed = |why: std::io::Error| Failure::new("top", "", why);
    let theme = Theme::of_environment(|name| std::env::var(name).ok());
    let mut signals = Signals::new().map_err(failed)?;
    let mut screen = Screen::enter().map_err(failed)?;
    let mut events = terminal::events().map_err(failed)?;
    let (sender, mut answers) = unbounded_channel();
    let mut model = Model::new((args.delay * 1000.0) as u64);
    let mut next = Instant::now();
    let mut sampling = false;
    loop {
        let mut scroll = 0;
        screen.terminal.draw(|frame| scroll = view::draw(frame, &model, theme)).map_err(failed)?;
        model.drawn(scroll);
        let errand = tokio::select! {
            event = events.recv() => match event {
                Some(Event::Key(key)) if model.typing => {
                    input::typed(key).and_then(|typed| model.edit_filter(typed))
                }
                Some(Event::Key(key)) => input::action(key).and_then(|action| model.act(action)),
                // The terminal may have been resized: the loop draws the screen again.
                Some(_) => None,
                None => Some(TopRequest::Quit),
            },
            () = sleep_until(next), if !model.paused && !sampling => Some(TopRequest::Sample),
            Some(answer) = answers.recv() => {
                match answer {
                    Answer::Sampled(snapshot) => {
                        sampling = false;
                        // While paused, the screen keeps its values: a sample that was requested before is
                        // ignored.
                        if !model.paused {
                            model.take(snapshot, clock());
                        }
                    }
                    Answer::Changed(order, outcome) => {
                        model.changed(&order, outcome);
                        next = Instant::now();
                    }
                }
                None
            }
            signal = signals.next() => return Ok(ExitCode::from(status_of(signal))),
        };
        match errand {
            Some(TopRequest::Quit) => return Ok(ExitCode::SUCCESS),
            Some(TopRequest::Sleep) => screen.sleep().map_err(failed)?,
            // The last request has not been answered yet.
            Some(TopRequest::Sample) if sampling => {}
            Some(TopRequest::Sample) => {
                sampling = true;
                next = Instant::now() + Duration::from_millis(model.interval_ms);
                let (run, names, sender) = (run.clone(), args.names.clone(), sender.clone());
                tokio::spawn(async move { send(&sender, Answer::Sampled(snapshot(&run, &names).await)) });
            }
            Some(TopRequest::Change(order)) => {
                let sender = sender.clone();
                tokio::spawn(async move {
                    let outcome = change(&order).await;
                    send(&sender, Answer::Changed(order, outcome));
                });
            }
            None => {}
        }
        // A shorter interval takes effect from now on.
        next = next.min(Instant::now() + Duration::from_millis(model.interval_ms));
    }
}

fn send(sender: &UnboundedSender<Answer>, answer: Answer) {
    // The receiver does not exist any more once the screen is left.
    let _ = sender.send(answer);
}

/// Sends `fail_path` or `reinstate_path` to the target of a path.
async fn change(order: &PathOrder) -> Result<(), String> {
    let verb = if order.fail { "fail_path" } else { "reinstate_path" };
    let arguments = vec![verb.to_owned(), order.path.clone()];
    let call = TableCall::Message { sector: order.sector, arguments };
    let sent = ControlClient::new(&order.socket).table(&order.device, &call).await;
    sent.map(|_| ()).map_err(|why| why.to_string())
}
