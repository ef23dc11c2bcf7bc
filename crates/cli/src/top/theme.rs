//! Colours and letters for bars, or what stands for them where there are none.

use crate::locale::is_utf8_in;
use ratatui::style::{Color, Modifier, Style};

/// How things look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Theme {
    pub(super) colour: bool,
    /// The terminal shows more than ASCII.
    pub(super) unicode: bool,
}

impl Theme {
    /// As the environment says: `NO_COLOR`, and what `LC_ALL`, `LC_CTYPE` or `LANG` says of letters.
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

    /// How full something is: calm, busy, full.
    pub(super) fn filled(self, share: f64) -> Style {
        self.coloured(match share {
            s if s < 0.6 => Color::Green,
            s if s < 0.9 => Color::Yellow,
            _ => Color::Red,
        })
    }

    /// A bar of so many letters, to the eighth of one where the terminal has those.
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
    fn bars_show_eighths_or_plain_letters() {
        let unicode = Theme { colour: true, unicode: true };
        assert_eq!(unicode.bar(0.5, 4), "██  ");
        assert_eq!(unicode.bar(0.01, 4), "▏   ");
        assert_eq!(unicode.bar(2.0, 4), "████");
        assert_eq!(Theme { unicode: false, ..unicode }.bar(0.3, 4), "##..");
    }

    #[test]
    fn the_environment_decides_about_colours_and_letters() {
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
        assert!(of(&[("NO_COLOR", "")]).colour, "an empty one is none");
    }
}
