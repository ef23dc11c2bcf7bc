//! The terminal: raw mode, the alternate screen, and keys.
//!
//! *Invariant:* the terminal is restored when [`Screen`] is dropped, before a panic is reported, and while
//! the process is stopped. A signal ends the loop that owns the screen, which drops it.

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{cursor, execute};
use std::io::{self, Stdout, stdout};
use std::sync::Once;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// The terminal while `top` draws on it.
pub(super) struct Screen {
    pub(super) terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Enters raw mode and the alternate screen.
    pub(super) fn enter() -> io::Result<Screen> {
        restore_before_a_panic_is_reported();
        enable_raw_mode()?;
        let entered = execute!(stdout(), EnterAlternateScreen, cursor::Hide);
        let terminal = entered.and_then(|()| Terminal::new(CrosstermBackend::new(stdout())));
        terminal.map(|terminal| Screen { terminal }).inspect_err(|_| restore())
    }

    /// Restores the terminal and stops the process group with SIGTSTP until SIGCONT, as Ctrl-Z in a terminal
    /// does: a shell that started this process through another one waits for the group. Without a shell that
    /// could continue the group the kernel ignores the signal.
    pub(super) fn sleep(&mut self) -> io::Result<()> {
        restore();
        rustix::process::kill_current_process_group(rustix::process::Signal::TSTP)?;
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen, cursor::Hide)?;
        self.terminal.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal. Errors are ignored: a closed terminal needs no restoring.
fn restore() {
    let _ = execute!(stdout(), LeaveAlternateScreen, cursor::Show);
    let _ = disable_raw_mode();
}

fn restore_before_a_panic_is_reported() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            report(panic);
        }));
    });
}

/// Returns keys and changes of size, from a thread that reads them until the terminal or the process ends.
pub(super) fn events() -> io::Result<UnboundedReceiver<Event>> {
    let (sender, receiver) = unbounded_channel();
    std::thread::Builder::new().name("keys".into()).spawn(move || {
        while let Ok(event) = event::read() {
            if sender.send(event).is_err() {
                break;
            }
        }
    })?;
    Ok(receiver)
}
