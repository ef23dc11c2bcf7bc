//! SANITIZE: SBC-4 sections 4.11 and 5.30. OVERWRITE and BLOCK ERASE are supported, CRYPTO ERASE is not,
//! because the unit holds no keys.
//!
//! The operation is a program that continues when its command is aborted, its session ends, or the unit is
//! reset. Other commands are checked against [`Sanitize`] during that time, which needs no lock. If the
//! program is dropped before its end, the operation has failed.

pub(crate) mod commands;
mod steps;
#[cfg(test)]
mod tests;

use crate::bytes::{be8, be16};
use crate::sense::{Key, Specific};
use crate::{Begin, Can, Media, Nexus, Program, Sense};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

/// Service actions of SANITIZE.
pub mod action {
    /// OVERWRITE.
    pub const OVERWRITE: u8 = 0x01;
    /// BLOCK ERASE.
    pub const BLOCK_ERASE: u8 = 0x02;
    /// EXIT FAILURE MODE.
    pub const EXIT_FAILURE_MODE: u8 = 0x1F;
}

/// Bits of byte 1 of the CDB. ZNR (40h) applies only to zoned units, which have no
/// SANITIZE.
const IMMED: u8 = 0x80;
const AUSE: u8 = 0x20;
/// Bytes before the pattern of an OVERWRITE parameter list.
const HEADER_LEN: u32 = 4;

/// 03/31/03 SANITIZE COMMAND FAILED.
pub const SANITIZE_FAILED: Sense = Sense::new(Key::MediumError, 0x31, 0x03);
/// 02/04/1B LOGICAL UNIT NOT READY, SANITIZE IN PROGRESS.
const IN_PROGRESS: Sense = Sense::new(Key::NotReady, 0x04, 0x1B);

const IDLE: u8 = 0;
const RUNNING: u8 = 1;
const FAILED: u8 = 2;
/// State: the operation failed, and EXIT FAILURE MODE ends this state (AUSE was set).
const FAILED_UNRESTRICTED: u8 = 3;

/// State of a unit's sanitize operation.
#[derive(Debug, Default)]
pub struct Sanitize {
    state: AtomicU8,
    /// Progress in 65536ths.
    progress: AtomicU16,
}

impl Sanitize {
    /// Returns why commands cannot be processed: an operation is running, or has failed. REQUEST SENSE
    /// reports it.
    pub fn sense(&self) -> Option<Sense> {
        match self.state.load(Ordering::Acquire) {
            IDLE => None,
            RUNNING => {
                let progress = self.progress.load(Ordering::Relaxed);
                Some(Sense { specific: Specific::Progress(progress), ..IN_PROGRESS })
            }
            _ => Some(SANITIZE_FAILED),
        }
    }

    /// Checks whether a command is allowed in this state: SBC-4 section 4.11.3.
    pub fn check(&self, cdb: &[u8]) -> Result<(), Sense> {
        let Some(sense) = self.sense() else { return Ok(()) };
        let is_allowed = match (be8(cdb, 0), be8(cdb, 1) & 0x1F) {
            // INQUIRY, REPORT LUNS, REQUEST SENSE, LOG SENSE.
            (0x12 | 0xA0 | 0x03 | 0x4D, _) => true,
            // REPORT TARGET PORT GROUPS, REPORT SUPPORTED OPERATION CODES and TASK MANAGEMENT FUNCTIONS.
            (0xA3, 0x0A | 0x0C | 0x0D) => true,
            // SANITIZE ends the failed state.
            (0x48, _) => self.state.load(Ordering::Acquire) != RUNNING,
            _ => false,
        };
        if is_allowed { Ok(()) } else { Err(sense) }
    }

    /// Begins an operation. Returns `None` if one is running.
    fn begin(self: &Arc<Self>, may_exit_failure: bool) -> Option<Operation> {
        let before = self.state.swap(RUNNING, Ordering::AcqRel);
        if before == RUNNING {
            return None;
        }
        self.progress.store(0, Ordering::Relaxed);
        Some(Operation { sanitize: self.clone(), may_exit_failure, is_done: false })
    }

    /// Executes EXIT FAILURE MODE: SBC-4 section 5.30.5. Error: AUSE was not set for the failed operation.
    pub fn exit_failure_mode(&self) -> Result<(), Sense> {
        let exit =
            self.state.compare_exchange(FAILED_UNRESTRICTED, IDLE, Ordering::AcqRel, Ordering::Acquire);
        match exit {
            Err(FAILED) => Err(Sense::cdb_field(1, Some(4))),
            _ => Ok(()),
        }
    }
}

/// A running operation. If it is dropped before [`end`](Operation::end), it has failed.
#[derive(Debug)]
struct Operation {
    sanitize: Arc<Sanitize>,
    may_exit_failure: bool,
    is_done: bool,
}

impl Operation {
    fn report(&self, done: u64, total: u64) {
        let progress = u128::from(done) * u128::from(u16::MAX) / u128::from(total.max(1));
        self.sanitize.progress.store(u16::try_from(progress).unwrap_or(u16::MAX), Ordering::Relaxed);
    }

    fn end(&mut self) {
        self.is_done = true;
        self.sanitize.state.store(IDLE, Ordering::Release);
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        if !self.is_done {
            let state = if self.may_exit_failure { FAILED_UNRESTRICTED } else { FAILED };
            self.sanitize.state.store(state, Ordering::Release);
        }
    }
}

/// Returns whether a unit supports a service action. BLOCK ERASE leaves blocks deallocated, so it requires
/// a thin unit.
pub fn supports(media: &Media, is_thin: bool, code: u8) -> bool {
    match code {
        action::OVERWRITE | action::EXIT_FAILURE_MODE => true,
        action::BLOCK_ERASE => is_thin && media.can.intersects(Can::WRITE_ZEROES | Can::UNMAP_ZEROES),
        _ => false,
    }
}

/// Returns the parameter list length in the CDB. Only OVERWRITE has a list. Error: the length does not fit
/// the service action or the block size.
pub fn list_len(cdb: &[u8], media: &Media) -> Result<u32, Sense> {
    let len = u32::from(be16(cdb, 7));
    let is_valid = match be8(cdb, 1) & 0x1F {
        action::OVERWRITE => len > HEADER_LEN && len <= media.block_size.saturating_add(HEADER_LEN),
        _ => len == 0,
    };
    if is_valid { Ok(len) } else { Err(Sense::cdb_field(7, None)) }
}

/// Begins SANITIZE with its parameter list. `sanitize` is the state of the unit of `nexus`; `changed` is
/// called when commands must be checked against that state from then on, and when they no longer need to
/// be.
pub fn begin(
    nexus: &Arc<Nexus>,
    sanitize: &Arc<Sanitize>,
    cdb: &[u8],
    list: &[u8],
    changed: fn(&Nexus),
) -> Begin {
    let media = nexus.unit().media();
    let flags = be8(cdb, 1);
    let method = match flags & 0x1F {
        action::EXIT_FAILURE_MODE => {
            let result = sanitize.exit_failure_mode();
            changed(nexus);
            return result.map_or_else(Begin::from, |()| crate::Outcome::good(0).into());
        }
        action::OVERWRITE => match steps::Overwrite::parse(list, &media) {
            Ok(overwrite) => steps::Method::Overwrite(overwrite),
            Err(sense) => return sense.into(),
        },
        _ => steps::Method::Erase,
    };
    let Some(operation) = sanitize.begin(flags & AUSE != 0) else {
        return sanitize.sense().unwrap_or(IN_PROGRESS).into();
    };
    changed(nexus);
    let (is_immediate, wanted) = (flags & IMMED != 0, list.len() as u64);
    Begin::Program(Program::new(
        nexus,
        steps::Run::new(nexus.clone(), operation, method, media, is_immediate, wanted, changed),
    ))
}
