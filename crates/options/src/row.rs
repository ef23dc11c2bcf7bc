//! Rows that describe options, from which messages, help, completions and the reference are generated.

/// One option of a description: its key, the form of its value, its default and its purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OptionRow {
    /// The key.
    pub key: &'static str,
    /// The form of the value: words as they are typed, placeholders in capitals, alternatives with `|` between them
    /// (`on|off|auto`, `SIZE`, `on|off|TIME`). Empty for a flag, which has no value.
    pub form: &'static str,
    /// The value that applies when the option is omitted. Empty where that needs no mention.
    pub default: &'static str,
    /// The purpose, in one line.
    pub about: &'static str,
}

impl OptionRow {
    /// Describes an option without a value.
    pub const fn flag(key: &'static str, about: &'static str) -> OptionRow {
        OptionRow { key, form: "", default: "", about }
    }

    /// Describes an option with a value.
    pub const fn value(
        key: &'static str,
        form: &'static str,
        default: &'static str,
        about: &'static str,
    ) -> OptionRow {
        OptionRow { key, form, default, about }
    }

    /// Returns the option with the form of its value: `direct=on|off|auto`, `ro`.
    pub fn usage(&self) -> String {
        if self.form.is_empty() { self.key.to_owned() } else { format!("{}={}", self.key, self.form) }
    }

    /// Returns the purpose, followed by the default in brackets if the option has one.
    pub fn about_with_default(&self) -> String {
        if self.default.is_empty() {
            self.about.to_owned()
        } else {
            format!("{} [{}]", self.about, self.default)
        }
    }

    /// Returns the completions of the option in a shell: `key` for a flag, `key=word` for each fixed word,
    /// and `key=` where the value is free.
    pub fn completions(&self) -> Vec<String> {
        if self.form.is_empty() {
            return vec![self.key.to_owned()];
        }
        let is_fixed =
            |word: &&str| !word.is_empty() && !word.contains(|c: char| c.is_ascii_uppercase() || c == '.');
        let forms: Vec<&str> = self.form.split('|').collect();
        let fixed = forms.iter().filter(|word| is_fixed(word));
        let mut all: Vec<String> = fixed.map(|word| format!("{}={word}", self.key)).collect();
        if all.len() < forms.len() {
            all.push(format!("{}=", self.key));
        }
        all
    }
}

/// A row by its key, as [`Options`](crate::Options) knows the options of a kind: with or without a description.
pub trait Key {
    /// The key.
    fn key(&self) -> &'static str;
}

impl Key for OptionRow {
    fn key(&self) -> &'static str {
        self.key
    }
}

impl Key for &'static str {
    fn key(&self) -> &'static str {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_is_completed_by_its_fixed_words() {
        let completions = |form| OptionRow::value("key", form, "", "about").completions();
        assert_eq!(OptionRow::flag("ro", "read-only").completions(), ["ro"]);
        assert_eq!(completions("on|off"), ["key=on", "key=off"]);
        assert_eq!(completions("off|TIME"), ["key=off", "key="]);
        assert_eq!(completions("SIZE"), ["key="]);
        assert_eq!(completions("512..64K"), ["key="]);
    }

    #[test]
    fn help_shows_the_form_and_the_default() {
        let row = OptionRow::value("irqmode", "none|timer", "none", "when requests complete");
        assert_eq!(row.usage(), "irqmode=none|timer");
        assert_eq!(row.about_with_default(), "when requests complete [none]");
    }
}
