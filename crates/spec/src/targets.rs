//! Targets as layers: `delay,read=5ms`, `flakey,up=10,down=2,drop_writes`, `log,file=writes.log,size=1G,create`.

use super::SpecError;
use block::Bytes;
use layers::dm::{Features, Words};
use options::write_flag;
use options::{Escaped, Options};
use options::{format_time, parse_time};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// `delay,read=TIME,…`: how long requests are held.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct DelaySpec {
    /// Reads, and whatever else changes nothing.
    pub read: Duration,
    /// Writes, discards, write zeroes.
    pub write: Duration,
    /// Flushes.
    pub flush: Duration,
}

/// `flakey,up=N,down=N,…`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlakeySpec {
    /// Seconds for which it works.
    pub up: u32,
    /// Seconds for which it does not.
    pub down: u32,
    /// How it does not.
    pub features: Features,
}

/// `log,file=PATH,…`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogSpec {
    /// The log.
    pub file: PathBuf,
    /// Make it, of this size, if it is not there.
    pub create: Option<Bytes>,
}

type Items<'a> = &'a mut dyn Iterator<Item = String>;

impl DelaySpec {
    pub(super) fn parse(mut items: impl Iterator<Item = String>) -> Result<DelaySpec, SpecError> {
        let mut options = Options::new("delay", &["read", "write", "flush"], &mut items as Items<'_>)?;
        let mut time = |key| match options.text(key)? {
            Some(text) => parse_time(&text),
            None => Ok(Duration::ZERO),
        };
        let delay = DelaySpec { read: time("read")?, write: time("write")?, flush: time("flush")? };
        if delay == DelaySpec::default() {
            return Err(SpecError::new("delay holds nothing", "for example delay,read=5ms"));
        }
        Ok(delay)
    }

    /// Reads, writes, flushes.
    pub fn nanos(&self) -> [u64; 3] {
        [self.read, self.write, self.flush].map(|time| time.as_nanos().try_into().unwrap_or(u64::MAX))
    }
}

impl fmt::Display for DelaySpec {
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

impl FlakeySpec {
    pub(super) fn parse(mut items: impl Iterator<Item = String>) -> Result<FlakeySpec, SpecError> {
        const KNOWN: &[&str] = &["up", "down", FLAGS[0], FLAGS[1], FLAGS[2], VALUES[0], VALUES[1], VALUES[2]];
        let mut options = Options::new("flakey", KNOWN, &mut items as Items<'_>)?;
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
        Ok(FlakeySpec { up, down, features })
    }
}

impl fmt::Display for FlakeySpec {
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

impl LogSpec {
    pub(super) fn parse(mut items: impl Iterator<Item = String>) -> Result<LogSpec, SpecError> {
        let mut options = Options::new("log", &["file", "size", "create"], &mut items as Items<'_>)?;
        let example = "for example log,file=writes.log,size=1G,create";
        let Some(file) = options.text("file")? else {
            return Err(SpecError::new("log has no file to write to", example));
        };
        let size: Option<Bytes> = options.value("size", "1G")?;
        let create = options.flag("create")?;
        if create != size.is_some() {
            return Err(SpecError::new("size and create go together", example));
        }
        Ok(LogSpec { file: file.into(), create: size })
    }
}

impl fmt::Display for LogSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "log,file={}", Escaped(&self.file.to_string_lossy()))?;
        self.create.map_or(Ok(()), |size| write!(f, ",size={size},create"))
    }
}

#[cfg(test)]
mod tests {
    use crate::LayerSpec;

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
            assert_eq!(text.parse::<LayerSpec>().unwrap().to_string(), text);
        }
        let plain = "flakey,up=3,down=1".parse::<LayerSpec>().unwrap();
        assert_eq!(plain.to_string(), "flakey,up=3,down=1,error_reads,error_writes");
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
            let error = text.parse::<LayerSpec>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
