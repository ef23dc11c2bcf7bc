//! `io-affinity`: CPUs and the paths that they were given.

use super::PathArgs;
use crate::dm::{TargetError, Words};
use std::fmt;
use std::str::FromStr;

/// A set of CPUs, written as the kernel writes one: hexadecimal, in groups of 32 with commas between.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct CpuMask {
    /// The lowest CPUs first. The last one is not 0.
    words: Vec<u32>,
}

/// A mask is no CPUs, or is no mask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParseCpuMaskError;

/// More CPUs than a kernel can be built for.
const CPUS_MAX: usize = 8192;

impl CpuMask {
    /// Whether a CPU is in it.
    pub fn has(&self, cpu: usize) -> bool {
        self.words.get(cpu / 32).is_some_and(|word| word >> (cpu % 32) & 1 == 1)
    }
}

impl FromStr for CpuMask {
    type Err = ParseCpuMaskError;

    fn from_str(text: &str) -> Result<CpuMask, ParseCpuMaskError> {
        let mut words = Vec::new();
        for group in text.rsplit(',') {
            if group.is_empty() || group.len() > 8 || !group.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(ParseCpuMaskError);
            }
            words.push(u32::from_str_radix(group, 16).map_err(|_| ParseCpuMaskError)?);
        }
        while words.pop_if(|word| *word == 0).is_some() {}
        if words.len() > CPUS_MAX / 32 { Err(ParseCpuMaskError) } else { Ok(CpuMask { words }) }
    }
}

impl fmt::Display for CpuMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.words.split_last() {
            None => f.write_str("0"),
            Some((first, rest)) => {
                write!(f, "{first:x}")?;
                rest.iter().rev().try_for_each(|word| write!(f, ",{word:08x}"))
            }
        }
    }
}

/// What is told of a path: exactly its CPUs.
pub(super) fn parse(mut args: Words<'_>) -> Result<PathArgs, TargetError> {
    let (Some(mask), None) = (args.take_next(), args.take_next()) else {
        return Err(TargetError::new("io-affinity ps: invalid number of arguments"));
    };
    let mask: CpuMask = mask.parse().map_err(|_| TargetError::new("io-affinity ps: invalid cpumask"))?;
    if mask.words.is_empty() {
        return Err(TargetError::new("io-affinity ps: No new/valid CPU mapping found"));
    }
    Ok(PathArgs::Cpus(mask))
}

/// The path that a CPU was given: of several the first.
pub(super) fn owner(paths: &[PathArgs], cpu: usize) -> Option<u8> {
    let has = |path: &PathArgs| matches!(path, PathArgs::Cpus(mask) if mask.has(cpu));
    paths.iter().position(has).map(|place| place as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_read_and_written_as_the_kernel_does() {
        let mask: CpuMask = "1,00000003".parse().unwrap();
        assert!(mask.has(0) && mask.has(1) && mask.has(32) && !mask.has(2) && !mask.has(64));
        assert_eq!(mask.to_string(), "1,00000003");
        assert_eq!("00f".parse::<CpuMask>().unwrap().to_string(), "f");
        for text in ["", ",", "g", "123456789", "0x1", "+1"] {
            assert_eq!(text.parse::<CpuMask>(), Err(ParseCpuMaskError), "{text}");
        }
    }
}
