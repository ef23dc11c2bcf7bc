//! From keys to what they mean.

use super::rows::Sort;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// What a key means. Some mean one thing in the list of devices and another in a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Quit,
    /// Ctrl-Z.
    Sleep,
    Help,
    Pause,
    Look,
    Slower,
    Faster,
    Sort(Sort),
    /// The other way round; in a device, a path back into use.
    ReverseOrReinstate,
    Fail,
    Yes,
    Enter,
    Back,
    /// So many lines down, or up.
    Move(isize),
    /// The same by pages.
    Scroll(isize),
    /// Nothing by itself: it ends the help, and is no yes.
    Other,
}

/// A page of lines: fits any screen.
const PAGE: isize = 10;
/// Further than any list is long.
const FAR: isize = 1 << 20;

/// What the key means; `None`: it was let go.
pub(super) fn action(key: KeyEvent) -> Option<Action> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Some(Action::Quit),
            KeyCode::Char('z') => Some(Action::Sleep),
            KeyCode::Char('l') => Some(Action::Look),
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

/// All keys, for the page that tells of them.
pub(super) const HELP: [(&str, &str); 16] = [
    ("Up Down  k j", "pick a device; in a device, a path"),
    ("Enter", "show all about the device"),
    ("Esc  Left", "back to all devices"),
    ("PgUp PgDn Home End", "scroll"),
    ("i", "sort by requests each second"),
    ("b", "sort by bandwidth"),
    ("l", "sort by latency (99 of 100 requests took less)"),
    ("d", "sort by requests under way"),
    ("u", "sort by the part of the time with something under way"),
    ("e", "sort by errors"),
    ("n", "sort by name"),
    ("r", "the other way round; in a device, reinstate the path"),
    ("f", "in a device, fail the path; both ask before"),
    ("+ -", "look less often, or more often"),
    ("p  Space", "pause, and go on"),
    ("q  Ctrl-C", "quit"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_mean_what_the_help_says() {
        let of = |code| action(KeyEvent::new(code, KeyModifiers::NONE));
        assert_eq!(of(KeyCode::Char('q')), Some(Action::Quit));
        assert_eq!(of(KeyCode::Char('e')), Some(Action::Sort(Sort::Errors)));
        assert_eq!(of(KeyCode::PageUp), Some(Action::Scroll(-PAGE)));
        assert_eq!(of(KeyCode::Char('Q')), Some(Action::Other));
        let control = |c| action(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL));
        assert_eq!((control('c'), control('q')), (Some(Action::Quit), Some(Action::Other)));
        for (keys, _) in HELP {
            for letter in keys.split_whitespace().filter(|word| word.len() == 1) {
                assert!(of(KeyCode::Char(letter.chars().next().unwrap())) != Some(Action::Other), "{letter}");
            }
        }
    }
}
