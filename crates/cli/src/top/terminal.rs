//! The terminal: taken for the screen, given back however this ends, and its keys.
//!
//! *Invariant:* whoever takes it gives it back: when [`Screen`] is dropped, before a panic is told, and while the process
//! sleeps. A signal ends the loop that owns the screen, and so does the same.

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

/// What is drawn on.
pub(super) struct Screen {
    pub(super) terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Takes the terminal.
    pub(super) fn take() -> io::Result<Screen> {
        give_back_before_a_panic_is_told();
        enable_raw_mode()?;
        let entered = execute!(stdout(), EnterAlternateScreen, cursor::Hide);
        let terminal = entered.and_then(|()| Terminal::new(CrosstermBackend::new(stdout())));
        terminal.map(|terminal| Screen { terminal }).inspect_err(|_| give_back())
    }

    /// Gives it back until somebody continues the process. The whole group of processes sleeps, as it does when the
    /// terminal itself is asked with Ctrl-Z: whoever started us through another process waits for that one. Nobody
    /// here handles the signal, so it stops us; where there is no shell to continue a group, the kernel lets it go by.
    pub(super) fn sleep(&mut self) -> io::Result<()> {
        give_back();
        rustix::process::kill_current_process_group(rustix::process::Signal::TSTP)?;
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen, cursor::Hide)?;
        self.terminal.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// As it was. A terminal that is gone needs nothing.
fn give_back() {
    let _ = execute!(stdout(), LeaveAlternateScreen, cursor::Show);
    let _ = disable_raw_mode();
}

fn give_back_before_a_panic_is_told() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            tell(panic);
        }));
    });
}

/// Keys and changes of size, from a thread that waits for them; it ends with the terminal or with the process.
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
