//! `./x bench report`: the measurements of five published texts on virtual block devices, repeated on this machine.
//!
//! The report runs the other measurements as programs of their own ([`parts`]), reads their figures ([`results`]),
//! and writes one page as HTML, Markdown and JSON. A part whose figures exist and were measured with the options
//! of this run is not measured again, so an interrupted run continues where it stopped.
//! [`tables`] lists the published results, and which figures are compared with each other.

mod compare;
mod html;
mod markdown;
mod parts;
mod results;
mod statistics;
mod tables;

pub(crate) use compare::main as compare;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::options::command;
use parts::PARTS;
use results::Results;

const USAGE: &str = "\
usage: ./x bench report [OPTIONS]
  --quick          two rounds of a second: about ten minutes instead of an hour
  --parts A,B      of: memory, workers, disk, fabrics, servers, multipath, paths, limits, splits (all)
  --spdk PATH      compare with SPDK: its folder after a build with ublk, or the program spdk_tgt
  --out DIR        where report.html, report.md and report.json go (target/bench/report)
  --fresh          measure all parts again
  --no-guest       leave out what needs another kernel
";

struct Options {
    quick: bool,
    fresh: bool,
    out: PathBuf,
    parts: Vec<&'static parts::Part>,
    /// The program that boots a guest: `./x`.
    guest: Option<PathBuf>,
    /// SPDK's target, `spdk_tgt`.
    spdk: Option<PathBuf>,
}

pub(crate) fn main(arguments: &[String]) -> ExitCode {
    command("report", USAGE, arguments, parse, run)
}

fn parse(arguments: &[String]) -> Result<Options> {
    let mut options = Options {
        quick: false,
        fresh: false,
        out: "target/bench/report".into(),
        parts: PARTS.iter().collect(),
        guest: std::env::var_os("BLOCKYARD_X").map(PathBuf::from),
        spdk: None,
    };
    let mut arguments = arguments.iter();
    while let Some(word) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| Error(format!("{word} needs a value")));
        match word.as_str() {
            "--quick" => options.quick = true,
            "--fresh" => options.fresh = true,
            "--no-guest" => options.guest = None,
            "--out" => options.out = value()?.into(),
            "--spdk" => options.spdk = Some(spdk_target(Path::new(value()?))?),
            "--parts" => {
                options.parts = crate::options::chosen(word, value()?, &options.parts, |part| part.name)?;
            }
            _ => return Err(Error(format!("no such option: {word}"))),
        }
    }
    Ok(options)
}

/// Returns the path of `spdk_tgt`, from that of the program or of SPDK's folder.
fn spdk_target(path: &Path) -> Result<PathBuf> {
    let program = if path.is_dir() { path.join("build/bin/spdk_tgt") } else { path.to_owned() };
    let program = program.canonicalize().map_err(Error::at(&program))?;
    if program.file_name().is_some_and(|name| name == "spdk_tgt") && program.is_file() {
        return Ok(program);
    }
    Err(Error(format!("--spdk {}: not SPDK's folder, and not its program spdk_tgt", path.display())))
}

fn run(options: &Options) -> Result<()> {
    std::fs::create_dir_all(&options.out).map_err(Error::at(&options.out))?;
    let mut results = Results::of_this_machine(options.quick);
    let began = Instant::now();
    let mut failed = Vec::new();
    for (number, part) in options.parts.iter().enumerate() {
        let left: u64 = options.parts[number..].iter().map(|part| part.seconds(options.quick)).sum();
        let of = options.parts.len();
        eprintln!("part {} of {of}, {}: about {} min left", number + 1, part.name, left.div_ceil(60));
        match part.figures(options) {
            Ok((figures, left_out)) => results.add(part.name, figures, left_out),
            Err(error) => {
                eprintln!("part {} failed: {}", part.name, error.0);
                results.errors.push((part.name.to_owned(), error.0));
                failed.push(part.name);
            }
        }
        // An interrupted run leaves a page of what was measured.
        write(&options.out, &results)?;
    }
    eprintln!("{} in {} s", options.out.join("report.html").display(), began.elapsed().as_secs());
    if failed.is_empty() { Ok(()) } else { Err(Error(format!("not measured: {}", failed.join(", ")))) }
}

fn write(folder: &Path, results: &Results) -> Result<()> {
    let json = serde_json::to_string_pretty(&results.to_json()).map_err(|error| Error(error.to_string()))?;
    for (name, text) in
        [("report.json", json), ("report.md", markdown::page(results)), ("report.html", html::page(results))]
    {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(Error::at(&path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn parts_are_selected_and_bad_options_refused() {
        let options = parsed("--quick --parts memory,paths --out /tmp/x").expect("valid");
        assert!(options.quick && options.parts.len() == 2);
        for line in ["--parts none", "--out", "--speed 1", "--spdk", "--spdk /no/such", "--spdk /bin/sh"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }

    #[test]
    fn spdk_is_found_in_its_folder_or_by_its_program() {
        let folder = std::env::temp_dir().join(format!("blockyard-spdk-{}", std::process::id()));
        let program = folder.join("build/bin/spdk_tgt");
        assert!(spdk_target(&folder).is_err());
        std::fs::create_dir_all(program.parent().unwrap()).unwrap();
        assert!(spdk_target(&folder).is_err(), "it is not built");
        std::fs::write(&program, "").unwrap();
        let whole = program.canonicalize().unwrap();
        assert_eq!(spdk_target(&folder).expect("its folder"), whole);
        assert_eq!(spdk_target(&program).expect("its program"), whole);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_quick_run_takes_about_ten_minutes_and_a_full_one_an_hour() {
        let total = |quick| PARTS.iter().map(|part| part.seconds(quick)).sum::<u64>();
        assert!((300..=720).contains(&total(true)), "{} s", total(true));
        assert!((1500..=4200).contains(&total(false)), "{} s", total(false));
    }
}
