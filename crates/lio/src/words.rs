//! The command line of configshell: `[PATH] [COMMAND] [VALUE | KEY=VALUE]…`.
//!
//! configshell has no quotes, and ignores the rest of a line from the first character that it cannot parse.
//! Here `'…'` and `"…"` can contain spaces, and `\"` inside `"…"` is `"`.

/// A parsed command line.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Line {
    /// The path of the node that runs the command; `None`: the current node.
    pub path: Option<String>,
    /// Whether the path ended with `*`: the command runs at every child of the node.
    pub for_children: bool,
    /// The command; `None`: the line is empty or has only a path.
    pub command: Option<String>,
    /// Values without a key, in order.
    pub positional: Vec<String>,
    /// Values with a key, in order; the last value of a key counts.
    pub keywords: Vec<(String, String)>,
}

/// A word, and the length of its part before the first quote.
struct Word {
    text: String,
    plain_len: usize,
}

/// Why a line cannot be parsed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unterminated quote: {0}")]
pub struct Unterminated(String);

/// Splits a line into words at spaces and tabs outside quotes.
fn words(line: &str) -> Result<Vec<Word>, Unterminated> {
    let mut words = Vec::new();
    let mut chars = line.chars().peekable();
    while let Some(&first) = chars.peek() {
        if first.is_whitespace() {
            chars.next();
            continue;
        }
        let (mut text, mut plain_len) = (String::new(), None);
        while let Some(&c) = chars.peek() {
            if c.is_whitespace() {
                break;
            }
            chars.next();
            if c != '\'' && c != '"' {
                text.push(c);
                continue;
            }
            plain_len.get_or_insert(text.len());
            loop {
                match chars.next() {
                    None => return Err(Unterminated(line.to_owned())),
                    Some(end) if end == c => break,
                    Some('\\') if c == '"' && matches!(chars.peek(), Some('"' | '\\')) => {
                        text.extend(chars.next());
                    }
                    Some(inner) => text.push(inner),
                }
            }
        }
        let plain_len = plain_len.unwrap_or(text.len());
        words.push(Word { text, plain_len });
    }
    Ok(words)
}

fn is_path(word: &Word) -> bool {
    let plain = word.text.get(..word.plain_len).unwrap_or_default();
    let before = plain.split('/').next().unwrap_or_default();
    matches!(word.text.as_str(), "." | ".." | "*")
        || word.text.starts_with('@')
        || plain.contains('/') && !before.contains('=')
}

fn is_command(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Splits `key=value`.
fn keyword(word: &Word) -> Option<(&str, &str)> {
    let (key, value) = word.text.split_once('=')?;
    let is_key = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    (is_key && key.len() < word.plain_len).then_some((key, value))
}

/// Parses a line. A line that begins with `#` is empty.
///
/// # Errors
/// A quote is not closed.
pub fn parse(line: &str) -> Result<Line, Unterminated> {
    let mut parsed = Line::default();
    if line.trim_start().starts_with('#') {
        return Ok(parsed);
    }
    let mut words = words(line)?.into_iter().peekable();
    if let Some(word) = words.next_if(is_path) {
        let path = match word.text.strip_suffix('*') {
            Some(path) => {
                parsed.for_children = true;
                path
            }
            None => &word.text,
        };
        parsed.path = Some(path.to_owned());
    }
    // As in configshell, a word that cannot be a command is a value.
    parsed.command = words.next_if(|word| is_command(&word.text)).map(|word| word.text);
    while let Some(word) = words.next() {
        if let Some((key, value)) = keyword(&word) {
            parsed.keywords.push((key.to_owned(), value.to_owned()));
        } else if words.peek().is_some_and(|next| next.text == "=" && next.plain_len == 1)
            && is_command(&word.text)
        {
            words.next();
            let value = words.next().map(|word| word.text).unwrap_or_default();
            parsed.keywords.push((word.text, value));
        } else {
            parsed.positional.push(word.text);
        }
    }
    Ok(parsed)
}

/// The parameters of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Signature {
    /// Required parameters.
    pub required: &'static [&'static str],
    /// Optional parameters, in the order after the required ones.
    pub optional: &'static [&'static str],
    /// The name of additional values, if they are permitted.
    pub values: Option<&'static str>,
    /// The name of additional keys, if they are permitted.
    pub keys: Option<&'static str>,
}

impl Signature {
    /// No parameters.
    pub const NONE: Signature = Signature { required: &[], optional: &[], values: None, keys: None };

    /// Returns all named parameters, in order.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + Clone + use<> {
        self.required.iter().chain(self.optional).copied()
    }
}

/// The values of a command's parameters.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Arguments {
    named: Vec<(&'static str, String)>,
    /// Additional values.
    pub values: Vec<String>,
    /// Additional keys and their values, each key once.
    pub keys: Vec<(String, String)>,
}

impl Arguments {
    /// Returns the value of a parameter.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str())
    }

    /// Returns the value of a required parameter, which [`bind`] has checked.
    pub fn required(&self, name: &str) -> &str {
        self.get(name).unwrap_or_default()
    }
}

/// Assigns values to parameters, with configshell's checks and messages.
///
/// # Errors
/// The message: a parameter is missing, unknown, given twice, or there are too many values.
pub fn bind(signature: &Signature, line: &Line) -> Result<Arguments, String> {
    let names: Vec<&'static str> = signature.names().collect();
    let mut keywords: Vec<(&str, &str)> = Vec::new();
    for (key, value) in &line.keywords {
        match keywords.iter_mut().find(|(known, _)| known == key) {
            Some(known) => known.1 = value,
            None => keywords.push((key, value)),
        }
    }
    let is_given = |name: &str| keywords.iter().any(|(key, _)| *key == name);
    let left = names.iter().skip(line.positional.len());
    let mut missing: Vec<&str> =
        left.filter(|name| signature.required.contains(name) && !is_given(name)).copied().collect();
    missing.sort_unstable();
    match missing.as_slice() {
        [] => {}
        [one] => return Err(format!("Missing required parameter {one}")),
        all => return Err(format!("Missing required parameters {}", quoted(all))),
    }
    if signature.keys.is_none() {
        let mut unexpected: Vec<&str> =
            keywords.iter().map(|(key, _)| *key).filter(|key| !names.contains(key)).collect();
        unexpected.sort_unstable();
        match unexpected.as_slice() {
            [] => {}
            [one] => return Err(format!("Unexpected keyword parameter '{one}'.")),
            all => return Err(format!("Unexpected keyword parameters {}.", quoted(all))),
        }
    }
    if let Some(twice) = names.iter().take(line.positional.len()).find(|name| is_given(name)) {
        return Err(format!("Duplicate parameter {twice}."));
    }
    let standard = line.positional.len() + keywords.iter().filter(|(key, _)| names.contains(key)).count();
    if standard > names.len() && signature.values.is_none() {
        let expected = if signature.optional.is_empty() { "exactly" } else { "at most" };
        return Err(format!("Got {standard} positionnal parameters, expected {expected} {}.", names.len()));
    }
    let mut arguments = Arguments::default();
    for (index, value) in line.positional.iter().enumerate() {
        match names.get(index) {
            Some(name) => arguments.named.push((name, value.clone())),
            None => arguments.values.push(value.clone()),
        }
    }
    for (key, value) in keywords {
        match names.iter().find(|name| **name == key) {
            Some(name) => arguments.named.push((name, value.to_owned())),
            None => arguments.keys.push((key.to_owned(), value.to_owned())),
        }
    }
    Ok(arguments)
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(line: &str) -> Line {
        parse(line).expect("it parses")
    }

    fn strings(arguments: &[&str]) -> Vec<String> {
        arguments.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_line_has_path_command_and_values() {
        let line = parsed("/backstores/fileio create name=disk file_or_dev=/a,b 10G");
        assert_eq!(line.path.as_deref(), Some("/backstores/fileio"));
        assert_eq!(line.command.as_deref(), Some("create"));
        assert_eq!(line.positional, ["10G"]);
        assert_eq!(line.keywords.len(), 2);
        let bare = parsed("create /backstores/fileio/disk");
        assert_eq!((bare.path, bare.command.as_deref()), (None, Some("create")));
        assert_eq!(bare.positional, ["/backstores/fileio/disk"]);
        let name = parsed("iscsi/ create iqn.2003-01.org.linux-iscsi.host.x8664:sn.1");
        assert_eq!(name.positional, ["iqn.2003-01.org.linux-iscsi.host.x8664:sn.1"]);
    }

    #[test]
    fn paths_end_with_a_star_for_all_children() {
        assert_eq!(
            parsed("* status"),
            Line {
                path: Some(String::new()),
                for_children: true,
                command: Some("status".to_owned()),
                ..Line::default()
            }
        );
        assert!(parsed("/iscsi/* ls").for_children && parsed("..").path.is_some());
        assert_eq!(parsed(""), Line::default());
        assert_eq!(parsed("# ls /"), Line::default());
    }

    #[test]
    fn quotes_hold_spaces_and_hide_keys() {
        let line = parsed(r#"set auth password="a b" 'x=y' "c\"d""#);
        assert_eq!(line.keywords, [("password".to_owned(), "a b".to_owned())]);
        assert_eq!(line.positional, strings(&["auth", "x=y", "c\"d"]));
        assert!(parse("create 'a").is_err());
    }

    #[test]
    fn a_key_without_value_is_empty_and_an_equals_sign_may_have_spaces() {
        let line = parsed("set auth userid= password=x");
        assert_eq!(line.keywords, [("userid".into(), String::new()), ("password".into(), "x".into())]);
        assert_eq!(parsed("create name = disk").keywords, [("name".into(), "disk".into())]);
    }

    const CREATE: Signature =
        Signature { required: &["name", "dev"], optional: &["size"], values: None, keys: None };

    #[test]
    fn binding_fails_as_in_configshell() {
        let fails = |text: &str| bind(&CREATE, &parsed(text)).expect_err("refused");
        assert_eq!(fails("create"), "Missing required parameters 'dev', 'name'");
        assert_eq!(fails("create a"), "Missing required parameter dev");
        assert_eq!(fails("create a b x=1"), "Unexpected keyword parameter 'x'.");
        assert_eq!(fails("create a b x=1 q=2"), "Unexpected keyword parameters 'q', 'x'.");
        assert_eq!(fails("create a b name=c"), "Duplicate parameter name.");
        assert_eq!(fails("create a b c d"), "Got 4 positionnal parameters, expected at most 3.");
        let none = bind(&Signature::NONE, &parsed("pwd x")).expect_err("refused");
        assert_eq!(none, "Got 1 positionnal parameters, expected exactly 0.");
    }

    #[test]
    fn values_may_mix_with_keys() {
        let bound = bind(&CREATE, &parsed("create disk size=1G dev=/x")).expect("it binds");
        assert_eq!(
            (bound.required("name"), bound.required("dev"), bound.get("size")),
            ("disk", "/x", Some("1G"))
        );
    }

    proptest! {
        #[test]
        fn parsing_never_panics(line in "\\PC{0,80}") {
            if let Ok(line) = parse(&line) {
                let _ = bind(&CREATE, &line);
            }
        }

        #[test]
        fn what_is_put_together_is_taken_apart(
            path in proptest::option::of("/[a-z0-9.:/-]{0,20}"),
            command in "[a-z_]{1,8}",
            values in proptest::collection::vec("[a-z0-9/.:,-]{1,12}", 0..4),
            keys in proptest::collection::btree_map("[a-z_]{1,6}", "[a-zA-Z0-9/.:=,-]{0,10}", 0..4),
        ) {
            let mut text = path.clone().unwrap_or_default();
            text = format!("{text} {command}");
            values.iter().for_each(|value| text += &format!(" {value}"));
            keys.iter().for_each(|(key, value)| text += &format!("  {key}={value}"));
            let line = parsed(&text);
            prop_assert_eq!(line.path, path);
            prop_assert_eq!(line.command, Some(command));
            prop_assert_eq!(line.positional, values);
            prop_assert_eq!(line.keywords, keys.into_iter().collect::<Vec<_>>());
        }
    }
}
