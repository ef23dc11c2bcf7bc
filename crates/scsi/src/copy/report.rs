//! RECEIVE COPY RESULTS, and VPD page 8Fh: SPC-6 sections 6.21 to 6.25 and 7.7.18.

use super::parameters::{CopyList, OWN_UNIT, TYPE_BLOCK_TO_BLOCK, TYPE_IDENTIFICATION};
use super::{CSCD_MAX, DESCRIPTORS_LEN_MAX, SEGMENTS_MAX};
use crate::bytes::{be8, be32, put};
use crate::{Media, NexusName, Outcome, ScsiStatus, Sense};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of results that a unit holds. A new result replaces the oldest.
const HELD_MAX: usize = 64;
/// Number of copies that a unit processes at the same time; it is reported, not enforced here.
const CONCURRENT_MAX: u8 = 8;

/// Progress of a copy.
#[derive(Debug, Default)]
pub(super) struct Progress {
    bytes: AtomicU64,
    segments: AtomicU16,
    /// Result of the copy, once it has ended.
    end: Mutex<Option<(ScsiStatus, Sense)>>,
}

impl Progress {
    pub(super) fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn end_segment(&self) {
        self.segments.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end(&self, outcome: &Outcome) {
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some((outcome.status, outcome.sense));
    }

    /// Marks a copy as aborted, because its program was dropped.
    pub(super) fn abandon(&self) {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        end.get_or_insert((ScsiStatus::CheckCondition, super::COPY_ABORTED));
    }

    fn ended(&self) -> Option<(ScsiStatus, Sense)> {
        *self.end.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Results that the unit holds, by nexus and list identifier.
#[derive(Debug, Default)]
pub struct CopyResults {
    held: Mutex<VecDeque<(NexusName, u8, Arc<Progress>)>>,
}

impl CopyResults {
    fn held(&self) -> MutexGuard<'_, VecDeque<(NexusName, u8, Arc<Progress>)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a copy. Replaces the result with the same list identifier.
    pub(super) fn begin(&self, nexus: &NexusName, list: &CopyList) -> Arc<Progress> {
        let progress = Arc::<Progress>::default();
        let mut held = self.held();
        held.retain(|(name, id, _)| name != nexus || *id != list.id);
        if list.holds_result {
            if held.len() >= HELD_MAX {
                held.pop_front();
            }
            held.push_back((nexus.clone(), list.id, progress.clone()));
        }
        progress
    }

    /// Drops the results of a nexus that was lost, or of all nexuses (`None`) after a reset.
    pub fn forget(&self, nexus: Option<&NexusName>) {
        self.held().retain(|(name, ..)| nexus.is_some_and(|nexus| name != nexus));
    }

    fn find(&self, nexus: &NexusName, id: u8) -> Result<Arc<Progress>, Sense> {
        let held = self.held();
        let found = held.iter().find(|(name, other, _)| name == nexus && *other == id);
        found.map(|(.., progress)| progress.clone()).ok_or(Sense::cdb_field(2, None))
    }

    /// Drops a result after it was reported.
    fn drop_ended(&self, nexus: &NexusName, id: u8) {
        self.held()
            .retain(|(name, other, progress)| name != nexus || *other != id || progress.ended().is_none());
    }
}

/// Answers the CDB of RECEIVE COPY RESULTS. Returns the data, not truncated, and the allocation length.
/// Errors: the service action is unknown, or no result is held for the list identifier.
pub fn receive(
    cdb: &[u8],
    nexus: &NexusName,
    results: &CopyResults,
    media: &Media,
) -> Result<(Vec<u8>, u32), Sense> {
    let id = be8(cdb, 2);
    let data = match be8(cdb, 1) & 0x1F {
        0x00 => {
            let progress = results.find(nexus, id)?;
            results.drop_ended(nexus, id);
            copy_status(&progress)
        }
        // RECEIVE DATA: none of the supported segment types holds data.
        0x01 => {
            results.find(nexus, id)?;
            vec![0; 4]
        }
        0x03 => operating_parameters(media),
        0x04 => {
            let progress = results.find(nexus, id)?;
            results.drop_ended(nexus, id);
            failed_segment(&progress)
        }
        _ => return Err(Sense::cdb_field(1, Some(4))),
    };
    Ok((data, be32(cdb, 10)))
}

/// Returns the largest length of a segment in bytes: its block count has two bytes.
fn segment_len_max(media: &Media) -> u32 {
    u32::from(u16::MAX).saturating_mul(media.block_size)
}

fn operating_parameters(media: &Media) -> Vec<u8> {
    let mut data = vec![0; 46];
    put(&mut data, 0, &42_u32.to_be_bytes());
    // SNLID: copies without a list identifier are supported.
    data[4] = 0x01;
    put(&mut data, 8, &CSCD_MAX.to_be_bytes());
    put(&mut data, 10, &SEGMENTS_MAX.to_be_bytes());
    put(&mut data, 12, &DESCRIPTORS_LEN_MAX.to_be_bytes());
    put(&mut data, 16, &segment_len_max(media).to_be_bytes());
    put(&mut data, 34, &u16::from(CONCURRENT_MAX).to_be_bytes());
    data[36] = CONCURRENT_MAX;
    data[37] = media.block_shift() as u8;
    put(&mut data, 43, &[2, TYPE_BLOCK_TO_BLOCK, TYPE_IDENTIFICATION]);
    data
}

fn copy_status(progress: &Progress) -> Vec<u8> {
    let mut data = vec![0; 12];
    put(&mut data, 0, &8_u32.to_be_bytes());
    data[4] = match progress.ended() {
        None => 0,
        Some((ScsiStatus::Good, _)) => 1,
        Some(_) => 2,
    };
    put(&mut data, 5, &progress.segments.load(Ordering::Relaxed).to_be_bytes());
    // TRANSFER COUNT UNITS: bytes, or KiB (1h) where the count does not fit.
    let bytes = progress.bytes.load(Ordering::Relaxed);
    let (units, count) = match u32::try_from(bytes) {
        Ok(count) => (0, count),
        Err(_) => (1, u32::try_from(bytes >> 10).unwrap_or(u32::MAX)),
    };
    data[7] = units;
    put(&mut data, 8, &count.to_be_bytes());
    data
}

/// Returns FAILED SEGMENT DETAILS. Without a failure no data is available.
fn failed_segment(progress: &Progress) -> Vec<u8> {
    let Some((status, sense)) = progress.ended().filter(|(status, _)| *status != ScsiStatus::Good) else {
        return vec![0; 4];
    };
    let mut bytes = [0; Sense::LEN_MAX];
    let len = sense.encode(false, &mut bytes);
    let mut data = vec![0; 60];
    put(&mut data, 0, &(56 + len as u32).to_be_bytes());
    data[56] = status as u8;
    put(&mut data, 58, &(len as u16).to_be_bytes());
    data.extend_from_slice(&bytes[..len]);
    data
}

/// Returns the descriptors of VPD page 8Fh (third-party copy), without the header of the page.
pub fn third_party_page(media: &Media) -> Vec<u8> {
    let mut page = Vec::new();
    let mut descriptor = |kind: u16, content: &[u8]| {
        let len = content.len().next_multiple_of(4);
        page.extend_from_slice(&kind.to_be_bytes());
        page.extend_from_slice(&(len as u16).to_be_bytes());
        page.extend_from_slice(content);
        page.extend(std::iter::repeat_n(0, len - content.len()));
    };
    // Supported commands: EXTENDED COPY(LID1), and RECEIVE COPY RESULTS with its service actions.
    let commands = [0x83, 1, 0x00, 0x84, 4, 0x00, 0x01, 0x03, 0x04];
    descriptor(0x0001, &[&[commands.len() as u8], &commands[..]].concat());
    // Parameter data: limits of a parameter list.
    let mut limits = [0; 28];
    put(&mut limits, 4, &CSCD_MAX.to_be_bytes());
    put(&mut limits, 6, &SEGMENTS_MAX.to_be_bytes());
    put(&mut limits, 8, &DESCRIPTORS_LEN_MAX.to_be_bytes());
    descriptor(0x0004, &limits);
    // Supported descriptors.
    descriptor(0x0008, &[2, TYPE_BLOCK_TO_BLOCK, TYPE_IDENTIFICATION]);
    // Supported CSCD descriptor ids other than indices of the list.
    let [high, low] = OWN_UNIT.to_be_bytes();
    descriptor(0x000C, &[0, 2, high, low]);
    // General copy operations.
    let mut general = [0; 32];
    put(&mut general, 0, &u32::from(CONCURRENT_MAX).to_be_bytes());
    put(&mut general, 4, &u32::from(CONCURRENT_MAX).to_be_bytes());
    put(&mut general, 8, &segment_len_max(media).to_be_bytes());
    general[12] = media.block_shift() as u8;
    descriptor(0x8001, &general);
    page
}
