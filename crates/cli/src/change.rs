//! `resize`, `set`, `commit`, `suspend`, `resume`: online reconfiguration of a served device.

use crate::args::{CommitArgs, ResizeArgs, ResumeArgs, SetArgs, SuspendArgs};
use crate::failure::Failure;
use crate::holder;
use crate::listing::{block_on, client_of, run_dir};
use crate::plan;
use crate::progress::shown;
use engine::change::Change;
use engine::spec::{Bytes, Direct, is_scheduler_parameter, parse_scheduler, parse_time};
use std::process::ExitCode;

pub(crate) fn resize(args: &ResizeArgs) -> Result<ExitCode, Failure> {
    let size = args.size.as_ref().map(|size| size.parse::<Bytes>()).transpose();
    let size = size.map_err(|why| Failure::usage("resize", &args.name, why))?;
    change("resize", &args.name, &Change::Resize { size: size.map(|size| size.0), shrink: args.shrink })
}

pub(crate) fn set(args: &SetArgs) -> Result<ExitCode, Failure> {
    let usage = |why: String| Failure::usage("set", &args.name, why);
    let wanted = match args.change.split_once('=') {
        Some(("direct", "on")) => Change::Direct(Direct::On),
        Some(("direct", "off")) => Change::Direct(Direct::Off),
        Some(("direct", "auto")) => Change::Direct(Direct::Auto),
        Some(("direct", other)) => {
            return Err(usage(format!("direct cannot be \"{other}\" (write on, off or auto)")));
        }
        Some(("file", path)) if !path.is_empty() => {
            let path = std::path::absolute(path).map_err(|why| Failure::new("set", &args.name, why))?;
            Change::File(path)
        }
        Some(("slow", "off")) => Change::Slow(None),
        Some(("slow", time)) => {
            let limit = parse_time(time).map_err(|why| usage(why.to_string()))?;
            Change::Slow(Some(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)))
        }
        Some(("io_timeout", "off" | "0")) => Change::Timeout(None),
        Some(("io_timeout", time)) => {
            let limit = parse_time(time).map_err(|why| usage(why.to_string()))?;
            Change::Timeout(Some(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX)))
        }
        Some(("badblocks", range)) => Change::BadBlocks(range.to_owned()),
        Some(("scheduler", text)) => {
            parse_scheduler(text).map_err(|why| usage(why.to_string()))?;
            Change::Scheduler(text.to_owned())
        }
        Some((name, value)) if is_scheduler_parameter(name) => {
            Change::Parameter { name: name.to_owned(), value: value.to_owned() }
        }
        Some((option, value)) if option.contains('.') => {
            let (layer, key) = option.split_once('.').unwrap_or_default();
            Change::Layer { layer: layer.to_owned(), key: key.to_owned(), value: value.to_owned() }
        }
        _ => return Err(usage(unknown_setting(&args.change))),
    };
    change("set", &args.name, &wanted)
}

/// Settings of `set` that do not belong to a layer, and their values.
const SETTINGS: [(&str, &str); 6] = [
    ("direct", "on|off|auto"),
    ("file", "PATH"),
    ("badblocks", "+FIRST-LAST"),
    ("slow", "TIME|off"),
    ("io_timeout", "TIME|off"),
    ("scheduler", "NAME"),
];

fn unknown_setting(text: &str) -> String {
    let key = text.split('=').next().unwrap_or_default();
    let near = options::did_you_mean(key, SETTINGS.map(|(key, _)| key));
    let all = SETTINGS.map(|(key, value)| format!("{key}={value}")).join(", ");
    format!(
        "unknown setting \"{text}\" ({near}settings: {all}, a scheduler's PARAMETER=VALUE, LAYER.OPTION=VALUE)"
    )
}

pub(crate) fn commit(args: &CommitArgs) -> Result<ExitCode, Failure> {
    let is_stack = args.what.contains(':');
    if args.layers.is_empty() && !is_stack {
        return change("commit", &args.what, &Change::Commit);
    }
    if !is_stack {
        let why = "a served device has its own layers (leave out --layer, or give a stack: file:PATH)";
        return Err(Failure::usage("commit", &args.what, why));
    }
    let spec = plan::device("commit", &args.what, &args.layers)?;
    let name = spec.name.clone();
    engine::change::commit::commit(&engine::topology::device_config(&spec))
        .map_err(|why| Failure::new("commit", &name, why))?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn suspend(args: &SuspendArgs) -> Result<ExitCode, Failure> {
    change("suspend", &args.name, &Change::Suspend { flush: !args.noflush })
}

pub(crate) fn resume(args: &ResumeArgs) -> Result<ExitCode, Failure> {
    change("resume", &args.name, &Change::Resume)
}

fn change(what: &str, name: &str, change: &Change) -> Result<ExitCode, Failure> {
    let run = run_dir(what)?;
    let client = client_of(&run, what, name)?;
    let done = block_on(what, async {
        match shown(&format!("draining {name}"), client.change(name, change)).await {
            Ok(()) => Ok(()),
            Err(why) => Err(holder::with_holder(&run, why.to_string()).await),
        }
    })?;
    done.map_err(|why| Failure::new(what, name, why))?;
    Ok(ExitCode::SUCCESS)
}
