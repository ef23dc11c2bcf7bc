//! `null:SIZE,key=value,…`: the options of null_blk under its names. Sizes are in bytes or have a suffix, where null_blk
//! counts MiB.

use super::stack::size_or_default;
use super::{SpecError, StackSpec};
use backends::{IrqMode, Knobs, NullSpec, Sharing, ZonedSpec};
use block::{Bytes, Sectors, UNLIMITED_SECTORS};
use options::{OptionRow, Options};
use options::{format_time, parse_time};
use options::{write_choice, write_flag};
use std::fmt;
use std::time::Duration;

const IRQMODE: [(&str, IrqMode); 3] =
    [("none", IrqMode::None), ("softirq", IrqMode::Softirq), ("timer", IrqMode::Timer)];

/// The options of `null:`.
pub(super) const OPTIONS: &[OptionRow] = &[
    OptionRow::value(
        "irqmode",
        "none|softirq|timer",
        "none",
        "complete requests at once, or after the completion time",
    ),
    OptionRow::value("completion", "TIME", "10us", "how long a request takes; implies irqmode=timer"),
    OptionRow::value("completion_nsec", "N", "10000", "the completion time in nanoseconds"),
    OptionRow::flag("memory_backed", "keep what is written"),
    OptionRow::value("blocksize", "512..4096", "512", "the logical block size"),
    OptionRow::value("max_sectors", "N", "65536", "the largest request, in sectors"),
    OptionRow::flag("virt_boundary", "segments of a request meet at page boundaries only"),
    OptionRow::flag("rotational", "report a rotating disk"),
    OptionRow::flag("discard", "support discard, which frees memory; with memory_backed"),
    OptionRow::flag("blocking", "carry out requests at the queue's next turn"),
    OptionRow::value("cache_size", "SIZE", "0", "a volatile write cache, with memory_backed"),
    OptionRow::value("fua", "on|off", "on", "whether writes can bypass the write cache"),
    OptionRow::value("mbps", "1..40960", "no limit", "the throughput, in MiB a second"),
    OptionRow::value("hw_queue_depth", "N", "--depth", "requests in flight of each queue"),
    OptionRow::flag("shared_tag_bitmap", "all queues of the device share hw_queue_depth"),
    OptionRow::flag("shared_tags", "all null devices of the process with this option share hw_queue_depth"),
    OptionRow::value(
        "badblocks",
        "FIRST-LAST[+FIRST-LAST...]",
        "none",
        "sectors whose reads and writes fail",
    ),
    OptionRow::flag("badblocks_once", "a range of bad blocks is good after its first error"),
    OptionRow::flag("badblocks_partial_io", "transfer the data before the first bad block"),
    OptionRow::value(
        "timeout",
        "INTERVAL:PROBABILITY:SPACE:TIMES",
        "none",
        "requests that are never completed and time out after 5 s, as the kernel's fault injection counts them",
    ),
    OptionRow::value("requeue", "INTERVAL:PROBABILITY:SPACE:TIMES", "none", "requests that are requeued"),
    OptionRow::value(
        "init_hctx",
        "INTERVAL:PROBABILITY:SPACE:TIMES",
        "none",
        "hardware queues that cannot be created",
    ),
    OptionRow::flag("zoned", "a zoned device"),
    OptionRow::value("zone_size", "SIZE", "256M", "the size of a zone, a power of two"),
    OptionRow::value("zone_capacity", "SIZE", "zone_size", "the writable part of a sequential zone"),
    OptionRow::value("zone_nr_conv", "N", "0", "conventional zones, from the first on"),
    OptionRow::value("zone_max_open", "N", "0", "zones that may be open at once; 0: any number"),
    OptionRow::value("zone_max_active", "N", "0", "zones that may be open or closed at once; 0: any number"),
    OptionRow::value("zone_append_max_sectors", "N", "no limit", "the largest zone append, in sectors"),
    OptionRow::flag("zone_full", "zones start full"),
    OptionRow::value(
        "zone_readonly",
        "SECTOR[+SECTOR...]",
        "none",
        "the zones of these sectors are read-only",
    ),
    OptionRow::value("zone_offline", "SECTOR[+SECTOR...]", "none", "the zones of these sectors are offline"),
];

/// Options of null_blk that a null device lacks, with the option to use instead or the reason.
const ELSEWHERE: [(&[&str], &str); 8] = [
    (&["gb", "size"], "the size is what stands behind null:, as in null:250G"),
    (&["bs"], "write blocksize=4K"),
    (&["submit_queues", "use_per_node_hctx"], "queues are every device's: --queues, or --ublk=queues=N"),
    (&["poll_queues"], "polling is every device's: --poll"),
    (&["no_sched"], "there is no scheduler unless one is asked for: --scheduler"),
    (&["queue_mode"], "there is one mode, which is null_blk's 2, multi-queue"),
    (&["home_node"], "memory is where the thread of a queue runs"),
    (&["nr_devices", "power", "index"], "blockyard add and del create and remove devices"),
];
/// The numbers of null_blk's `irqmode`, in the order of [`IRQMODE`].
const IRQMODE_NUMBERS: [&str; 3] = ["0", "1", "2"];

/// Replaces a number of null_blk's `irqmode` by its word.
fn in_words(item: String) -> String {
    let number = item
        .strip_prefix("irqmode=")
        .and_then(|value| IRQMODE_NUMBERS.iter().position(|number| *number == value));
    number.map_or(item, |number| format!("irqmode={}", IRQMODE[number].0))
}

fn check_elsewhere(item: &str) -> Result<(), SpecError> {
    let key = item.split('=').next().unwrap_or_default();
    match ELSEWHERE.iter().find(|(keys, _)| keys.contains(&key)) {
        Some((_, fix)) => Err(SpecError::new(format!("null has no option \"{key}\", as null_blk has"), *fix)),
        None => Ok(()),
    }
}

/// Returns a null device that stores written data, with random options.
pub(super) fn random(size: Bytes, below: &mut dyn FnMut(u64) -> u64) -> StackSpec {
    let mut chance = |permille| below(1000) < permille;
    let is_timed = chance(500);
    let (blocking, has_cache, has_rate, has_depth) = (chance(300), chance(300), chance(200), chance(300));
    let (is_shared, is_requeued) = (chance(500), chance(300));
    let knobs = Knobs {
        discard: true,
        blocking,
        cache_size: has_cache.then(|| Bytes(4096 * (1 + below(8)))),
        mbps: has_rate.then(|| 20 + below(1981) as u32),
        hw_queue_depth: has_depth.then(|| 1 + below(4) as u32),
        sharing: if is_shared { Sharing::Device } else { Sharing::Queue },
        requeue: is_requeued.then(|| "3:50:0:-1".parse().expect("a fault")),
        ..Knobs::default()
    };
    let spec = NullSpec { size, memory_backed: true, knobs, ..NullSpec::default() };
    StackSpec::Null(if is_timed { spec.completing_after(20_000) } else { spec })
}

pub(super) fn parse(what: &str, items: impl Iterator<Item = String>) -> Result<NullSpec, SpecError> {
    let items: Vec<String> = items.map(in_words).collect();
    items.iter().try_for_each(|item| check_elsewhere(item))?;
    let mut options = Options::new("null", OPTIONS, items.into_iter())?;
    let completion = completion(&mut options)?;
    // A completion time implies the timer, the only mode that uses one.
    let implied = if completion.is_some() { IrqMode::Timer } else { IrqMode::None };
    let null = NullSpec {
        size: size_or_default("null", what)?,
        irqmode: options.choice("irqmode", &IRQMODE)?.unwrap_or(implied),
        completion: completion.unwrap_or(NullSpec::COMPLETION),
        memory_backed: options.flag("memory_backed")?,
        zoned: zoned(&mut options)?,
        knobs: knobs(&mut options)?,
    };
    if completion.is_some() && null.irqmode != IrqMode::Timer {
        return Err(SpecError::new("completion goes with irqmode=timer", "leave out one of them"));
    }
    Ok(null)
}

/// Takes `completion=TIME` or null_blk's `completion_nsec=NANOSECONDS`.
fn completion(options: &mut Options) -> Result<Option<Duration>, SpecError> {
    let time = options.text("completion")?.map(|text| parse_time(&text)).transpose()?;
    let nanos: Option<u64> = options.value("completion_nsec", "10000")?;
    match (time, nanos) {
        (Some(_), Some(_)) => {
            Err(SpecError::new("completion and completion_nsec say the same", "leave out one of them"))
        }
        (time, nanos) => Ok(time.or(nanos.map(Duration::from_nanos))),
    }
}

const FUA: [(&str, bool); 2] = [("on", true), ("off", false)];

fn knobs(options: &mut Options) -> Result<Knobs, SpecError> {
    let plain = Knobs::default();
    let (device, process) = (options.flag("shared_tag_bitmap")?, options.flag("shared_tags")?);
    let sharing = match (device, process) {
        (false, false) => Sharing::Queue,
        (true, false) => Sharing::Device,
        (false, true) => Sharing::Process,
        (true, true) => {
            return Err(SpecError::new(
                "shared_tags shares tags among all devices already",
                "leave out shared_tag_bitmap",
            ));
        }
    };
    Ok(Knobs {
        blocksize: options.value("blocksize", "4096")?.unwrap_or(plain.blocksize),
        max_sectors: options.value("max_sectors", "256")?.map(Sectors),
        virt_boundary: options.flag("virt_boundary")?,
        rotational: options.flag("rotational")?,
        discard: options.flag("discard")?,
        blocking: options.flag("blocking")?,
        cache_size: options.value("cache_size", "16M")?,
        fua: options.choice("fua", &FUA)?.unwrap_or(plain.fua),
        mbps: options.value("mbps", "100")?,
        hw_queue_depth: options.value("hw_queue_depth", "64")?,
        sharing,
        badblocks: options.value("badblocks", "8-15+4096-4103")?.unwrap_or_default(),
        badblocks_once: options.flag("badblocks_once")?,
        badblocks_partial_io: options.flag("badblocks_partial_io")?,
        timeout: options.value("timeout", "1:100:0:-1")?,
        requeue: options.value("requeue", "1:10:0:-1")?,
        init_hctx: options.value("init_hctx", "1:100:0:1")?,
    })
}

fn zoned(options: &mut Options) -> Result<Option<ZonedSpec>, SpecError> {
    if !options.flag("zoned")? {
        if let Some(key) = options.given("zone_") {
            return Err(SpecError::new(format!("{key} goes with zoned"), "write zoned too, or leave it out"));
        }
        return Ok(None);
    }
    Ok(Some(ZonedSpec {
        zone_size: options.value("zone_size", "256M")?.unwrap_or(ZonedSpec::ZONE_SIZE),
        zone_capacity: options.value("zone_capacity", "192M")?,
        nr_conv: options.value("zone_nr_conv", "4")?.unwrap_or(0),
        max_open: options.value("zone_max_open", "8")?.unwrap_or(0),
        max_active: options.value("zone_max_active", "12")?.unwrap_or(0),
        append_max: options.value("zone_append_max_sectors", "1024")?.map_or(UNLIMITED_SECTORS, Sectors),
        full: options.flag("zone_full")?,
        read_only: sectors(options, "zone_readonly")?,
        offline: sectors(options, "zone_offline")?,
    }))
}

/// Takes a list of sectors, separated by `+` since commas separate options.
fn sectors(options: &mut Options, key: &str) -> Result<Vec<Sectors>, SpecError> {
    let Some(text) = options.text(key)? else { return Ok(Vec::new()) };
    let sector = |word: &str| {
        word.parse().map(Sectors).map_err(|_| {
            SpecError::new(
                format!("option {key}: \"{word}\" is not the number of a sector"),
                format!("for example {key}=0+524288"),
            )
        })
    };
    text.split('+').map(sector).collect()
}

/// Writes the shortest text that parses to the same device.
pub(super) fn write(f: &mut fmt::Formatter<'_>, null: &NullSpec) -> fmt::Result {
    write!(f, "null:{}", null.size)?;
    write_choice(f, "irqmode", null.irqmode, &IRQMODE)?;
    if null.irqmode == IrqMode::Timer {
        write!(f, ",completion={}", format_time(null.completion))?;
    }
    write_flag(f, null.memory_backed, "memory_backed")?;
    write_knobs(f, &null.knobs)?;
    null.zoned.as_ref().map_or(Ok(()), |zoned| write_zoned(f, zoned))
}

/// Writes the options that differ from their defaults.
fn write_knobs(f: &mut fmt::Formatter<'_>, knobs: &Knobs) -> fmt::Result {
    let plain = Knobs::default();
    if knobs.blocksize != plain.blocksize {
        write!(f, ",blocksize={}", knobs.blocksize)?;
    }
    if let Some(sectors) = knobs.max_sectors {
        write!(f, ",max_sectors={}", sectors.0)?;
    }
    write_flag(f, knobs.virt_boundary, "virt_boundary")?;
    write_flag(f, knobs.rotational, "rotational")?;
    write_flag(f, knobs.discard, "discard")?;
    write_flag(f, knobs.blocking, "blocking")?;
    if let Some(size) = knobs.cache_size {
        write!(f, ",cache_size={size}")?;
    }
    if !knobs.fua {
        write!(f, ",fua=off")?;
    }
    for (key, value) in [("mbps", knobs.mbps), ("hw_queue_depth", knobs.hw_queue_depth)] {
        if let Some(value) = value {
            write!(f, ",{key}={value}")?;
        }
    }
    write_flag(f, knobs.sharing == Sharing::Device, "shared_tag_bitmap")?;
    write_flag(f, knobs.sharing == Sharing::Process, "shared_tags")?;
    if !knobs.badblocks.is_empty() {
        write!(f, ",badblocks={}", knobs.badblocks)?;
    }
    write_flag(f, knobs.badblocks_once, "badblocks_once")?;
    write_flag(f, knobs.badblocks_partial_io, "badblocks_partial_io")?;
    for (key, fault) in
        [("timeout", knobs.timeout), ("requeue", knobs.requeue), ("init_hctx", knobs.init_hctx)]
    {
        if let Some(fault) = fault {
            write!(f, ",{key}={fault}")?;
        }
    }
    Ok(())
}

fn write_zoned(f: &mut fmt::Formatter<'_>, zoned: &ZonedSpec) -> fmt::Result {
    write!(f, ",zoned")?;
    if zoned.zone_size != ZonedSpec::ZONE_SIZE {
        write!(f, ",zone_size={}", zoned.zone_size)?;
    }
    if let Some(capacity) = zoned.zone_capacity {
        write!(f, ",zone_capacity={capacity}")?;
    }
    for (key, value) in [
        ("zone_nr_conv", zoned.nr_conv),
        ("zone_max_open", zoned.max_open),
        ("zone_max_active", zoned.max_active),
    ] {
        if value != 0 {
            write!(f, ",{key}={value}")?;
        }
    }
    if zoned.append_max != UNLIMITED_SECTORS {
        write!(f, ",zone_append_max_sectors={}", zoned.append_max.0)?;
    }
    write_flag(f, zoned.full, "zone_full")?;
    for (key, list) in [("zone_readonly", &zoned.read_only), ("zone_offline", &zoned.offline)] {
        if !list.is_empty() {
            let words: Vec<_> = list.iter().map(|sector| sector.0.to_string()).collect();
            write!(f, ",{key}={}", words.join("+"))?;
        }
    }
    Ok(())
}
