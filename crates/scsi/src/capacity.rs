//! READ CAPACITY and READ DEFECT DATA: SBC-4 sections 5.20, 5.21 and 5.22.

use crate::bytes::{be16, be32, put};
use crate::dispatch::Call;
use crate::opcodes::Code;
use crate::{Begin, Outcome};

/// Executes READ CAPACITY (10): returns the last LBA, or all ones if it does not fit.
pub(crate) fn read10(call: &Call<'_>) -> Begin {
    let media = &call.facts.media;
    let last = u32::try_from(media.blocks.saturating_sub(1)).unwrap_or(u32::MAX);
    let mut data = last.to_be_bytes().to_vec();
    data.extend_from_slice(&media.block_size.to_be_bytes());
    Outcome::with_data(data, u32::MAX).into()
}

/// Executes READ CAPACITY (16).
pub(crate) fn read16(call: &Call<'_>) -> Begin {
    let (facts, media) = (&call.facts, &call.facts.media);
    let mut data = vec![0; 32];
    put(&mut data, 0, &media.blocks.saturating_sub(1).to_be_bytes());
    put(&mut data, 8, &media.block_size.to_be_bytes());
    // RC_BASIS: the LBA is the last one of a zoned unit, not of its conventional zones at the start.
    data[12] = u8::from(media.zones.is_some()) << 4;
    data[13] = media.physical_exponent & 0x0F;
    let provisioning = u16::from(facts.is_thin()) << 15 | u16::from(facts.unmaps_to_zeroes()) << 14;
    put(&mut data, 14, &(provisioning | media.lowest_aligned & 0x3FFF).to_be_bytes());
    Outcome::with_data(data, be32(&call.cdb, 10)).into()
}

/// Executes READ DEFECT DATA (10) and (12): both lists are empty.
pub(crate) fn defects(call: &Call<'_>) -> Begin {
    let (lists, header, allocation) = match call.code {
        Code::ReadDefectData10 => (call.cdb[2] & 0x1F, 4, u32::from(be16(&call.cdb, 7))),
        _ => (call.cdb[1] & 0x1F, 8, be32(&call.cdb, 6)),
    };
    let mut data = vec![0; header];
    data[1] = lists;
    Outcome::with_data(data, allocation).into()
}
