//! Converts a command line to a topology. Every argument is checked before anything is opened or created.

use crate::args::ServeArgs;
use crate::failure::Failure;
use engine::spec::{
    DeviceName, ExportOptions, LayerSpec, NbdExportSpec, NbdLimits, StackSpec, TableSpec, TlsSpec,
    check_limits, parse_scheduler, parse_time, with_scheduler,
};
use engine::topology::{DeviceSpec, ExportKind, ExportSpec, NbdOptions, Topology};
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

/// Builds the topology of one device and its exports. `what`: the command, for messages.
pub(crate) fn topology(what: &str, args: &ServeArgs) -> Result<Topology, Failure> {
    let here = std::env::current_dir().map_err(|why| Failure::new(what, "the current directory", why))?;
    let stack = match (&args.stack, table_text(what, args)?) {
        (Some(stack), _) => parsed::<StackSpec>(what, stack)?,
        (None, None) if args.no_table => {
            StackSpec::Table(TableSpec { uuid: args.table_uuid.clone(), ..TableSpec::default() })
        }
        (None, Some(text)) => table(what, &text, args)?,
        (None, None) => {
            return Err(Failure::usage(what, "", "no stack given (give one, or --table FILE)"));
        }
    }
    .rooted(&here);
    let name: DeviceName = match &args.name {
        Some(name) => parsed(what, name)?,
        None => stack.derived_name(),
    };
    let layers = args.layers.iter().map(|layer| Ok(parsed::<LayerSpec>(what, layer)?.rooted(&here)));
    let mut layers: Vec<LayerSpec> = layers.collect::<Result<_, Failure>>()?;
    if let Some(text) = &args.scheduler {
        let choice = parse_scheduler(text).map_err(|why| Failure::usage(what, text, why))?;
        layers = with_scheduler(&layers, choice);
    }
    if let Some(limits) = &args.limits {
        check_limits(limits).map_err(|why| Failure::usage(what, limits, why))?;
    }
    let device = DeviceSpec {
        name: name.clone(),
        stack,
        layers,
        limits: args.limits.clone(),
        depth: args.depth,
        slow: args.slow.as_deref().map(|text| time(what, "--slow", text)).transpose()?,
        io_timeout: args.io_timeout.as_deref().map(|text| time(what, "--io-timeout", text)).transpose()?,
        line: 0,
    };
    let topology = Topology {
        ring: parsed(what, &args.ring)?,
        poll: args.poll,
        queues: args.queues,
        nbd_limits: args
            .nbd_limits
            .as_deref()
            .map_or(Ok(NbdLimits::default()), |text| parsed("--nbd-limits", text))?,
        devices: vec![device],
        exports: exports(what, args, &name, &here)?,
    };
    match topology.conflicts().first() {
        Some(problem) => Err(Failure::usage(what, &name, &problem.why)),
        None => Ok(topology),
    }
}

/// Builds a device from a stack and its layers for a command that opens it without serving it.
pub(crate) fn device(what: &str, stack: &str, layers: &[String]) -> Result<DeviceSpec, Failure> {
    let here = std::env::current_dir().map_err(|why| Failure::new(what, "the current directory", why))?;
    let stack = parsed::<StackSpec>(what, stack)?.rooted(&here);
    let layers = layers.iter().map(|layer| Ok(parsed::<LayerSpec>(what, layer)?.rooted(&here)));
    let layers = layers.collect::<Result<_, Failure>>()?;
    let name = stack.derived_name();
    Ok(DeviceSpec { name, stack, layers, limits: None, depth: None, slow: None, io_timeout: None, line: 0 })
}

/// Parses the value of an option that takes a time.
fn time(what: &str, option: &str, text: &str) -> Result<std::time::Duration, Failure> {
    parse_time(text).map_err(|why| Failure::usage(what, option, why))
}

/// Returns the exports of the command line. If no export is given an address, returns the NBD socket in the
/// run directory, which sockets passed by a service manager replace.
fn exports(
    what: &str,
    args: &ServeArgs,
    device: &DeviceName,
    here: &Path,
) -> Result<Vec<ExportSpec>, Failure> {
    let mode = args.tls.as_ref().map(|mode| parsed(what, mode)).transpose()?;
    let certificates = args.tls_certificates.as_ref().map(|path| here.join(path));
    let tls = TlsSpec::new(mode, certificates, args.tls_verify_peer)
        .map_err(|why| Failure::usage(what, device, why))?;
    let options = NbdOptions { name: args.nbd_name.clone().unwrap_or_else(|| device.to_string()), tls };
    let export = |kind: ExportKind| ExportSpec { device: device.clone(), kind: kind.rooted(here), line: 0 };
    let parsed = args.exports.given.iter().map(|(row, text)| {
        let kind = ExportKind::parse(row.kind, text, &options);
        kind.map(export).map_err(|why| Failure::usage(what, text, why))
    });
    let mut exports: Vec<ExportSpec> = parsed.collect::<Result<_, Failure>>()?;
    if exports.is_empty() {
        exports.push(export(ExportKind::Default(options)));
    } else if !args.exports.has(NbdExportSpec::ROW.kind) && options.tls != TlsSpec::default() {
        return Err(Failure::usage(what, device, "TLS is for NBD, but no --nbd is given (add one)"));
    }
    Ok(exports)
}

/// Returns the text of the table that `--table` or `--table-text` gives.
pub(crate) fn table_text(what: &str, args: &ServeArgs) -> Result<Option<String>, Failure> {
    match (&args.table, &args.table_text) {
        (Some(file), _) => read_table(what, file).map(Some),
        (None, text) => Ok(text.clone()),
    }
}

/// Returns the table lines of a command line's device; `None` if the device is not a table.
pub(crate) fn given_table(topology: &Topology) -> Option<String> {
    let Some(DeviceSpec { stack: StackSpec::Table(spec), .. }) = topology.devices.first() else {
        return None;
    };
    Some(spec.text())
}

/// Reads a table from a file, or from stdin if `file` is `-`.
pub(crate) fn read_table(what: &str, file: &Path) -> Result<String, Failure> {
    let text = if file == Path::new("-") {
        std::io::read_to_string(std::io::stdin().lock())
    } else {
        std::fs::read_to_string(file)
    };
    text.map_err(|why| Failure::new(what, file.display(), format!("{why} (is the path right?)")))
}

fn table(what: &str, text: &str, args: &ServeArgs) -> Result<StackSpec, Failure> {
    let mut spec: TableSpec = text.parse().map_err(|why| Failure::usage(what, "the table", why))?;
    if let Some(paths) = &args.multipath {
        spec.paths = parsed(what, paths)?;
    }
    (spec.read_only, spec.uuid) = (args.table_read_only, args.table_uuid.clone());
    // Tables loaded later use absolute paths. Absolute paths here let them share the open backends.
    let base = std::env::current_dir().map_err(|why| Failure::new(what, "the current directory", why))?;
    let base = args.table_base.as_ref().map_or_else(|| base.clone(), |folder| base.join(folder));
    Ok(StackSpec::Table(spec.rooted(&base)))
}

fn parsed<T: FromStr<Err: Display>>(what: &str, text: &str) -> Result<T, Failure> {
    text.parse().map_err(|why| Failure::usage(what, text, why))
}
