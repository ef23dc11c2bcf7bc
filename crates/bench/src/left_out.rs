//! Subjects that a measurement left out, with the reason: a file beside its CSV, which `./x bench report` reads.

use std::path::Path;

use crate::error::{Error, Result};

/// Name of a subject, and why it has no figures, or no more of them.
pub(crate) type LeftOut = (String, String);

/// Writes the list beside the CSV file `csv`: a line for each subject, its name and the reason.
pub(crate) fn write(csv: &Path, list: &[LeftOut]) -> Result<()> {
    let path = csv.with_extension("left-out");
    let line = |(name, why): &LeftOut| format!("{name}\t{}\n", one_line(why));
    std::fs::write(&path, list.iter().map(line).collect::<String>()).map_err(Error::at(&path))
}

/// Parses the list of [`write`].
pub(crate) fn parse(text: &str) -> Vec<LeftOut> {
    let line = |line: &str| line.split_once('\t').map(|(name, why)| (name.to_owned(), why.to_owned()));
    text.lines().filter_map(line).collect()
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_reads_back_with_reasons_on_one_line() {
        let csv = std::env::temp_dir().join(format!("blockyard-left-out-{}.csv", std::process::id()));
        write(&csv, &[("tgtd-file".into(), "tgtd: not\n\tinstalled".into())]).unwrap();
        let path = csv.with_extension("left-out");
        let list = parse(&std::fs::read_to_string(&path).unwrap());
        assert_eq!(list, [("tgtd-file".to_owned(), "tgtd: not installed".to_owned())]);
        std::fs::remove_file(path).unwrap();
    }
}
