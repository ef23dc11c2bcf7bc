//! What `top` knows and what is on the screen, and how both change: by looks, by keys, by answers.
//!
//! *Invariant:* nothing here asks a process or writes to a terminal. What is to be done outside comes back as an
//! [`Errand`], and whatever is drawn is a function of this.

use super::gather::Look;
use super::input::Action;
use super::rows::{Row, Sort};
use engine::control::DeviceStats;
use engine::path_status::PathStatus;
use std::collections::HashMap;
use std::path::PathBuf;

/// The intervals that `+` and `-` go through, in milliseconds.
const INTERVALS_MS: [u64; 9] = [100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000];

/// What fills the screen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Screen {
    /// All devices.
    Devices,
    /// One of them.
    Device(String),
}

/// What is to be done to a path, once somebody said yes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PathOrder {
    pub(super) device: String,
    pub(super) socket: PathBuf,
    pub(super) sector: u64,
    pub(super) path: String,
    /// Fail it, or reinstate it.
    pub(super) fail: bool,
}

/// What is to be done outside.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Errand {
    /// Restore the terminal and end.
    Quit,
    /// Give the terminal back until somebody continues us.
    Sleep,
    /// Look now.
    Look,
    /// Tell a path's target.
    Tell(PathOrder),
}

/// All of it.
pub(super) struct Model {
    /// What there is, in the order in which it is shown.
    pub(super) rows: Vec<Row>,
    pub(super) processes: usize,
    pub(super) silent: usize,
    pub(super) screen: Screen,
    pub(super) help: bool,
    /// Waits for a yes.
    pub(super) asks: Option<PathOrder>,
    /// The device that was picked out, by name: it keeps when the order changes. `None`: nobody has, and it is the first.
    pub(super) selected: Option<String>,
    /// The path of the device on the screen that is picked out.
    pub(super) path: usize,
    /// Lines of a device that are above the screen.
    pub(super) scroll: usize,
    /// The path that is picked out was just picked: it is to be seen.
    pub(super) follow: bool,
    pub(super) sort: Sort,
    pub(super) reversed: bool,
    pub(super) paused: bool,
    pub(super) interval_ms: u64,
    /// The last thing that happened besides: an answer, an error.
    pub(super) note: String,
    /// When the last look was.
    pub(super) clock: String,
    /// There was a look.
    pub(super) looked: bool,
    /// What each device counted at the last look.
    before: HashMap<String, DeviceStats>,
}

impl Model {
    pub(super) fn new(interval_ms: u64) -> Model {
        Model {
            rows: Vec::new(),
            processes: 0,
            silent: 0,
            screen: Screen::Devices,
            help: false,
            asks: None,
            selected: None,
            path: 0,
            scroll: 0,
            follow: false,
            sort: Sort::Iops,
            reversed: false,
            paused: false,
            interval_ms,
            note: String::new(),
            clock: String::new(),
            looked: false,
            before: HashMap::new(),
        }
    }

    /// What was found since the last look.
    pub(super) fn take(&mut self, look: Look, clock: String) {
        let mut rows: Vec<Row> = Vec::with_capacity(look.samples.len());
        let mut counted = HashMap::with_capacity(look.samples.len());
        for sample in look.samples {
            rows.push(Row::new(self.before.get(&sample.info.name), &sample));
            counted.insert(sample.info.name.clone(), sample.stats);
        }
        // What a process that does not answer has is shown as it was, and told to be old.
        for old in self.rows.drain(..) {
            if look.silent.contains(&old.socket) && !counted.contains_key(&old.info.name) {
                if let Some(stats) = self.before.remove(&old.info.name) {
                    counted.insert(old.info.name.clone(), stats);
                }
                rows.push(Row { silent: true, ..old });
            }
        }
        (self.rows, self.before) = (rows, counted);
        (self.processes, self.silent) = (look.processes, look.silent.len());
        (self.clock, self.looked) = (clock, true);
        self.order();
        if let Screen::Device(name) = &self.screen
            && !self.rows.iter().any(|row| row.info.name == *name)
        {
            self.note = format!("{name} is gone");
            (self.screen, self.asks) = (Screen::Devices, None);
        }
    }

    /// How far down was drawn: who draws knows where a device ends, and from there one goes up again.
    pub(super) fn drawn(&mut self, scroll: usize) {
        self.scroll = scroll;
    }

    /// What came of an order.
    pub(super) fn told(&mut self, order: &PathOrder, outcome: Result<(), String>) {
        let PathOrder { device, path, fail, .. } = order;
        self.note = match outcome {
            Ok(()) => {
                format!("{path} of {device} {}", if *fail { "is out of use" } else { "may be used again" })
            }
            Err(why) => format!("{path} of {device}: {why}"),
        };
    }

    fn order(&mut self) {
        self.sort.order(&mut self.rows, self.reversed);
        let is_there = |name: &String| self.rows.iter().any(|row| row.info.name == *name);
        if !self.selected.as_ref().is_some_and(is_there) {
            self.selected = None;
        }
    }

    /// Where the device that is picked out stands.
    pub(super) fn selected_at(&self) -> usize {
        self.rows.iter().position(|row| Some(&row.info.name) == self.selected.as_ref()).unwrap_or(0)
    }

    /// The device on the screen.
    pub(super) fn shown(&self) -> Option<&Row> {
        match &self.screen {
            Screen::Devices => None,
            Screen::Device(name) => self.rows.iter().find(|row| row.info.name == *name),
        }
    }

    /// The path that is picked out.
    pub(super) fn shown_path(&self) -> Option<&PathStatus> {
        let paths = &self.shown()?.paths;
        paths.get(self.path.min(paths.len().saturating_sub(1)))
    }

    /// What a key does.
    pub(super) fn act(&mut self, action: Action) -> Option<Errand> {
        if action == Action::Quit {
            return Some(Errand::Quit);
        }
        if action == Action::Sleep {
            return Some(Errand::Sleep);
        }
        if self.help {
            self.help = false;
            return None;
        }
        if let Some(order) = self.asks.take() {
            // Anything but a yes is a no.
            return (action == Action::Yes).then_some(Errand::Tell(order));
        }
        self.note.clear();
        match action {
            Action::Help => self.help = true,
            Action::Pause => self.paused = !self.paused,
            Action::Look => return Some(Errand::Look),
            Action::Slower | Action::Faster => self.change_interval(action == Action::Slower),
            Action::Sort(sort) if self.screen == Screen::Devices => {
                (self.sort, self.reversed) = (sort, self.reversed && sort != self.sort);
                self.order();
            }
            Action::ReverseOrReinstate if self.screen == Screen::Devices => {
                self.reversed = !self.reversed;
                self.order();
            }
            Action::ReverseOrReinstate => self.ask(false),
            Action::Fail if self.screen == Screen::Devices => {
                self.note = "a path is failed where its device is shown: Enter".into();
            }
            Action::Fail => self.ask(true),
            Action::Enter => self.enter(),
            Action::Back => self.screen = Screen::Devices,
            Action::Move(by) => self.go(by),
            Action::Scroll(by) if self.screen == Screen::Devices => self.go(by),
            Action::Scroll(by) => {
                (self.scroll, self.follow) = (self.scroll.saturating_add_signed(by), false);
            }
            Action::Other | Action::Sort(_) | Action::Yes | Action::Quit | Action::Sleep => {}
        }
        None
    }

    fn change_interval(&mut self, slower: bool) {
        let mut steps = INTERVALS_MS.iter().copied();
        let next = if slower {
            steps.find(|step| *step > self.interval_ms)
        } else {
            steps.rfind(|step| *step < self.interval_ms)
        };
        self.interval_ms = next.unwrap_or(self.interval_ms);
    }

    fn enter(&mut self) {
        if let (Screen::Devices, Some(row)) = (&self.screen, self.rows.get(self.selected_at())) {
            let name = row.info.name.clone();
            // Whoever comes back finds it picked out.
            self.selected = Some(name.clone());
            self.screen = Screen::Device(name);
            (self.path, self.scroll, self.follow) = (0, 0, false);
        }
    }

    fn go(&mut self, by: isize) {
        let step = |at: usize, of: usize| at.saturating_add_signed(by).min(of.saturating_sub(1));
        match self.shown().map(|row| row.paths.len()) {
            Some(0) => self.scroll = self.scroll.saturating_add_signed(by),
            Some(paths) => (self.path, self.follow) = (step(self.path.min(paths - 1), paths), true),
            None => {
                let at = step(self.selected_at(), self.rows.len());
                self.selected = self.rows.get(at).map(|row| row.info.name.clone());
            }
        }
    }

    fn ask(&mut self, fail: bool) {
        let (Some(row), Some(path)) = (self.shown(), self.shown_path()) else {
            self.note = "it has no paths: multipath tables have them".into();
            return;
        };
        if path.works != fail {
            self.note =
                format!("{} is {}", path.name, if path.works { "up already" } else { "down already" });
            return;
        }
        self.asks = Some(PathOrder {
            device: row.info.name.clone(),
            socket: row.socket.clone(),
            sector: path.sector,
            path: path.name.clone(),
            fail,
        });
    }
}
