//! `replay-log`: replays the log of dm's log-writes target onto a device or a file.

use crate::args::ReplayLogArgs;
use crate::failure::{Failure, print};
use engine::replay::{Range, count, replay};
use std::fs::{File, OpenOptions};
use std::process::ExitCode;

pub(crate) fn replay_log(args: &ReplayLogArgs) -> Result<ExitCode, Failure> {
    let log_name = args.log.display().to_string();
    let failed = |why: &dyn std::fmt::Display| Failure::new("replay-log", &log_name, why);
    let log = File::open(&args.log).map_err(|why| failed(&why))?;
    if args.num_entries {
        print(&format!("{}\n", count(&log).map_err(|why| failed(&why))?));
        return Ok(ExitCode::SUCCESS);
    }
    let onto = match &args.replay {
        Some(path) => {
            let opened = OpenOptions::new().write(true).open(path);
            Some(opened.map_err(|why| Failure::new("replay-log", path.display().to_string(), why))?)
        }
        None => None,
    };
    let range = Range {
        start: args.start_entry,
        start_mark: args.start_mark.clone(),
        limit: args.limit,
        end_mark: args.end_mark.clone(),
        next_flush: args.next_flush,
        next_fua: args.next_fua,
    };
    let mut listing = String::new();
    let done = replay(&log, onto.as_ref(), &range, !args.no_discard, |step| {
        if args.verbose || onto.is_none() {
            listing.push_str(&format!("{} {}\n", step.number, step.what));
        }
    });
    print(&listing);
    let done = done.map_err(|why| failed(&why))?;
    if onto.is_some() {
        print(&format!(
            "replayed {} entries, {} bytes; the next is {}\n",
            done.entries, done.bytes, done.next
        ));
    }
    Ok(ExitCode::SUCCESS)
}
