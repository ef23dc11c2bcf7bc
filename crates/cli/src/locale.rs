//! What the environment says of the letters that a terminal shows.

/// Whether there are more than ASCII's: what the first of `LC_ALL`, `LC_CTYPE` and `LANG` that is set says.
pub(crate) fn is_utf8_in(variable: impl Fn(&str) -> Option<String>) -> bool {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
    let locale = locale.to_ascii_uppercase();
    locale.contains("UTF-8") || locale.contains("UTF8")
}

/// The same, of this process's own environment.
pub(crate) fn is_utf8() -> bool {
    is_utf8_in(|name| std::env::var(name).ok())
}
