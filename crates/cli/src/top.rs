//! `top`: all devices of all processes, live in the terminal, or as text.
//!
//! ```text
//! gather   asks every process          input    a key means an action
//! model    what is known and shown     view     model → what is on the screen
//! terminal taken and given back        batch    model → text
//! ```
//!
//! One thread owns the model: looks, keys, answers and signals come to it one after the other. Looks and messages to
//! paths run beside it, so that a process that does not answer keeps nobody from quitting.

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
use gather::{Look, look};
use model::{Errand, Model, PathOrder};
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
    // Those that are asked for by name are there at the beginning; what becomes of them shows.
    args.names.iter().try_for_each(|name| client_of(&run, "top", name).map(drop))?;
    if args.batch {
        return block_on("top", in_batches(args, &run))?;
    }
    let is_dumb = std::env::var("TERM").is_ok_and(|term| term == "dumb");
    if !std::io::stdout().is_terminal() || is_dumb {
        let why = "there is no terminal to draw on (as text: blockyard top -b -n 1)";
        return Err(Failure::usage("top", "", why));
    }
    block_on("top", on_the_screen(args, run))?
}

/// The time of day, UTC.
fn clock() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    format!("{:02}:{:02}:{:02} UTC", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
}

async fn in_batches(args: &TopArgs, run: &RunDir) -> Result<ExitCode, Failure> {
    let mut model = Model::new((args.delay * 1000.0) as u64);
    model.take(look(run, &args.names).await, clock());
    let mut next = Instant::now();
    let mut pages = 0;
    while args.count.is_none_or(|count| pages < count) {
        next += Duration::from_secs_f64(args.delay);
        sleep_until(next).await;
        model.take(look(run, &args.names).await, clock());
        if !print(&batch::page(&model)) {
            break;
        }
        pages += 1;
    }
    Ok(ExitCode::SUCCESS)
}

/// What comes back from what runs beside the screen.
enum Answer {
    Looked(Look),
    Told(PathOrder, Result<(), String>),
}

async fn on_the_screen(args: &TopArgs, run: RunDir) -> Result<ExitCode, Failure> {
    let failed = |why: std::io::Error| Failure::new("top", "", why);
    let theme = Theme::of_environment(|name| std::env::var(name).ok());
    let mut signals = Signals::new().map_err(failed)?;
    let mut screen = Screen::take().map_err(failed)?;
    let mut events = terminal::events().map_err(failed)?;
    let (sender, mut answers) = unbounded_channel();
    let mut model = Model::new((args.delay * 1000.0) as u64);
    let mut next = Instant::now();
    let mut looking = false;
    loop {
        let mut scroll = 0;
        screen.terminal.draw(|frame| scroll = view::draw(frame, &model, theme)).map_err(failed)?;
        model.drawn(scroll);
        let errand = tokio::select! {
            event = events.recv() => match event {
                Some(Event::Key(key)) => input::action(key).and_then(|action| model.act(action)),
                // Another size: drawn anew.
                Some(_) => None,
                None => Some(Errand::Quit),
            },
            () = sleep_until(next), if !model.paused && !looking => Some(Errand::Look),
            Some(answer) = answers.recv() => {
                match answer {
                    Answer::Looked(look) => {
                        looking = false;
                        // One that was on its way when somebody paused is not what they looked at.
                        if !model.paused {
                            model.take(look, clock());
                        }
                    }
                    Answer::Told(order, outcome) => {
                        model.told(&order, outcome);
                        next = Instant::now();
                    }
                }
                None
            }
            signal = signals.next() => return Ok(ExitCode::from(status_of(signal))),
        };
        match errand {
            Some(Errand::Quit) => return Ok(ExitCode::SUCCESS),
            Some(Errand::Sleep) => screen.sleep().map_err(failed)?,
            // One is on its way.
            Some(Errand::Look) if looking => {}
            Some(Errand::Look) => {
                looking = true;
                next = Instant::now() + Duration::from_millis(model.interval_ms);
                let (run, names, sender) = (run.clone(), args.names.clone(), sender.clone());
                tokio::spawn(async move { send(&sender, Answer::Looked(look(&run, &names).await)) });
            }
            Some(Errand::Tell(order)) => {
                let sender = sender.clone();
                tokio::spawn(async move {
                    let outcome = tell(&order).await;
                    send(&sender, Answer::Told(order, outcome));
                });
            }
            None => {}
        }
        // An interval that was made shorter counts from now.
        next = next.min(Instant::now() + Duration::from_millis(model.interval_ms));
    }
}

fn send(sender: &UnboundedSender<Answer>, answer: Answer) {
    // Nobody waits for it any more once the screen is given back.
    let _ = sender.send(answer);
}

async fn tell(order: &PathOrder) -> Result<(), String> {
    let verb = if order.fail { "fail_path" } else { "reinstate_path" };
    let words = vec![verb.to_owned(), order.path.clone()];
    let call = TableCall::Message { sector: order.sector, words };
    let told = ControlClient::new(&order.socket).table(&order.device, &call).await;
    told.map(|_| ()).map_err(|why| why.to_string())
}
