//! Files of the page, compiled into the program.

/// A file: its name below `/assets/`, its media type and its text.
pub(crate) struct Asset {
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) text: &'static str,
}

/// The HTML of the page.
pub(crate) const INDEX: &str = include_str!("../assets/index.html");
/// The HTML of the form that asks for the token.
pub(crate) const ENTRY: &str = include_str!("../assets/entry.html");

const SCRIPT: &str = "text/javascript; charset=utf-8";

macro_rules! asset {
    ($name:literal, $kind:expr) => {
        Asset { name: $name, kind: $kind, text: include_str!(concat!("../assets/", $name)) }
    };
}

const ASSETS: &[Asset] = &[
    asset!("style.css", "text/css; charset=utf-8"),
    asset!("icon.svg", "image/svg+xml"),
    asset!("app.js", SCRIPT),
    asset!("live.js", SCRIPT),
    asset!("token.js", SCRIPT),
    asset!("format.js", SCRIPT),
    asset!("dom.js", SCRIPT),
    asset!("range.js", SCRIPT),
    asset!("axis.js", SCRIPT),
    asset!("canvas.js", SCRIPT),
    asset!("charts.js", SCRIPT),
    asset!("heat.js", SCRIPT),
    asset!("scatter.js", SCRIPT),
    asset!("stack.js", SCRIPT),
    asset!("overview.js", SCRIPT),
    asset!("device.js", SCRIPT),
    asset!("facts.js", SCRIPT),
    asset!("actions.js", SCRIPT),
];

/// Returns the file of that name.
pub(crate) fn asset(name: &str) -> Option<&'static Asset> {
    ASSETS.iter().find(|asset| asset.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_that_a_file_names_exists() {
        let texts = ASSETS.iter().map(|asset| asset.text).chain([INDEX, ENTRY]);
        for text in texts {
            for named in text.split(['"', '\'']).filter_map(|word| word.strip_prefix("/assets/")) {
                assert!(asset(named).is_some(), "{named}");
            }
            for named in text.split(['"', '\'']).filter_map(|word| word.strip_prefix("./")) {
                assert!(asset(named).is_some(), "{named}");
            }
        }
    }

    #[test]
    fn nothing_is_loaded_from_other_servers_and_no_script_or_style_is_inline() {
        for text in ASSETS.iter().map(|asset| asset.text).chain([INDEX, ENTRY]) {
            let elsewhere = text.replace("http://www.w3.org/", "");
            assert!(!elsewhere.contains("http://") && !elsewhere.contains("https://"), "{text}");
            assert!(!text.contains(" style=\"") && !text.contains("<style") && !text.contains(" onclick="));
        }
    }
}
