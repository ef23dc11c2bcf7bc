//! The parts of the report: which measurement each runs, with which subjects and jobs, and where its figures are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Options;
use super::results::{Figure, parse_csv};
use crate::error::{Error, Result};

/// How a part is measured.
#[derive(Clone, Copy, Debug)]
enum How {
    /// `blockyard-bench WORDS`, which writes this file into the part's folder.
    Here { arguments: &'static [&'static str], file: &'static str },
    /// `./x bench ublk WORDS`, in a guest.
    Guest { arguments: &'static [&'static str] },
}

/// One part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Its name on the command line and in the JSON.
    pub(super) name: &'static str,
    how: How,
    /// Measurements of a round, and seconds that each takes besides the measured time.
    runs: u64,
    overhead_s: u64,
    /// Seconds before the first round.
    start_s: u64,
}

/// All parts, in the order of the report.
pub(super) const PARTS: &[Part] = &[
    Part {
        name: "memory",
        how: How::Here {
            arguments: &[
                "loop",
                "--subjects",
                "loop-buffered,loop-direct,ours,nbdfuse,qemu",
                "--jobs",
                "files-randrw,randread-64,read-64,randwrite-64,write-64",
            ],
            file: "loop.csv",
        },
        runs: 25,
        overhead_s: 1,
        start_s: 30,
    },
    Part {
        name: "disk",
        how: How::Here {
            arguments: &[
                "loop",
                "--subjects",
                "loop-buffered,loop-direct,ours-direct",
                "--jobs",
                "randread-psync-4,read-psync-4,randwrite-psync-4,write-psync-4",
            ],
            file: "loop.csv",
        },
        runs: 12,
        overhead_s: 1,
        start_s: 30,
    },
    Part {
        name: "fabrics",
        how: How::Guest {
            arguments: &[
                "--subjects",
                "loop-buffered,lio-fileio,lio-ramdisk,nbd-nbdkit,nbd-ram,rublk-loop,file,ram",
                "--jobs",
                "randrw-files,randread-1,randread-32,randwrite-32,read-128k",
            ],
        },
        runs: 40,
        overhead_s: 1,
        start_s: 20,
    },
    Part {
        name: "multipath",
        how: How::Guest {
            arguments: &[
                "--subjects",
                "null_blk,dm-,multipath-",
                "--jobs",
                "randread-32,pinned-2",
                "--queues",
                "2",
            ],
        },
        runs: 14,
        overhead_s: 1,
        start_s: 20,
    },
    Part {
        name: "paths",
        how: How::Here {
            arguments: &["multipath", "--parts", "mutex,inside", "--csv"],
            file: "multipath.csv",
        },
        runs: 14,
        overhead_s: 1,
        start_s: 10,
    },
    Part {
        name: "limits",
        how: How::Here { arguments: &["limits", "--csv"], file: "limits.csv" },
        runs: 2,
        overhead_s: 2,
        start_s: 2,
    },
    Part {
        name: "splits",
        how: How::Guest { arguments: &["--subjects", "memory-,ram-", "--jobs", "write-1m"] },
        runs: 4,
        overhead_s: 1,
        start_s: 20,
    },
];

/// Returns the number of rounds, and the seconds of each measurement.
fn size(quick: bool) -> (u64, u64) {
    if quick { (2, 1) } else { (7, 3) }
}

impl Part {
    /// Returns the estimated duration of the part in seconds.
    pub(super) fn seconds(&self, quick: bool) -> u64 {
        let (rounds, seconds) = size(quick);
        // A guest is emulated: work besides the measurements takes longer there.
        let slow = if matches!(self.how, How::Guest { .. }) { 2 } else { 1 };
        self.start_s + rounds * self.runs * (seconds + slow * self.overhead_s)
    }

    /// Returns the figures of the part: from an earlier run with the same options, or measured now.
    pub(super) fn figures(&self, options: &Options) -> Result<Vec<Figure>> {
        let folder = options.out.join(self.name);
        fs::create_dir_all(&folder).map_err(Error::at(&folder))?;
        let (kept, marker) = (folder.join("figures.csv"), folder.join("measured-with"));
        let (rounds, seconds) = size(options.quick);
        let (rounds, seconds) = (rounds.to_string(), seconds.to_string());
        let common = ["--rounds", rounds.as_str(), "--seconds", seconds.as_str()];
        let settings = format!("{:?} {common:?}", self.how);
        let is_measured = fs::read_to_string(&marker).is_ok_and(|text| text == settings);
        if options.fresh || !is_measured {
            let _ = fs::remove_file(&marker);
            let measured = self.measure(options, &folder, &common)?;
            if measured != kept {
                fs::copy(&measured, &kept).map_err(Error::at(&measured))?;
            }
            fs::write(&marker, settings).map_err(Error::at(&marker))?;
        } else {
            eprintln!("  measured before; --fresh measures it again");
        }
        let text = fs::read_to_string(&kept).map_err(Error::at(&kept))?;
        parse_csv(&text)
    }

    /// Runs the measurement; returns the file that it wrote.
    fn measure(&self, options: &Options, folder: &Path, common: &[&str]) -> Result<PathBuf> {
        let log_path = folder.join("log");
        let log = fs::File::create(&log_path).map_err(Error::at(&log_path))?;
        let (mut command, written) = match self.how {
            How::Here { arguments, file } => {
                let own = std::env::current_exe().map_err(|error| Error(format!("this program: {error}")))?;
                let mut command = Command::new(own);
                command.args(arguments);
                let written = folder.join(file);
                match arguments[0] {
                    "loop" => {
                        command.arg("--out").arg(folder);
                        if self.name == "disk" {
                            command.arg("--dir").arg(folder);
                        }
                    }
                    _ => drop(command.arg(&written)),
                }
                (command, written)
            }
            How::Guest { arguments } => {
                let x = options.guest.as_ref().ok_or_else(|| {
                    Error("it needs a guest (start it as ./x bench report, without --no-guest)".into())
                })?;
                let mut command = Command::new(x);
                command.args(["bench", "ublk"]).args(arguments).env("BLOCKYARD_BUILT", "1");
                (command, "target/bench/ublk/out/ublk.csv".into())
            }
        };
        // The file of an earlier run is removed, so that it is not taken for the result of this one.
        let _ = fs::remove_file(&written);
        command.args(common).stdin(Stdio::null()).stdout(log);
        let status =
            command.status().map_err(|error| Error(format!("{:?}: {error}", command.get_program())))?;
        if !status.success() {
            return Err(Error(format!("it ended with {status} (its output: {})", log_path.display())));
        }
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_that_exist_are_measured_again_only_with_other_options() {
        let folder = std::env::temp_dir().join(format!("blockyard-report-{}", std::process::id()));
        let part = &PARTS[0];
        let mut options =
            Options { quick: true, fresh: false, out: folder.clone(), parts: vec![part], guest: None };
        fs::create_dir_all(folder.join(part.name)).unwrap();
        fs::write(folder.join(part.name).join("figures.csv"), "device,job,round,iops\na,b,0,5\n").unwrap();
        let settings = format!("{:?} {:?}", part.how, ["--rounds", "2", "--seconds", "1"]);
        fs::write(folder.join(part.name).join("measured-with"), settings).unwrap();
        let figures = part.figures(&options).expect("they exist");
        assert_eq!(figures[0].values("iops"), [5.0]);
        // A full run has other options. The test's own program fails on them, which shows that it was run.
        options.quick = false;
        assert!(part.figures(&options).is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_part_in_a_guest_needs_one() {
        let part = PARTS.iter().find(|part| part.name == "fabrics").unwrap();
        let folder = std::env::temp_dir().join(format!("blockyard-report-guest-{}", std::process::id()));
        let options =
            Options { quick: true, fresh: true, out: folder.clone(), parts: vec![part], guest: None };
        let error = part.figures(&options).expect_err("no guest");
        assert!(error.0.contains("needs a guest"), "{}", error.0);
        fs::remove_dir_all(folder).unwrap();
    }
}
