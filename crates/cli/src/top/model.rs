//! State of `top` and of its screen, changed by snapshots, keys and answers.
//!
//! *Invariant:* nothing here asks a process or writes to a terminal. The model returns work for the caller
//! as an [`TopRequest`], and the screen is a function of this state.

use super::gather::Snapshot;
use super::input::{Action, Typed};
use super::rows::{Past, Row, Sort};
use engine::control::DeviceStats;
use engine::tables::path_status::PathStatus;
use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;

/// Intervals that `+` and `-` step through, in milliseconds.
const INTERVALS_MS: [u64; 9] = [100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000];

/// Intervals of the past that are kept for sparklines: one for each column of a wide screen.
const PAST_MAX: usize = 500;

const NO_PATHS: &str = "this device has no paths (multipath tables have them)";

/// The contents of the screen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Screen {
    /// The list of devices.
    Devices,
    /// The device of that name.
    Device(String),
}

/// A change of a path, once the user has confirmed it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PathOrder {
    pub(super) device: String,
    pub(super) socket: PathBuf,
    pub(super) sector: u64,
    pub(super) path: String,
    /// Fail the path; otherwise reinstate it.
    pub(super) fail: bool,
}

/// Work that the model requests from its caller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum TopRequest {
    /// Restore the terminal and exit.
    Quit,
    /// Restore the terminal and stop until SIGCONT.
    Sleep,
    /// Take a snapshot.
    Sample,
    /// Fail or reinstate a path.
    Change(PathOrder),
}

/// State of `top` and of its screen.
pub(super) struct Model {
    /// All devices, in the order of the list.
    pub(super) rows: Vec<Row>,
    pub(super) processes: usize,
    pub(super) silent: usize,
    pub(super) screen: Screen,
    pub(super) help: bool,
    /// A change that waits for the user's confirmation.
    pub(super) asks: Option<PathOrder>,
    /// Name of the selected device, which stays selected when the order changes. `None`: the first one is
    /// selected.
    pub(super) selected: Option<String>,
    /// Index of the selected path of the device on the screen.
    pub(super) path: usize,
    /// Lines of a device above the upper edge of the screen.
    pub(super) scroll: usize,
    /// Whether the screen must scroll to the selected path, because it was just selected.
    pub(super) follow: bool,
    /// Text that listed devices contain; empty: all devices are listed.
    pub(super) filter: String,
    /// Whether keys edit the filter.
    pub(super) typing: bool,
    pub(super) sort: Sort,
    pub(super) reversed: bool,
    pub(super) paused: bool,
    pub(super) interval_ms: u64,
    /// Message in the last line: a result or an error.
    pub(super) note: String,
    /// Time of the last snapshot.
    pub(super) clock: String,
    /// Whether a snapshot was taken yet.
    pub(super) sampled: bool,
    /// Counters of each device at the last snapshot.
    before: HashMap<String, DeviceStats>,
    /// Past intervals of each device, oldest first.
    past: HashMap<String, VecDeque<Past>>,
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
            filter: String::new(),
            typing: false,
            sort: Sort::Iops,
            reversed: false,
            paused: false,
            interval_ms,
            note: String::new(),
            clock: String::new(),
            sampled: false,
            before: HashMap::new(),
            past: HashMap::new(),
        }
    }

    /// Adopts a snapshot that was taken at `clock`.
    pub(super) fn take(&mut self, snapshot: Snapshot, clock: String) {
        let mut rows: Vec<Row> = Vec::with_capacity(snapshot.samples.len());
        let mut counted = HashMap::with_capacity(snapshot.samples.len());
        self.past.retain(|name, _| snapshot.samples.iter().any(|sample| sample.info.name == *name));
        for sample in snapshot.samples {
            let before = self.before.get(&sample.info.name);
            let row = Row::new(before, &sample);
            if before.is_some() {
                let past = self.past.entry(sample.info.name.clone()).or_default();
                past.push_back(Past::of(&row));
                past.drain(..past.len().saturating_sub(PAST_MAX));
            }
            rows.push(row);
            counted.insert(sample.info.name.clone(), sample.stats);
        }
        // Devices of a process that does not answer keep their last values and are marked.
        for old in self.rows.drain(..) {
            if snapshot.silent.contains(&old.socket) && !counted.contains_key(&old.info.name) {
                if let Some(stats) = self.before.remove(&old.info.name) {
                    counted.insert(old.info.name.clone(), stats);
                }
                rows.push(Row { silent: true, ..old });
            }
        }
        (self.rows, self.before) = (rows, counted);
        (self.processes, self.silent) = (snapshot.processes, snapshot.silent.len());
        (self.clock, self.sampled) = (clock, true);
        self.order();
        if let Screen::Device(name) = &self.screen
            && !self.rows.iter().any(|row| row.info.name == *name)
        {
            self.note = format!("{name} was removed");
            (self.screen, self.asks) = (Screen::Devices, None);
        }
    }

    /// Sets the scroll position to the drawn one, which is limited by the number of lines.
    pub(super) fn drawn(&mut self, scroll: usize) {
        self.scroll = scroll;
    }

    /// Shows the result of a change.
    pub(super) fn changed(&mut self, order: &PathOrder, outcome: Result<(), String>) {
        let PathOrder { device, path, fail, .. } = order;
        self.note = match outcome {
            Ok(()) => {
                format!("{path} of {device} was {}", if *fail { "failed" } else { "reinstated" })
            }
            Err(why) => format!("{path} of {device}: {why}"),
        };
    }

    fn order(&mut self) {
        self.sort.order(&mut self.rows, self.reversed);
        let exists = |name: &String| self.rows.iter().any(|row| row.info.name == *name);
        if !self.selected.as_ref().is_some_and(exists) {
            self.selected = None;
        }
    }

    /// Returns the rows of the list: those that match the filter, in order.
    pub(super) fn listed(&self) -> Vec<&Row> {
        let text = self.filter.to_lowercase();
        self.rows.iter().filter(|row| row.matches(&text)).collect()
    }

    /// Position in the list of the selected device.
    pub(super) fn selected_at(&self) -> usize {
        let listed = self.listed();
        listed.iter().position(|row| Some(&row.info.name) == self.selected.as_ref()).unwrap_or(0)
    }

    /// The selected device of the list, which is the first until one is selected.
    pub(super) fn selected_row(&self) -> Option<&Row> {
        self.listed().get(self.selected_at()).copied()
    }

    /// Past intervals of a device, oldest first.
    pub(super) fn past(&self, name: &str) -> impl DoubleEndedIterator<Item = Past> + Clone {
        self.past.get(name).into_iter().flatten().copied()
    }

    /// Returns the device whose details fill the screen.
    pub(super) fn shown(&self) -> Option<&Row> {
        match &self.screen {
            Screen::Devices => None,
            Screen::Device(name) => self.rows.iter().find(|row| row.info.name == *name),
        }
    }

    /// Returns the selected path of the device whose details are shown.
    pub(super) fn shown_path(&self) -> Option<&PathStatus> {
        let paths = &self.shown()?.paths;
        paths.get(self.path.min(paths.len().saturating_sub(1)))
    }

    /// Applies the meaning of a key.
    pub(super) fn act(&mut self, action: Action) -> Option<TopRequest> {
        if action == Action::Quit {
            return Some(TopRequest::Quit);
        }
        if action == Action::Sleep {
            return Some(TopRequest::Sleep);
        }
        if self.help {
            self.help = false;
            return None;
        }
        if let Some(order) = self.asks.take() {
            // Any other key means no.
            return (action == Action::Yes).then_some(TopRequest::Change(order));
        }
        self.note.clear();
        match action {
            Action::Help => self.help = true,
            Action::Pause => self.paused = !self.paused,
            Action::Sample => return Some(TopRequest::Sample),
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
                let has_paths = self.selected_row().is_some_and(|row| !row.paths.is_empty());
                let text = if has_paths { "press Enter to select one of its paths" } else { NO_PATHS };
                self.note = text.into();
            }
            Action::Fail => self.ask(true),
            Action::Enter => self.enter(),
            Action::Filter => (self.screen, self.typing) = (Screen::Devices, true),
            Action::Back if self.screen == Screen::Devices => self.filter.clear(),
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

    /// Applies a key to the filter that is being typed.
    pub(super) fn edit_filter(&mut self, typed: Typed) -> Option<TopRequest> {
        match typed {
            Typed::Letter(letter) => self.filter.push(letter),
            Typed::Erase => drop(self.filter.pop()),
            Typed::Done => self.typing = false,
            Typed::Cancel => {
                self.filter.clear();
                self.typing = false;
            }
            Typed::Quit => return Some(TopRequest::Quit),
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
        if let (Screen::Devices, Some(row)) = (&self.screen, self.selected_row()) {
            let name = row.info.name.clone();
            // The device stays selected when the user returns to the list.
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
                let listed = self.listed();
                let at = step(self.selected_at(), listed.len());
                self.selected = listed.get(at).map(|row| row.info.name.clone());
            }
        }
    }

    fn ask(&mut self, fail: bool) {
        let (Some(row), Some(path)) = (self.shown(), self.shown_path()) else {
            self.note = NO_PATHS.into();
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
