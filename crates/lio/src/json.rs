//! JSON as rtslib writes `saveconfig.json`: sorted keys, two spaces of indentation, ASCII only
//! (`json.dump(sort_keys=True, indent=2)`).

use serde_json::Value;
use std::fmt::Write;

/// Returns a value as text in rtslib's format, with a final line feed.
pub fn text(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value, 0);
    out.push('\n');
    out
}

fn write_value(out: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Array(items) if items.is_empty() => out.push_str("[]"),
        Value::Object(map) if map.is_empty() => out.push_str("{}"),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                line(out, index, depth + 1);
                write_value(out, item, depth + 1);
            }
            end(out, depth, ']');
        }
        Value::Object(map) => {
            out.push('{');
            // Keys are sorted here: the order of the map depends on features of serde_json that another
            // crate may enable.
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by(|a, b| a.0.cmp(b.0));
            for (index, (key, value)) in entries.into_iter().enumerate() {
                line(out, index, depth + 1);
                write_text(out, key);
                out.push_str(": ");
                write_value(out, value, depth + 1);
            }
            end(out, depth, '}');
        }
        Value::String(text) => write_text(out, text),
        // Numbers, true, false and null have the same text in JSON and in Python's output.
        plain => {
            let _ = write!(out, "{plain}");
        }
    }
}

fn line(out: &mut String, index: usize, depth: usize) {
    out.push_str(if index == 0 { "\n" } else { ",\n" });
    out.extend(std::iter::repeat_n("  ", depth));
}

fn end(out: &mut String, depth: usize, bracket: char) {
    out.push('\n');
    out.extend(std::iter::repeat_n("  ", depth));
    out.push(bracket);
}

/// Writes a string with Python's escapes: everything beyond ASCII as UTF-16 code units.
fn write_text(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(c),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_is_as_python_writes_it() {
        let value = json!({ "b": [1, "ü😀\n\u{7f}"], "a": { "z": null, "y": true }, "e": [], "f": {} });
        let expected = "{\n  \"a\": {\n    \"y\": true,\n    \"z\": null\n  },\n  \"b\": [\n    1,\n    \
                        \"\\u00fc\\ud83d\\ude00\\n\\u007f\"\n  ],\n  \"e\": [],\n  \"f\": {}\n}\n";
        assert_eq!(text(&value), expected);
    }
}
