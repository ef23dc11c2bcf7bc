//! Colours and letters for bars, with replacements for terminals without them.

use crate::locale::is_utf8_in;
use ratatui::style::{Color, Modifier, Style};

/// Abilities of the terminal that styles depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Theme {
    pub(super) colour: bool,
    /// Whether the terminal shows Unicode letters.
    pub(super) unicode: bool,
}

impl Theme {
    /// Reads `NO_COLOR`, and the character set from `LC_ALL`, `LC_CTYPE` or `LANG`.
    pub(super) fn of_environment(variable: impl Fn(&str) -> Option<String>) -> Theme {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        Theme { colour: set("NO_COLOR").is_none(), unicode: is_utf8_in(&variable) }
    }

    fn coloured(self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    pub(super) fn head(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(super) fn titles(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    pub(super) fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD)
    }

    pub(super) fn quiet(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    pub(super) fn bad(self) -> Style {
        self.coloured(Color::Red).add_modifier(Modifier::BOLD)
    }

    pub(super) fn good(self) -> Style {
        self.coloured(Color::Green)
    }

    pub(super) fn key(self) -> Style {
        self.coloured(Color::Cyan).add_modifier(Modifier::BOLD)
    }

    /// Style of a bar: green, yellow from 60 %, red from 90 %.
    pub(super) fn filled(self, share: f64) -> Style {
        self.coloured(match share {
            s if s < 0.6 => Color::Green,
            s if s < 0.9 => Color::Yellow,
            _ => Color::Red,
        })
    }

    /// Returns a line of `width` letters, one for each of the newest values; the highest letter is the
    /// largest of them.
    pub(super) fn spark(self, values: impl DoubleEndedIterator<Item = f64>, width: usize) -> String {
        let letters: &[char] = if self.unicode {
            &['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█']
        } else {
            &['_', '.', ':', '-', '=', '+', '*', '#']
        };
        let newest: Vec<f64> = values.rev().take(width).collect();
        let most = newest.iter().copied().fold(0.0, f64::max);
        let letter = |value: &f64| {
            let share = if most > 0.0 { value / most } else { 0.0 };
            letters[((share * letters.len() as f64).ceil() as usize).clamp(1, letters.len()) - 1]
        };
        let drawn: String = newest.iter().rev().map(letter).collect();
        format!("{drawn:>width$}")
    }

    /// Returns a bar of `width` letters, to the eighth of a letter where the terminal has those.
    pub(super) fn bar(self, share: f64, width: usize) -> String {
        let share = share.clamp(0.0, 1.0);
        if !self.unicode {
            let full = (share * width as f64).ceil() as usize;
            return (0..width).map(|at| if at < full { '#' } else { '.' }).collect();
        }
        let eighths = (share * width as f64 * 8.0).ceil() as usize;
        let letter = |at: usize| match eighths.saturating_sub(at * 8) {
            0 => ' ',
            // U+258F is an eighth from the left, U+2588 is all of it.
            some => char::from_u32(0x2590 - some.min(8) as u32).unwrap_or('#'),
        };
        (0..width).map(letter).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_eighths_of_letters_or_ascii() {
        let unicode = Theme { colour: true, unicode: true };
        assert_eq!(unicode.bar(0.5, 4), "██  ");
        assert_eq!(unicode.bar(0.01, 4), "▏   ");
        assert_eq!(unicode.bar(2.0, 4), "████");
        assert_eq!(Theme { unicode: false, ..unicode }.bar(0.3, 4), "##..");
    }

    #[test]
    fn a_spark_shows_the_newest_values_by_their_largest() {
        let unicode = Theme { colour: true, unicode: true };
        assert_eq!(unicode.spark([9.0, 0.0, 4.0, 8.0].into_iter(), 3), "▁▄█");
        assert_eq!(unicode.spark([1.0].into_iter(), 3), "  █");
        assert_eq!(unicode.spark([0.0, 0.0].into_iter(), 2), "▁▁", "nothing happened");
        assert_eq!(Theme { unicode: false, ..unicode }.spark([0.0, 2.0].into_iter(), 2), "_#");
    }

    #[test]
    fn colours_and_letters_depend_on_the_environment() {
        let of = |pairs: &'static [(&str, &str)]| {
            Theme::of_environment(|name| {
                pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned())
            })
        };
        assert_eq!(of(&[("LANG", "en_US.UTF-8")]), Theme { colour: true, unicode: true });
        assert_eq!(
            of(&[("NO_COLOR", "1"), ("LC_ALL", "C"), ("LANG", "de_DE.utf8")]),
            Theme { colour: false, unicode: false }
        );
        assert!(of(&[("NO_COLOR", "")]).colour, "an empty variable counts as unset");
    }
}
