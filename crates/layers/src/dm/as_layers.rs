//! Targets that are also layers: `delay,read=5ms`, `flakey,up=10,down=2,drop_writes`,
//! `log,file=writes.log,size=1G,create`.

use super::{Args, Delay, Features, Flakey, LogWrites, TargetRange};
use crate::Layer;
use crate::drivers::{Driver, DriverFile};
use block::{Bytes, Profile, Sectors};
use options::{Escaped, OptionRow, Options, SpecError, format_time, parse_time, write_flag};
use queue::Ring;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The options of `delay,read=TIME,…`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct DelayOptions {
    /// The delay of reads and other requests that change no data.
    pub read: Duration,
    /// The delay of writes, discards and write-zeroes.
    pub write: Duration,
    /// The delay of flushes.
    pub flush: Duration,
}

/// The options of `flakey,up=N,down=N,…`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlakeyOptions {
    /// The number of seconds for which the layer works.
    pub up: u32,
    /// The number of seconds for which the layer fails.
    pub down: u32,
    /// The behaviour while the layer fails.
    pub features: Features,
}

/// The options of `log,file=PATH,…`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogOptions {
    /// The path of the log.
    pub file: PathBuf,
    /// The size with which a missing log is created; `None`: the log must exist.
    pub create: Option<Bytes>,
}

impl Driver for DelayOptions {
    const NAME: &'static str = "delay";
    const OPTIONS: &'static [OptionRow] = &[
        OptionRow::value("read", "TIME", "0", "the delay of reads"),
        OptionRow::value("write", "TIME", "0", "the delay of writes"),
        OptionRow::value("flush", "TIME", "0", "the delay of flushes"),
    ];
    const USAGE: &'static str = "delay[,read=TIME][,write=TIME][,flush=TIME]";
    const ABOUT: &'static str = "delays requests";
    const EXAMPLE: &'static str = "delay,read=5ms";

    fn read(mut options: Options) -> Result<DelayOptions, SpecError> {
        let mut time = |key| match options.text(key)? {
            Some(text) => parse_time(&text),
            None => Ok(Duration::ZERO),
        };
        let delay = DelayOptions { read: time("read")?, write: time("write")?, flush: time("flush")? };
        if delay == DelayOptions::default() {
            return Err(SpecError::new("delay has no time", "for example delay,read=5ms"));
        }
        Ok(delay)
    }

    fn random(below: &mut dyn FnMut(u64) -> u64) -> DelayOptions {
        let mut time = || Duration::from_nanos(below(2) * below(300_000));
        DelayOptions { read: time() + Duration::from_nanos(1), write: time(), flush: time() }
    }

    fn layer<R: Ring>(&self, _: &[Profile]) -> Result<Arc<dyn Layer<R>>, String> {
        let times = [self.read, self.write, self.flush];
        Ok(Arc::new(Delay::of(times.map(|time| time.as_nanos().try_into().unwrap_or(u64::MAX)))))
    }
}

impl fmt::Display for DelayOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "delay")?;
        for (key, time) in [("read", self.read), ("write", self.write), ("flush", self.flush)] {
            if !time.is_zero() {
                write!(f, ",{key}={}", format_time(time))?;
            }
        }
        Ok(())
    }
}

const FLAGS: [&str; 3] = ["error_reads", "drop_writes", "error_writes"];
const VALUES: [&str; 3] = ["corrupt_bio_byte", "random_read_corrupt", "random_write_corrupt"];

impl Driver for FlakeyOptions {
    const NAME: &'static str = "flakey";
    const OPTIONS: &'static [OptionRow] = &[
        OptionRow::value("up", "SECONDS", "0", "how long the device works"),
        OptionRow::value("down", "SECONDS", "", "how long it fails then; required"),
        OptionRow::flag(FLAGS[0], "while down, reads fail"),
        OptionRow::flag(FLAGS[1], "while down, writes are dropped and succeed"),
        OptionRow::flag(FLAGS[2], "while down, writes fail"),
        OptionRow::value(
            VALUES[0],
            "NTH:r|w:VALUE:FLAGS",
            "",
            "while down, replace the NTH byte of matching requests",
        ),
        OptionRow::value(VALUES[1], "PERBILLION", "0", "while down, corrupt a random byte of so many reads"),
        OptionRow::value(VALUES[2], "PERBILLION", "0", "while down, corrupt a random byte of so many writes"),
    ];
    const USAGE: &'static str = "flakey[,up=SECONDS],down=SECONDS[,error_reads][,drop_writes][,error_writes]\
                                 [,corrupt_bio_byte=NTH:r|w:VALUE:FLAGS][,random_read_corrupt=PERBILLION]\
                                 [,random_write_corrupt=PERBILLION]";
    const ABOUT: &'static str = "works for some seconds, then fails for some";
    const EXAMPLE: &'static str = "flakey,up=10,down=2";
    const FAILS: bool = true;

    fn read(mut options: Options) -> Result<FlakeyOptions, SpecError> {
        let up: u32 = options.value("up", "10")?.unwrap_or(0);
        let down: u32 = options.value("down", "2")?.unwrap_or(0);
        if down == 0 || up.checked_add(down).is_none() {
            return Err(SpecError::new(
                "flakey needs down=SECONDS (at least 1; up + down below 2^32)",
                "for example flakey,up=10,down=2",
            ));
        }
        // The options are parsed as arguments of a table line, so that there is one parser.
        let mut args = Vec::new();
        for flag in FLAGS {
            if options.flag(flag)? {
                args.push(flag.to_owned());
            }
        }
        for key in VALUES {
            if let Some(value) = options.text(key)? {
                args.push(key.to_owned());
                args.extend(value.split(':').map(str::to_owned));
            }
        }
        args.insert(0, args.len().to_string());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let features = Features::read(Args::new(&args)).map_err(|why| {
            SpecError::new(why.to_string(), "for example flakey,down=1,corrupt_bio_byte=1:w:255:0")
        })?;
        Ok(FlakeyOptions { up, down, features })
    }

    fn random(below: &mut dyn FnMut(u64) -> u64) -> FlakeyOptions {
        let features = Features { error_reads: true, error_writes: true, ..Features::default() };
        FlakeyOptions { up: below(10) as u32, down: 1 + below(10) as u32, features }
    }

    fn layer<R: Ring>(&self, _: &[Profile]) -> Result<Arc<dyn Layer<R>>, String> {
        Ok(Arc::new(Flakey::new(Sectors(0), Sectors(0), [self.up, self.down], self.features)))
    }
}

impl fmt::Display for FlakeyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flakey,up={},down={}", self.up, self.down)?;
        let Features { error_reads, drop_writes, error_writes, corrupt, .. } = self.features;
        for (key, is) in FLAGS.into_iter().zip([error_reads, drop_writes, error_writes]) {
            write_flag(f, is, key)?;
        }
        if let Some(byte) = corrupt {
            let direction = if byte.writes { 'w' } else { 'r' };
            write!(f, ",corrupt_bio_byte={}:{direction}:{}:{}", byte.nth, byte.value, byte.flags)?;
        }
        let chances = [self.features.random_read_corrupt, self.features.random_write_corrupt];
        for (key, chance) in VALUES[1..].iter().zip(chances) {
            if chance > 0 {
                write!(f, ",{key}={chance}")?;
            }
        }
        Ok(())
    }
}

impl Driver for LogOptions {
    const NAME: &'static str = "log";
    const OPTIONS: &'static [OptionRow] = &[
        OptionRow::value("file", "PATH", "", "the log; required"),
        OptionRow::value("size", "SIZE", "", "the size of the log that is created; with create"),
        OptionRow::flag("create", "create the log if it is missing; with size"),
    ];
    const USAGE: &'static str = "log,file=PATH[,size=SIZE,create]";
    const ABOUT: &'static str = "logs all writes, as dm-log-writes does";
    const EXAMPLE: &'static str = "log,file=writes.log,size=1G,create";

    fn read(mut options: Options) -> Result<LogOptions, SpecError> {
        let example = "for example log,file=writes.log,size=1G,create";
        let Some(file) = options.text("file")? else {
            return Err(SpecError::new("log needs a file", example));
        };
        let size: Option<Bytes> = options.value("size", "1G")?;
        let create = options.flag("create")?;
        if create != size.is_some() {
            return Err(SpecError::new("size and create must be given together", example));
        }
        Ok(LogOptions { file: file.into(), create: size })
    }

    fn random(below: &mut dyn FnMut(u64) -> u64) -> LogOptions {
        let create = (below(2) == 0).then(|| Bytes((1 + below(1024)) << 20));
        LogOptions { file: format!("writes, {}.log", below(10)).into(), create }
    }

    fn files(&self) -> Vec<DriverFile> {
        vec![DriverFile { path: self.file.clone(), create: self.create }]
    }

    fn rooted(self, base: &Path) -> LogOptions {
        LogOptions { file: base.join(&self.file), ..self }
    }

    fn layer<R: Ring>(&self, below: &[Profile]) -> Result<Arc<dyn Layer<R>>, String> {
        let place = TargetRange { start: Sectors(0), len: Sectors(0) };
        let log = LogWrites::new(place, &below[0], &below[1]);
        let log = log.map_err(|why| format!("{}: {why}", self.file.display()))?;
        Ok(Arc::new(log))
    }
}

impl fmt::Display for LogOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "log,file={}", Escaped(&self.file.to_string_lossy()))?;
        self.create.map_or(Ok(()), |size| write!(f, ",size={size},create"))
    }
}

#[cfg(test)]
mod tests {
    use crate::drivers::LayerOptions;
    use crate::testing::Bench;
    use block::{Op, Request, Status};
    use options::SpecError;
    use queue::{Nanos, NodeId};

    fn driver(text: &str) -> Result<LayerOptions, SpecError> {
        let mut items = options::split(text);
        let name = items.remove(0);
        LayerOptions::read(&name, items).expect("a driver")
    }

    #[test]
    fn options_are_parsed_and_displayed() {
        for text in [
            "delay,read=5ms",
            "delay,write=10us,flush=1s",
            "flakey,up=10,down=2,error_reads,error_writes",
            "flakey,up=0,down=1,drop_writes",
            "flakey,up=0,down=1,corrupt_bio_byte=7:w:255:0,random_read_corrupt=10",
            "log,file=writes,,log",
            "log,file=w.log,size=1G,create",
        ] {
            assert_eq!(driver(text).unwrap().to_string(), text);
        }
        let plain = driver("flakey,up=3,down=1").unwrap();
        assert_eq!(plain.to_string(), "flakey,up=3,down=1,error_reads,error_writes");
    }

    #[test]
    fn a_delay_of_reads_does_not_delay_flushes() {
        let profile = super::super::testing::profile(block::Bytes::gib(1));
        let layer = driver("delay,read=5ms").unwrap().layer(std::slice::from_ref(&profile)).unwrap();
        let mut bench = Bench::deep(4, 0, layer.node(&profile, &[NodeId(1)]));
        bench.submit(Request::new(Op::Prefetch, block::Bytes(0), block::Bytes(512)), &[]);
        bench.submit(Request::flush(), &[]);
        assert_eq!(bench.done(), [Status::Ok], "the flush");
        bench.pass_until(Nanos(5_000_000));
        assert_eq!(bench.done(), []);
        bench.pass_until(Nanos(5_000_001));
        assert_eq!(bench.done(), [Status::Ok], "it was submitted at 1 ns");
    }

    #[test]
    fn layers_without_effect_are_refused() {
        for (text, why) in [
            ("delay", "delay has no time"),
            ("delay,read=5", "is not a time"),
            ("flakey,up=1", "flakey needs down=SECONDS"),
            ("flakey,down=1,drop_writes,error_writes", "conflicts"),
            ("flakey,down=1,corrupt_bio_byte=1:w", "requires 4 parameters"),
            ("log", "needs a file"),
            ("log,file=x,create", "must be given together"),
        ] {
            let error = driver(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
