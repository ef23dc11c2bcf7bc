//! `io-affinity`: paths assigned to CPUs.

use super::PathArgs;
use crate::dm::{Args, TargetError};
use std::fmt;
use std::str::FromStr;

/// A set of CPUs, formatted as the kernel does: hexadecimal groups of 32 bits separated by commas.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct CpuMask {
    /// The words of the mask, lowest CPUs first. The last word is not 0.
    words: Vec<u32>,
}

/// The error of a CPU mask that cannot be parsed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParseCpuMaskError;

/// The largest `NR_CPUS` of a kernel.
const CPUS_MAX: usize = 8192;

impl CpuMask {
    /// Returns whether the mask has a CPU.
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

/// Parses the arguments of a path: one CPU mask.
pub(super) fn parse(mut args: Args<'_>) -> Result<PathArgs, TargetError> {
    let (Some(mask), None) = (args.take_next(), args.take_next()) else {
        return Err(TargetError::new("io-affinity ps: invalid number of arguments"));
    };
    let mask: CpuMask = mask.parse().map_err(|_| TargetError::new("io-affinity ps: invalid cpumask"))?;
    if mask.words.is_empty() {
        return Err(TargetError::new("io-affinity ps: No new/valid CPU mapping found"));
    }
    Ok(PathArgs::Cpus(mask))
}

/// Returns the first path assigned to a CPU.
pub(super) fn owner(paths: &[PathArgs], cpu: usize) -> Option<u8> {
    let has = |path: &PathArgs| matches!(path, PathArgs::Cpus(mask) if mask.has(cpu));
    paths.iter().position(has).map(|place| place as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_masks_are_parsed_and_formatted_as_in_the_kernel() {
        let mask: CpuMask = "1,00000003".parse().unwrap();
        assert!(mask.has(0) && mask.has(1) && mask.has(32) && !mask.has(2) && !mask.has(64));
        assert_eq!(mask.to_string(), "1,00000003");
        assert_eq!("00f".parse::<CpuMask>().unwrap().to_string(), "f");
        for text in ["", ",", "g", "123456789", "0x1", "+1"] {
            assert_eq!(text.parse::<CpuMask>(), Err(ParseCpuMaskError), "{text}");
        }
    }
}
