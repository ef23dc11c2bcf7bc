//! The parts of the report: which measurement each runs, with which subjects and jobs, and where its figures are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Options;
use super::results::{Figure, parse_csv};
use crate::error::{Error, Result};
use crate::left_out::{self, LeftOut};

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
    /// What `--quick` measures of it: the jobs, and the measurements of a round.
    quick: Option<(&'static str, u64)>,
    /// Measurements of a round, and seconds that each takes besides the measured time.
    runs: u64,
    overhead_s: u64,
    /// Seconds before the first round.
    start_s: u64,
}

/// All parts, in the order of the report. `=` before a subject: that one alone, not those whose names begin so.
pub(super) const PARTS: &[Part] = &[
    Part {
        name: "memory",
        how: How::Here {
            arguments: &[
                "loop",
                "--subjects",
                "=loop-buffered,=loop-direct,=ours,=nbdfuse,=qemu",
                "--jobs",
                "files-randrw,randread-64,read-64,randwrite-64,write-64",
            ],
            file: "loop.csv",
        },
        quick: None,
        runs: 25,
        overhead_s: 1,
        start_s: 30,
    },
    Part {
        name: "workers",
        how: How::Here {
            arguments: &[
                "loop",
                "--subjects",
                "=loop-buffered,=loop-workers,=loop-direct,=ours-one-thread,=ours",
                "--jobs",
                "randread-psync-4,read-psync-4",
            ],
            file: "loop.csv",
        },
        quick: None,
        runs: 10,
        overhead_s: 1,
        start_s: 20,
    },
    Part {
        name: "disk",
        how: How::Here {
            arguments: &[
                "loop",
                "--subjects",
                "=loop-buffered,=loop-direct,=ours-direct",
                "--jobs",
                "randread-psync-4,read-psync-4,randwrite-psync-4,write-psync-4",
            ],
            file: "loop.csv",
        },
        quick: None,
        runs: 12,
        overhead_s: 1,
        start_s: 30,
    },
    Part {
        name: "fabrics",
        how: How::Guest {
            arguments: &[
                "--subjects",
                "=loop-buffered,=lio-fileio,=lio-ramdisk,=file,=ram,=lio-iscsi-file,=tgtd-file,=iscsi-file",
                "--jobs",
                "randrw-files",
            ],
        },
        quick: None,
        runs: 8,
        overhead_s: 2,
        start_s: 20,
    },
    Part {
        name: "servers",
        how: How::Guest {
            arguments: &[
                "--subjects",
                "=nbd-nbdkit,=nbd-qemu,=nbd-ram,=rublk-loop,=spdk-ram,=file,=ram",
                "--jobs",
                "randrw-files,randread-1,randread-32,randwrite-32,read-128k",
            ],
        },
        // Without SPDK.
        quick: Some(("randrw-files,randread-1,randread-32,read-128k", 24)),
        runs: 30,
        overhead_s: 1,
        start_s: 20,
    },
    Part {
        name: "multipath",
        how: How::Guest {
            arguments: &[
                "--subjects",
                "=null_blk,dm-,multipath-,queues-",
                "--jobs",
                "randread-32,pinned-2",
                "--queues",
                "2",
            ],
        },
        quick: Some(("pinned-2", 13)),
        runs: 26,
        overhead_s: 1,
        start_s: 20,
    },
    // Its rounds have a number of requests instead of a time.
    Part {
        name: "paths",
        how: How::Here { arguments: &["multipath", "--parts", "inside", "--csv"], file: "multipath.csv" },
        quick: None,
        runs: 1,
        overhead_s: 3,
        start_s: 5,
    },
    Part {
        name: "limits",
        how: How::Here { arguments: &["limits", "--csv"], file: "limits.csv" },
        quick: None,
        runs: 2,
        overhead_s: 2,
        start_s: 2,
    },
    Part {
        name: "splits",
        how: How::Guest { arguments: &["--subjects", "memory-,ram-", "--jobs", "write-1m"] },
        quick: None,
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
        let runs = self.quick.filter(|_| quick).map_or(self.runs, |(_, runs)| runs);
        self.start_s + rounds * runs * (seconds + slow * self.overhead_s)
    }

    /// Returns the figures of the part and the subjects that it left out: from an earlier run with the same
    /// options, or measured now.
    pub(super) fn figures(&self, options: &Options) -> Result<(Vec<Figure>, Vec<LeftOut>)> {
        let folder = options.out.join(self.name);
        fs::create_dir_all(&folder).map_err(Error::at(&folder))?;
        let (kept, marker) = (folder.join("figures.csv"), folder.join("measured-with"));
        let (rounds, seconds) = size(options.quick);
        let (rounds, seconds) = (rounds.to_string(), seconds.to_string());
        let mut common = vec!["--rounds", rounds.as_str(), "--seconds", seconds.as_str()];
        if let Some((jobs, _)) = self.quick.filter(|_| options.quick) {
            common.extend(["--jobs", jobs]);
        }
        let settings = self.settings(&common, options);
        let kept_list = kept.with_extension("left-out");
        let is_measured = fs::read_to_string(&marker).is_ok_and(|text| text == settings);
        if options.fresh || !is_measured {
            let _ = fs::remove_file(&marker);
            let measured = self.measure(options, &folder, &common)?;
            if measured != kept {
                fs::copy(&measured, &kept).map_err(Error::at(&measured))?;
            }
            let list = fs::read(measured.with_extension("left-out")).unwrap_or_default();
            fs::write(&kept_list, list).map_err(Error::at(&kept_list))?;
            fs::write(&marker, settings).map_err(Error::at(&marker))?;
        } else {
            eprintln!("  measured before; --fresh measures it again");
        }
        let text = fs::read_to_string(&kept).map_err(Error::at(&kept))?;
        let list = fs::read_to_string(&kept_list).map_err(Error::at(&kept_list))?;
        Ok((parse_csv(&text)?, left_out::parse(&list)))
    }

    /// Returns what the figures depend on.
    fn settings(&self, common: &[&str], options: &Options) -> String {
        let spdk = options.spdk.as_ref().filter(|_| self.has_spdk());
        format!("{:?} {common:?} {spdk:?}", self.how)
    }

    /// Returns whether one of the part's subjects is SPDK.
    fn has_spdk(&self) -> bool {
        matches!(self.how, How::Guest { arguments } if arguments.iter().any(|word| word.contains("spdk")))
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
                if let Some(spdk) = options.spdk.as_ref().filter(|_| self.has_spdk()) {
                    command.env("SPDK_TGT", spdk);
                }
                (command, "target/bench/ublk/out/ublk.csv".into())
            }
        };
        // The file of an earlier run is removed, so that it is not taken for the result of this one.
        let _ = fs::remove_file(&written);
        let _ = fs::remove_file(written.with_extension("left-out"));
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

    fn options(folder: &Path, part: &'static Part) -> Options {
        let (out, parts) = (folder.to_owned(), vec![part]);
        Options { quick: true, fresh: false, out, parts, guest: None, spdk: None }
    }

    #[test]
    fn only_parts_with_spdk_are_measured_again_for_it() {
        for part in PARTS {
            let mut options = options(Path::new("/tmp"), part);
            let without = part.settings(&[], &options);
            options.spdk = Some("/opt/spdk_tgt".into());
            assert_eq!(part.settings(&[], &options) != without, part.name == "servers", "{}", part.name);
        }
    }

    #[test]
    fn figures_that_exist_are_measured_again_only_with_other_options() {
        let folder = std::env::temp_dir().join(format!("blockyard-report-{}", std::process::id()));
        let part = &PARTS[0];
        let mut options = options(&folder, part);
        fs::create_dir_all(folder.join(part.name)).unwrap();
        fs::write(folder.join(part.name).join("figures.csv"), "device,job,round,iops\na,b,0,5\n").unwrap();
        fs::write(folder.join(part.name).join("figures.left-out"), "c\tno program\n").unwrap();
        let settings = part.settings(&["--rounds", "2", "--seconds", "1"], &options);
        fs::write(folder.join(part.name).join("measured-with"), settings).unwrap();
        let (figures, left_out) = part.figures(&options).expect("they exist");
        assert_eq!(figures[0].values("iops"), [5.0]);
        assert_eq!(left_out, [("c".to_owned(), "no program".to_owned())]);
        // A full run has other options. The test's own program fails on them, which shows that it was run.
        options.quick = false;
        assert!(part.figures(&options).is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_part_in_a_guest_needs_one() {
        let part = PARTS.iter().find(|part| part.name == "fabrics").unwrap();
        let folder = std::env::temp_dir().join(format!("blockyard-report-guest-{}", std::process::id()));
        let options = options(&folder, part);
        let error = part.figures(&options).expect_err("no guest");
        assert!(error.0.contains("needs a guest"), "{}", error.0);
        fs::remove_dir_all(folder).unwrap();
    }
}
