//! dmsetup's `-S`: selects devices by their fields: `open=0 && name=~"^vg-"`.
//!
//! `=`, `!=`, and for numbers `<`, `<=`, `>`, `>=`; `=~` and `!~` for regular expressions; `&&` or `,`, `||`
//! or `#`, `!( )`, parentheses. Errors have dmsetup's text. All fields are texts or numbers, so dmsetup's
//! operators for lists, sizes and times are not supported.

use super::Refusal;
use regex_automata::nfa::thompson::pikevm::PikeVM;

/// A field: its name, and whether it is a number.
pub(super) type Field = (&'static str, bool);

/// A selection criterion.
pub(super) enum Selection {
    /// Matches every device.
    All,
    Any(Vec<Selection>),
    Every(Vec<Selection>),
    Not(Box<Selection>),
    Text {
        field: &'static str,
        is: bool,
        value: String,
    },
    Number {
        field: &'static str,
        comparison: Comparison,
        value: u64,
    },
    Pattern {
        field: &'static str,
        is: bool,
        pattern: Box<PikeVM>,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    AtLeast,
    More,
    AtMost,
    Less,
}

impl Selection {
    /// Returns whether a device matches; `value` returns the value of a field.
    pub(super) fn matches(&self, value: &dyn Fn(&str) -> String) -> bool {
        match self {
            Selection::All => true,
            Selection::Any(parts) => parts.iter().any(|part| part.matches(value)),
            Selection::Every(parts) => parts.iter().all(|part| part.matches(value)),
            Selection::Not(part) => !part.matches(value),
            Selection::Text { field, is, value: wanted } => (value(field) == *wanted) == *is,
            Selection::Pattern { field, is, pattern } => {
                pattern.is_match(&mut pattern.create_cache(), value(field).as_bytes()) == *is
            }
            Selection::Number { field, comparison, value: wanted } => {
                let order = value(field).parse().unwrap_or(0).cmp(wanted);
                match comparison {
                    Comparison::Equal => order.is_eq(),
                    Comparison::NotEqual => order.is_ne(),
                    Comparison::AtLeast => order.is_ge(),
                    Comparison::More => order.is_gt(),
                    Comparison::AtMost => order.is_le(),
                    Comparison::Less => order.is_lt(),
                }
            }
        }
    }
}

/// Parses a selection.
pub(super) fn parse(text: &str, fields: &[Field]) -> Result<Selection, Refusal> {
    let mut reader = Reader { rest: text.trim(), fields, depth: 0 };
    if reader.rest.is_empty() {
        return Ok(Selection::All);
    }
    let selection = reader.any()?;
    if reader.rest.is_empty() { Ok(selection) } else { Err(wrong(None, reader.rest)) }
}

/// Deepest nesting of parentheses.
const DEPTH_MAX: usize = 64;

struct Reader<'a> {
    rest: &'a str,
    fields: &'a [Field],
    /// Open parentheses before `rest`.
    depth: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, word: &str) -> bool {
        let Some(rest) = self.rest.strip_prefix(word) else { return false };
        self.rest = rest.trim_start();
        true
    }

    fn any(&mut self) -> Result<Selection, Refusal> {
        let mut parts = vec![self.every()?];
        while self.take("||") || self.take("#") {
            parts.push(self.every()?);
        }
        Ok(Selection::Any(parts))
    }

    fn every(&mut self) -> Result<Selection, Refusal> {
        let mut parts = vec![self.part()?];
        while self.take("&&") || self.take(",") {
            parts.push(self.part()?);
        }
        Ok(Selection::Every(parts))
    }

    fn part(&mut self) -> Result<Selection, Refusal> {
        let is_not = !self.rest.starts_with("!=") && !self.rest.starts_with("!~") && self.take("!");
        if !self.take("(") {
            if is_not {
                let why = format!("Syntax error: left parenthesis expected at '{}'", self.rest);
                return Err(Refusal::without_footer(vec![why]));
            }
            return self.comparison();
        }
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(wrong(Some("Too many parentheses"), self.rest));
        }
        let inner = self.any()?;
        self.depth -= 1;
        if !self.take(")") {
            let why = format!("Syntax error: right parenthesis expected at '{}'", self.rest);
            return Err(Refusal::without_footer(vec![why]));
        }
        Ok(if is_not { Selection::Not(Box::new(inner)) } else { inner })
    }

    fn comparison(&mut self) -> Result<Selection, Refusal> {
        let at = self.rest;
        let end = at.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(at.len());
        let name = &at[..end];
        if name.is_empty() {
            return Err(wrong(Some("Expecting field name"), at));
        }
        let Some(&(field, is_number)) = self.fields.iter().find(|(field, _)| *field == name) else {
            return Err(wrong(Some(&format!("Unrecognised selection field: {name}")), at));
        };
        self.rest = at[end..].trim_start();
        let signs = ["=~", "!~", "!=", ">=", "<=", "=", ">", "<"];
        let Some(sign) = signs.into_iter().find(|sign| self.take(sign)) else {
            return Err(wrong(Some("Expecting a comparison operator"), at));
        };
        let value = self.value(at)?;
        let numeric = || {
            let why = format!("Failed to parse numeric value for selection field {field}.");
            value.parse().map_err(|_| wrong(Some(&why), at))
        };
        let number = |comparison| Ok(Selection::Number { field, comparison, value: numeric()? });
        match sign {
            "=~" | "!~" => {
                let pattern = PikeVM::new(&value).map_err(|_| {
                    wrong(Some(&format!("Failed to parse regex value for selection field {field}.")), at)
                })?;
                Ok(Selection::Pattern { field, is: sign == "=~", pattern: Box::new(pattern) })
            }
            "=" if is_number => number(Comparison::Equal),
            "!=" if is_number => number(Comparison::NotEqual),
            ">=" if is_number => number(Comparison::AtLeast),
            ">" if is_number => number(Comparison::More),
            "<=" if is_number => number(Comparison::AtMost),
            "<" if is_number => number(Comparison::Less),
            "=" | "!=" => Ok(Selection::Text { field, is: sign == "=", value }),
            _ => Err(wrong(Some(&format!("Operator {sign} is not for the text field {field}")), at)),
        }
    }

    /// Parses a value: quoted, or up to a space or operator.
    fn value(&mut self, at: &str) -> Result<String, Refusal> {
        let rest = self.rest;
        if let Some(quote) = rest.chars().next().filter(|c| matches!(c, '\'' | '"')) {
            let Some((value, rest)) = rest[1..].split_once(quote) else {
                return Err(wrong(Some("Failed to find the end of a quoted value"), at));
            };
            self.rest = rest.trim_start();
            return Ok(value.to_owned());
        }
        let ends = |&(at, c): &(usize, char)| {
            let next = &rest[at..];
            c.is_whitespace() || ",#)".contains(c) || next.starts_with("&&") || next.starts_with("||")
        };
        let end = rest.char_indices().find(ends).map_or(rest.len(), |(at, _)| at);
        self.rest = rest[end..].trim_start();
        Ok(rest[..end].to_owned())
    }
}

fn wrong(why: Option<&str>, at: &str) -> Refusal {
    let mut lines: Vec<String> = why.map(str::to_owned).into_iter().collect();
    lines.push(format!("Selection syntax error at '{at}'."));
    lines.push("Use 'help' for selection to get more help.".to_owned());
    Refusal::without_footer(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: [Field; 3] = [("name", false), ("uuid", false), ("open", true)];

    fn matches(text: &str, name: &str, open: &str) -> bool {
        let value = |field: &str| match field {
            "name" => name.to_owned(),
            "open" => open.to_owned(),
            _ => String::new(),
        };
        parse(text, &FIELDS).unwrap_or_else(|why| panic!("{text}: {why:?}")).matches(&value)
    }

    #[test]
    fn devices_are_selected_by_fields() {
        for (text, is) in [
            ("", true),
            ("name=b", true),
            ("name='b'", true),
            ("name=\"b\"", true),
            ("name!=b", false),
            ("!(name=b)", false),
            ("name=~^b$", true),
            ("name!~o$", true),
            ("name=b && open>=2", true),
            ("name=b,open>2", false),
            ("name=x||name=b", true),
            ("name=x#name=b", true),
            ("(name=x || name=b) && open=2", true),
            ("name=b || name=x && open=9", true),
            ("open<3 && open<=2 && open!=1 && open>1", true),
            ("uuid=", true),
            ("uuid=\"\"", true),
            ("name=", false),
        ] {
            assert_eq!(matches(text, "b", "2"), is, "{text}");
        }
    }

    #[test]
    fn selection_errors_have_dmsetups_text() {
        let error = |text: &str| parse(text, &FIELDS).err().map(|why| why.0.join("\n")).unwrap_or_default();
        assert_eq!(error("!name=b"), "Syntax error: left parenthesis expected at 'name=b'");
        assert_eq!(error("(name=b"), "Syntax error: right parenthesis expected at ''");
        let at = |at: &str| {
            format!("Selection syntax error at '{at}'.\nUse 'help' for selection to get more help.")
        };
        assert_eq!(error("=b"), format!("Expecting field name\n{}", at("=b")));
        assert_eq!(error("name=b &&"), format!("Expecting field name\n{}", at("")));
        let numeric = "Failed to parse numeric value for selection field open.";
        assert_eq!(error("open=x"), format!("{numeric}\n{}", at("open=x")));
        for text in ["nosuch=1", "name", "name>b", "name=~(", "name='b", "name=b name=c"] {
            assert!(error(text).contains("Selection syntax error at '"), "{text}: {}", error(text));
        }
        let deep = format!("{}name=b", "(".repeat(1000));
        assert!(error(&deep).contains("Too many parentheses"));
        let deep = |depth: usize| format!("{}name=b{}", "(".repeat(depth), ")".repeat(depth));
        assert_eq!(error(&deep(DEPTH_MAX)), "");
        assert!(error(&deep(DEPTH_MAX + 1)).contains("Too many parentheses"));
    }

    #[test]
    fn only_nested_parentheses_count() {
        let siblings = format!("{}(name=b)", "(name=a)||".repeat(200));
        assert!(matches(&siblings, "b", "2"));
        let quoted = format!("(name!='{}')", "(".repeat(200));
        assert!(matches(&quoted, "b", "2"));
    }
}
