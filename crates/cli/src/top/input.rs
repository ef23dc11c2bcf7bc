//! Meanings of keys.

use super::rows::Sort;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// Meaning of a key. Some keys mean one thing in the list of devices and another in a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Quit,
    /// Suspends the process (Ctrl-Z).
    Sleep,
    Help,
    Pause,
    /// Samples now.
    Sample,
    Slower,
    Faster,
    Sort(Sort),
    /// Reverses the order; in a device, reinstates the selected path.
    ReverseOrReinstate,
    Fail,
    Yes,
    Enter,
    Back,
    /// Begins to type a filter.
    Filter,
    /// Moves the selection by this many lines, downwards if positive.
    Move(isize),
    /// Scrolls by this many lines, downwards if positive.
    Scroll(isize),
    /// A key without a meaning of its own: it closes the help, and answers a question with no.
    Other,
}

/// Lines that a page key scrolls by: fewer than any screen has.
const PAGE: isize = 10;
/// Scrolls to the end of any list.
const FAR: isize = 1 << 20;

/// Returns the meaning of a key; `None`: the key was released.
pub(super) fn action(key: KeyEvent) -> Option<Action> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Some(Action::Quit),
            KeyCode::Char('z') => Some(Action::Sleep),
            KeyCode::Char('l') => Some(Action::Sample),
            _ => Some(Action::Other),
        };
    }
    Some(match key.code {
        KeyCode::Char('q') => Action::Quit,
        KeyCode::Char('h' | '?') | KeyCode::F(1) => Action::Help,
        KeyCode::Char('p' | ' ') => Action::Pause,
        KeyCode::Char('+' | '=') => Action::Slower,
        KeyCode::Char('-') => Action::Faster,
        KeyCode::Char('n') => Action::Sort(Sort::Name),
        KeyCode::Char('i') => Action::Sort(Sort::Iops),
        KeyCode::Char('b') => Action::Sort(Sort::Bandwidth),
        KeyCode::Char('l') => Action::Sort(Sort::Latency),
        KeyCode::Char('d') => Action::Sort(Sort::Queue),
        KeyCode::Char('u') => Action::Sort(Sort::Busy),
        KeyCode::Char('e') => Action::Sort(Sort::Errors),
        KeyCode::Char('r') => Action::ReverseOrReinstate,
        KeyCode::Char('f') => Action::Fail,
        KeyCode::Char('y') => Action::Yes,
        KeyCode::Char('/') => Action::Filter,
        KeyCode::Enter | KeyCode::Right => Action::Enter,
        KeyCode::Esc | KeyCode::Backspace | KeyCode::Left => Action::Back,
        KeyCode::Down | KeyCode::Char('j') => Action::Move(1),
        KeyCode::Up | KeyCode::Char('k') => Action::Move(-1),
        KeyCode::PageDown => Action::Scroll(PAGE),
        KeyCode::PageUp => Action::Scroll(-PAGE),
        KeyCode::Home => Action::Scroll(-FAR),
        KeyCode::End => Action::Scroll(FAR),
        _ => Action::Other,
    })
}

/// Meaning of a key while a filter is typed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Typed {
    /// Appends a letter.
    Letter(char),
    /// Removes the last letter.
    Erase,
    /// Keeps the filter and ends typing.
    Done,
    /// Removes the filter and ends typing.
    Cancel,
    /// Ctrl-C.
    Quit,
}

/// Returns the meaning of a key while a filter is typed; `None`: it has none.
pub(super) fn typed(key: KeyEvent) -> Option<Typed> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    let has_control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if has_control => Some(Typed::Quit),
        KeyCode::Char('u') if has_control => Some(Typed::Cancel),
        KeyCode::Char(letter) if !has_control => Some(Typed::Letter(letter)),
        KeyCode::Backspace => Some(Typed::Erase),
        KeyCode::Enter => Some(Typed::Done),
        KeyCode::Esc => Some(Typed::Cancel),
        _ => None,
    }
}

/// All keys, for the help screen.
pub(super) const HELP: [(&str, &str); 17] = [
    ("Up Down  k j", "select a device; in a device, a path"),
    ("Enter", "show the details of the device"),
    ("Esc  Left", "back to all devices"),
    ("/", "show only devices whose name or stack contains a text"),
    ("PgUp PgDn Home End", "scroll"),
    ("i", "sort by requests per second"),
    ("b", "sort by bandwidth"),
    ("l", "sort by latency (p99: 99 of 100 requests took less)"),
    ("d", "sort by requests in flight"),
    ("u", "sort by the part of the time with requests in flight"),
    ("e", "sort by errors"),
    ("n", "sort by name"),
    ("r", "reverse the order; in a device, reinstate the path"),
    ("f", "in a device, fail the path; both ask first"),
    ("+ -", "longer or shorter interval"),
    ("p  Space", "pause, and continue"),
    ("q  Ctrl-C", "quit"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_the_help_has_a_meaning() {
        let of = |code| action(KeyEvent::new(code, KeyModifiers::NONE));
        assert_eq!(of(KeyCode::Char('q')), Some(Action::Quit));
        assert_eq!(of(KeyCode::Char('e')), Some(Action::Sort(Sort::Errors)));
        assert_eq!(of(KeyCode::PageUp), Some(Action::Scroll(-PAGE)));
        assert_eq!(of(KeyCode::Char('Q')), Some(Action::Other));
        assert_eq!(of(KeyCode::Char('/')), Some(Action::Filter));
        for (key, _, sort) in Sort::KEYS {
            assert_eq!(of(KeyCode::Char(key.chars().next().unwrap())), Some(Action::Sort(sort)), "{key}");
        }
        let control = |c| action(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL));
        assert_eq!((control('c'), control('q')), (Some(Action::Quit), Some(Action::Other)));
        for (keys, _) in HELP {
            for letter in keys.split_whitespace().filter(|word| word.len() == 1) {
                assert!(of(KeyCode::Char(letter.chars().next().unwrap())) != Some(Action::Other), "{letter}");
            }
        }
    }
    #[test]
    fn a_filter_takes_letters_that_are_keys_elsewhere() {
        let of = |code| typed(KeyEvent::new(code, KeyModifiers::NONE));
        assert_eq!(of(KeyCode::Char('q')), Some(Typed::Letter('q')));
        assert_eq!(
            [KeyCode::Backspace, KeyCode::Enter, KeyCode::Esc].map(of),
            [Some(Typed::Erase), Some(Typed::Done), Some(Typed::Cancel),]
        );
        let control = |c| typed(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL));
        assert_eq!(
            [control('c'), control('u'), control('x')],
            [Some(Typed::Quit), Some(Typed::Cancel), None]
        );
        assert_eq!(of(KeyCode::Up), None);
    }
}
