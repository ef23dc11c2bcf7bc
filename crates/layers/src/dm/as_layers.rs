//! Targets as layers: `delay,read=5ms`, `flakey,up=10,down=2,drop_writes`, `log,file=writes.log,size=1G,create`.

use super::{Delay, Features, Flakey, LogWrites, Place, Words};
use crate::Layer;
use crate::drivers::{Driver, DriverFile};
use block::{Bytes, Profile, Sectors};
use options::{Escaped, Options, SpecError, format_time, parse_time, write_flag};
use queue::Ring;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// `delay,read=TIME,…`: how long requests are held.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct DelayWords {
    /// Reads, and whatever else changes nothing.
    pub read: Duration,
    /// Writes, discards, write zeroes.
    pub write: Duration,
    /// Flushes.
    pub flush: Duration,
}

/// `flakey,up=N,down=N,…`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlakeyWords {
    /// Seconds for which it works.
    pub up: u32,
    /// Seconds for which it does not.
    pub down: u32,
    /// How it does not.
    pub features: Features,
}

/// `log,file=PATH,…`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogWords {
    /// The log.
    pub file: PathBuf,
    /// Make it, of this size, if it is not there.
    pub create: Option<Bytes>,
}

impl Driver for DelayWords {
    const NAME: &'static str = "delay";
    const KEYS: &'static [&'static str] = &["read", "write", "flush"];
    const USAGE: &'static str = "delay[,read=TIME][,write=TIME][,flush=TIME]";
    const ABOUT: &'static str = "holds requests for a while";
    const EXAMPLE: &'static str = "delay,read=5ms";

    fn read(mut options: Options) -> Result<DelayWords, SpecError> {
        let mut time = |key| match options.text(key)? {
            Some(text) => parse_time(&text),
            None => Ok(Duration::ZERO),
        };
        let delay = DelayWords { read: time("read")?, write: time("write")?, flush: time("flush")? };
        if delay == DelayWords::default() {
            return Err(SpecError::new("delay holds nothing", "for example delay,read=5ms"));
        }
        Ok(delay)
    }

    fn random(below: &mut dyn FnMut(u64) -> u64) -> DelayWords {
        let mut time = || Duration::from_nanos(below(2) * below(300_000));
        DelayWords { read: time() + Duration::from_nanos(1), write: time(), flush: time() }
    }

    fn layer<R: Ring>(&self, _: &[Profile]) -> Result<Arc<dyn Layer<R>>, String> {
        let times = [self.read, self.write, self.flush];
        Ok(Arc::new(Delay::of(times.map(|time| time.as_nanos().try_into().unwrap_or(u64::MAX)))))
    }
}

impl fmt::Display for DelayWords {
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

impl Driver for FlakeyWords {
    const NAME: &'static str = "flakey";
    const KEYS: &'static [&'static str] =
        &["up", "down", FLAGS[0], FLAGS[1], FLAGS[2], VALUES[0], VALUES[1], VALUES[2]];
    const USAGE: &'static str = "flakey[,up=SECONDS],down=SECONDS[,error_reads][,drop_writes][,error_writes]\n         [,corrupt_bio_byte=NTH:r|w:VALUE:FLAGS][,random_read_corrupt=PERBILLION][,random_write_corrupt=PERBILLION]";
    const ABOUT: &'static str = "works for some seconds, then fails for some";
    const EXAMPLE: &'static str = "flakey,up=10,down=2";
    const FAILS: bool = true;

    fn read(mut options: Options) -> Result<FlakeyWords, SpecError> {
        let up: u32 = options.value("up", "10")?.unwrap_or(0);
        let down: u32 = options.value("down", "2")?.unwrap_or(0);
        if down == 0 || up.checked_add(down).is_none() {
            return Err(SpecError::new("flakey is never down", "for example flakey,up=10,down=2"));
        }
        // The table's own words, so that there is one list of what they mean.
        let mut words = Vec::new();
        for flag in FLAGS {
            if options.flag(flag)? {
                words.push(flag.to_owned());
            }
        }
        for key in VALUES {
            if let Some(value) = options.text(key)? {
                words.push(key.to_owned());
                words.extend(value.split(':').map(str::to_owned));
            }
        }
        words.insert(0, words.len().to_string());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let features = Features::read(Words::new(&words)).map_err(|why| {
            SpecError::new(why.to_string(), "for example flakey,down=1,corrupt_bio_byte=1:w:255:0")
        })?;
        Ok(FlakeyWords { up, down, features })
    }

    fn random(below: &mut dyn FnMut(u64) -> u64) -> FlakeyWords {
        let features = Features { error_reads: true, error_writes: true, ..Features::default() };
        FlakeyWords { up: below(10) as u32, down: 1 + below(10) as u32, features }
    }

    fn layer<R: Ring>(&self, _: &[Profile]) -> Result<Arc<dyn Layer<R>>, String> {
        Ok(Arc::new(Flakey::new(Sectors(0), Sectors(0), [self.up, self.down], self.features)))
    }
}

impl fmt::Display for FlakeyWords {
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

impl Driver for LogWords {
    const NAME: &'static str = "log";
    const KEYS: &'static [&'static str] = &["file", "size", "create"];
    const USAGE: &'static str = "log,file=PATH[,size=SIZE,create]";
    const ABOUT: &'static str = "logs what is written, as dm-log-writes does";
    const EXAMPLE: &'static str = "log,file=writes.log,size=1G,create";
    const HAS_FILES: bool = true;

    fn read(mut options: Options) -> Result<LogWords, SpecError> {
        let example = "for example log,file=writes.log,size=1G,create";
        let Some(file) = options.text("file")? else {
            return Err(SpecError::new("log has no file to write to", example));
        };
        let size: Option<Bytes> = options.value("size", "1G")?;
        let create = options.flag("create")?;
        if create != size.is_some() {
            return Err(SpecError::new("size and create go together", example));
        }
        Ok(LogWords { file: file.into(), create: size })
    }

    fn random(below: &mut dyn FnMut(u64) -> u64) -> LogWords {
        let create = (below(2) == 0).then(|| Bytes((1 + below(1024)) << 20));
        LogWords { file: format!("writes, {}.log", below(10)).into(), create }
    }

    fn files(&self) -> Vec<DriverFile> {
        vec![DriverFile { path: self.file.clone(), create: self.create }]
    }

    fn rooted(self, base: &Path) -> LogWords {
        LogWords { file: base.join(&self.file), ..self }
    }

    fn layer<R: Ring>(&self, below: &[Profile]) -> Result<Arc<dyn Layer<R>>, String> {
        let place = Place { start: Sectors(0), len: Sectors(0) };
        let log = LogWrites::new(place, &below[0], &below[1]);
        let log = log.map_err(|why| format!("{}: {why}", self.file.display()))?;
        Ok(Arc::new(log))
    }
}

impl fmt::Display for LogWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "log,file={}", Escaped(&self.file.to_string_lossy()))?;
        self.create.map_or(Ok(()), |size| write!(f, ",size={size},create"))
    }
}

#[cfg(test)]
mod tests {
    use crate::drivers::Words;
    use crate::testing::Bench;
    use block::{Op, Request, Status};
    use options::SpecError;
    use queue::{Nanos, NodeId};

    fn words(text: &str) -> Result<Words, SpecError> {
        let mut items = options::split(text);
        let name = items.remove(0);
        Words::read(&name, items).expect("a driver")
    }

    #[test]
    fn targets_as_layers_are_read_and_shown_again() {
        for text in [
            "delay,read=5ms",
            "delay,write=10us,flush=1s",
            "flakey,up=10,down=2,error_reads,error_writes",
            "flakey,up=0,down=1,drop_writes",
            "flakey,up=0,down=1,corrupt_bio_byte=7:w:255:0,random_read_corrupt=10",
            "log,file=writes,,log",
            "log,file=w.log,size=1G,create",
        ] {
            assert_eq!(words(text).unwrap().to_string(), text);
        }
        let plain = words("flakey,up=3,down=1").unwrap();
        assert_eq!(plain.to_string(), "flakey,up=3,down=1,error_reads,error_writes");
    }

    #[test]
    fn a_delay_holds_reads_and_lets_flushes_through() {
        let profile = super::super::testing::profile(block::Bytes::gib(1));
        let layer = words("delay,read=5ms").unwrap().layer(std::slice::from_ref(&profile)).unwrap();
        let mut bench = Bench::deep(4, 0, layer.node(&profile, &[NodeId(1)]));
        bench.submit(Request::new(Op::Prefetch, block::Bytes(0), block::Bytes(512)), &[]);
        bench.submit(Request::flush(), &[]);
        assert_eq!(bench.done(), [Status::Ok], "the flush");
        bench.pass_until(Nanos(5_000_000));
        assert_eq!(bench.done(), []);
        bench.pass_until(Nanos(5_000_001));
        assert_eq!(bench.done(), [Status::Ok], "it came at 1 ns");
    }

    #[test]
    fn layers_that_do_nothing_are_refused() {
        for (text, why) in [
            ("delay", "delay holds nothing"),
            ("delay,read=5", "is not a time"),
            ("flakey,up=1", "flakey is never down"),
            ("flakey,down=1,drop_writes,error_writes", "conflicts"),
            ("flakey,down=1,corrupt_bio_byte=1:w", "requires 4 parameters"),
            ("log", "no file"),
            ("log,file=x,create", "go together"),
        ] {
            let error = words(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
