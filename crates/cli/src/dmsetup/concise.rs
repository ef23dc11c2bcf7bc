//! dmsetup's concise format of devices: `NAME,UUID,MINOR,FLAGS,TABLE[,TABLE…][;NAME…]`, as `table --concise`
//! writes it and `create --concise` reads it.
//!
//! A backslash escapes the next character. The minor number is parsed and ignored: a device has the numbers
//! of its export.

use super::{Refusal, TableDevice};

/// One device of a concise text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Concise {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) read_only: bool,
    /// Table lines.
    pub(super) table: String,
}

/// Parses all devices of a text.
pub(super) fn parse(text: &str) -> Result<Vec<Concise>, Refusal> {
    let text = text.trim_matches(['\n', ' ']);
    if text.is_empty() {
        return Ok(Vec::new());
    }
    split(text, ';').iter().map(|entry| one(entry)).collect()
}

fn one(entry: &str) -> Result<Concise, Refusal> {
    let fields: Vec<String> = split(entry, ',').iter().map(|field| plain(field)).collect();
    let [name, uuid, minor, flags, table @ ..] = fields.as_slice() else {
        return Err(incomplete(&fields));
    };
    if table.is_empty() {
        return Err(incomplete(&fields));
    }
    if !minor.is_empty() && minor.parse::<u32>().is_err() {
        return Err(Refusal::of(format!("Invalid minor number '{minor}'.")));
    }
    let read_only = match flags.as_str() {
        "" | "rw" => false,
        "ro" => true,
        _ => {
            let why = format!("Invalid flags parameter '{flags}' must be 'ro' or 'rw' or empty.");
            return Err(Refusal::of(why));
        }
    };
    let table = table.iter().map(|line| format!("{}\n", line.trim())).collect();
    Ok(Concise { name: name.trim().to_owned(), uuid: uuid.clone(), read_only, table })
}

fn incomplete(fields: &[String]) -> Refusal {
    let field = |number: usize| fields.get(number).map_or("(null)", String::as_str);
    Refusal(
        vec![
            "Incomplete entry: five comma-separated fields are required for each device".to_owned(),
            format!(
                "Parsed {} fields: name: {} uuid: {} minor: {} flags: {} table: {}",
                fields.len(),
                field(0),
                field(1),
                field(2),
                field(3),
                field(4)
            ),
        ],
        true,
    )
}

/// Splits text at unescaped characters `at`. Escapes stay.
fn split(text: &str, at: char) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == at {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push(c);
            if c == '\\' {
                part.extend(chars.next());
            }
        }
    }
    parts
}

/// Removes escapes.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        out.extend(if c == '\\' { chars.next() } else { Some(c) });
    }
    out
}

fn escaped(text: &str) -> String {
    let special = |c| matches!(c, ',' | ';' | '\\');
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

/// Formats devices in one line.
pub(super) fn text(devices: &[(TableDevice, u32)]) -> String {
    let device = |((answer, info), minor): &(TableDevice, u32)| {
        let flags = if answer.info.read_only { "ro" } else { "rw" };
        let mut text = format!("{},{},{minor},{flags}", escaped(&info.name), escaped(&answer.info.uuid));
        for target in &answer.targets {
            let line = format!("{} {} {} {}", target.start, target.len, target.kind, target.params);
            text += &format!(",{}", escaped(&line));
        }
        text
    };
    devices.iter().map(device).collect::<Vec<_>>().join(";")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concise_text_holds_devices_with_several_targets() {
        let found = parse("c1,CU1,,rw,0 8 zero, 8 8 error;c\\,2,,9,ro,0 8 linear a\\;b 0\n").unwrap();
        let c1 = Concise {
            name: "c1".into(),
            uuid: "CU1".into(),
            read_only: false,
            table: "0 8 zero\n8 8 error\n".into(),
        };
        let c2 = Concise {
            name: "c,2".into(),
            uuid: String::new(),
            read_only: true,
            table: "0 8 linear a;b 0\n".into(),
        };
        assert_eq!(found, [c1, c2]);
        assert_eq!(parse("\n").unwrap(), []);
    }

    #[test]
    fn errors_have_dmsetups_text() {
        let first = |text: &str| parse(text).unwrap_err().0.join("\n");
        assert_eq!(
            first("c3,,"),
            "Incomplete entry: five comma-separated fields are required for each device\n\
             Parsed 3 fields: name: c3 uuid:  minor:  flags: (null) table: (null)"
        );
        assert_eq!(first("c,,,xx,0 8 zero"), "Invalid flags parameter 'xx' must be 'ro' or 'rw' or empty.");
        assert!(first("c,,x,,0 8 zero").contains("minor"));
    }
}
