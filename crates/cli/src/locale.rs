//! The terminal's character encoding, from the environment.

/// Whether the first of `LC_ALL`, `LC_CTYPE` and `LANG` that is set selects UTF-8.
pub(crate) fn is_utf8_in(variable: impl Fn(&str) -> Option<String>) -> bool {
    let set = |name| variable(name).filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
    let locale = locale.to_ascii_uppercase();
    locale.contains("UTF-8") || locale.contains("UTF8")
}

/// Whether this process's environment selects UTF-8.
pub(crate) fn is_utf8() -> bool {
    is_utf8_in(|name| std::env::var(name).ok())
}
