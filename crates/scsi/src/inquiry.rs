//! INQUIRY and its vital product data pages: SPC-6 sections 6.6 and 7.7, SBC-4 section 6.6.
//!
//! The information about commands comes from the table of commands, and that about limits from the
//! functions that enforce them.

use crate::bytes::{be16, put};
use crate::dispatch::Call;
use crate::identity::padded;
use crate::opcodes;
use crate::sense::Sense;
use crate::zones;
use crate::{Begin, Can, Outcome};

/// Length of the standard data in bytes: it ends after the version descriptors and the reserved bytes that
/// follow them.
const STANDARD_LEN: usize = 96;
/// SAM-5, iSCSI, SPC-4 and SBC-3, no version claimed: SPC-6 table 149.
const VERSION_DESCRIPTORS: [u16; 4] = [0x00A0, 0x0960, 0x0460, 0x04C0];

const SUPPORTED_PAGES: u8 = 0x00;
const SERIAL_NUMBER: u8 = 0x80;
const IDENTIFICATION: u8 = 0x83;
const EXTENDED: u8 = 0x86;
const BLOCK_LIMITS: u8 = 0xB0;
const CHARACTERISTICS: u8 = 0xB1;
const PROVISIONING: u8 = 0xB2;
const ZONED: u8 = 0xB6;
const THIRD_PARTY_COPY: u8 = 0x8F;
/// Supported pages, sorted as SPC-6 section 7.7.17 requires.
const PAGES: [u8; 9] = [
    SUPPORTED_PAGES,
    SERIAL_NUMBER,
    IDENTIFICATION,
    EXTENDED,
    THIRD_PARTY_COPY,
    BLOCK_LIMITS,
    CHARACTERISTICS,
    PROVISIONING,
    ZONED,
];

/// Executes INQUIRY.
pub(crate) fn inquiry(call: &Call<'_>) -> Begin {
    let (is_page, code) = (call.cdb[1] & 0x01 != 0, call.cdb[2]);
    let allocation = be16(&call.cdb, 3).into();
    if !is_page {
        return match code {
            0 => Outcome::with_data(standard(call), allocation).into(),
            _ => Sense::cdb_field(2, None).into(),
        };
    }
    let has_copy = call.facts.can_copy();
    let zoned = call.facts.media.zones;
    let has_page = |page: &u8| match *page {
        THIRD_PARTY_COPY => has_copy,
        ZONED => zoned.is_some(),
        _ => true,
    };
    let body = match code {
        SUPPORTED_PAGES => PAGES.into_iter().filter(has_page).collect(),
        SERIAL_NUMBER => call.unit().identity().serial.as_bytes().to_vec(),
        IDENTIFICATION => designators(call),
        EXTENDED => extended(call),
        THIRD_PARTY_COPY if has_copy => crate::copy::third_party_page(&call.facts.media),
        BLOCK_LIMITS => block_limits(call),
        CHARACTERISTICS => characteristics(call),
        PROVISIONING => provisioning(call),
        ZONED if let Some(zoned) = &zoned => zones::characteristics(zoned, &call.facts),
        _ => return Sense::cdb_field(2, None).into(),
    };
    let mut data = vec![device_type(call), code];
    data.extend_from_slice(&(body.len() as u16).to_be_bytes());
    data.extend_from_slice(&body);
    Outcome::with_data(data, allocation).into()
}

/// Returns PERIPHERAL DEVICE TYPE: a direct access block device, or a host-managed zoned one.
fn device_type(call: &Call<'_>) -> u8 {
    if call.facts.media.zones.is_some() { zones::DEVICE_TYPE } else { 0 }
}

fn standard(call: &Call<'_>) -> Vec<u8> {
    const EXTENDED_COPY: u8 = 0x83;
    let (facts, identity) = (&call.facts, call.unit().identity());
    let has = |(opcode, action)| opcodes::is_supported(opcode, Some(action), facts);
    let mut data = vec![0; STANDARD_LEN];
    data[0] = device_type(call);
    data[1] = u8::from(facts.media.removable) << 7;
    // Version SPC-4; response data format 2; hierarchical LUNs as in REPORT LUNS (HISUP).
    (data[2], data[3], data[4]) = (0x06, 0x12, STANDARD_LEN as u8 - 5);
    data[5] = facts.tpgs << 4 | u8::from(has((EXTENDED_COPY, 0))) << 3;
    data[6] = u8::from(has_several_ports(call)) << 4;
    // CMDQUE: commands are queued.
    data[7] = 0x02;
    put(&mut data, 8, &padded::<8>(&identity.vendor));
    let product = if facts.attributes.emulate_model_alias { &identity.alias } else { &identity.product };
    put(&mut data, 16, &padded::<16>(product));
    put(&mut data, 32, &padded::<4>(&identity.revision));
    let versions =
        VERSION_DESCRIPTORS.into_iter().chain(facts.media.zones.map(|_| zones::VERSION_DESCRIPTOR));
    for (index, version) in versions.enumerate() {
        put(&mut data, 58 + 2 * index, &version.to_be_bytes());
    }
    data
}

/// Returns whether the unit is accessible through several target ports (MULTIP).
fn has_several_ports(call: &Call<'_>) -> bool {
    let own = call.nexus.name();
    call.unit().nexuses().iter().any(|other| {
        let name = other.name();
        (name.relative_port, &name.target) != (own.relative_port, &own.target)
    })
}

/// Returns VPD page 83h, with the order and content of LIO's.
fn designators(call: &Call<'_>) -> Vec<u8> {
    const BINARY: u8 = 1;
    const ASCII: u8 = 2;
    const UTF_8: u8 = 3;
    const UNIT: u8 = 0x00;
    /// Association with the target port; the protocol identifier, iSCSI, is valid.
    const PORT: u8 = 0x90;
    /// Association with the target device.
    const DEVICE: u8 = 0xA0;
    const ISCSI: u8 = 0x50;
    let (identity, name, path) = (call.unit().identity(), call.nexus.name(), call.nexus.designators());
    let mut all = Vec::new();
    let mut add = |code_set: u8, kind: u8, bytes: &[u8]| {
        let len = bytes.len().min(usize::from(u8::MAX));
        let protocol = if kind & 0x80 != 0 { ISCSI } else { 0 };
        all.extend_from_slice(&[protocol | code_set, kind, 0, len as u8]);
        all.extend_from_slice(&bytes[..len]);
    };
    let padded_name = |mut name: String| {
        // The name is null-terminated and padded to a multiple of four: SPC-6 section 7.7.6.11.
        name.push('\0');
        while !name.len().is_multiple_of(4) {
            name.push('\0');
        }
        name.into_bytes()
    };
    add(BINARY, UNIT | 3, &identity.naa);
    let mut vendor = padded::<8>(&identity.vendor).to_vec();
    vendor.extend(format!("{}:{}", identity.product, identity.serial).bytes());
    add(ASCII, UNIT | 1, &vendor);
    add(BINARY, PORT | 4, &[0, 0, (path.relative_port >> 8) as u8, path.relative_port as u8]);
    if opcodes::is_supported(0xA3, Some(0x0A), &call.facts) {
        add(BINARY, PORT | 5, &[0, 0, (path.port_group >> 8) as u8, path.port_group as u8]);
    }
    add(UTF_8, PORT | 8, &padded_name(name.target_port()));
    add(UTF_8, DEVICE | 8, &padded_name(name.target.clone()));
    all
}

/// Returns VPD page 86h.
fn extended(call: &Call<'_>) -> Vec<u8> {
    let mut page = vec![0; 0x3C];
    // Byte 5: UASK_SUP, GROUP_SUP and PRIOR_SUP are off; head of queue, ordered and simple tasks are
    // supported.
    page[1] = 0x07;
    // V_SUP: the device has a volatile cache.
    page[2] = u8::from(call.facts.media.write_cache);
    // LUICLR: unit attention conditions of other nexuses survive a nexus loss.
    page[3] = 0x01;
    page
}

/// Returns VPD page B0h.
fn block_limits(call: &Call<'_>) -> Vec<u8> {
    let (facts, media) = (&call.facts, &call.facts.media);
    let mut page = vec![0; 0x3C];
    // WSNZ: WRITE SAME of 0 blocks is refused.
    page[0] = 0x01;
    page[1] = facts.compare_and_write_max();
    let granularity = u16::try_from(media.blocks_of(media.transfer_min)).unwrap_or(u16::MAX).max(1);
    put(&mut page, 2, &granularity.to_be_bytes());
    put(&mut page, 4, &media.blocks_of(media.transfer_max).to_be_bytes());
    put(&mut page, 8, &media.blocks_of(media.transfer_best).to_be_bytes());
    if facts.can_unmap() {
        put(&mut page, 16, &facts.attributes.max_unmap_lba_count.to_be_bytes());
        put(&mut page, 20, &facts.attributes.max_unmap_block_desc_count.to_be_bytes());
    }
    if facts.is_thin() {
        put(&mut page, 24, &media.blocks_of(media.unmap_granularity).max(1).to_be_bytes());
        let alignment = media.blocks_of(media.unmap_alignment);
        if alignment != 0 {
            put(&mut page, 28, &(1 << 31 | alignment).to_be_bytes());
        }
    }
    put(&mut page, 32, &facts.write_same_max().to_be_bytes());
    put(&mut page, 40, &media.blocks_of(media.atomic_max).to_be_bytes());
    page
}

/// Returns VPD page B1h.
fn characteristics(call: &Call<'_>) -> Vec<u8> {
    let mut page = vec![0; 0x3C];
    // MEDIUM ROTATION RATE: 1 is non-rotating, 0 not reported.
    page[1] = u8::from(!call.facts.media.rotational);
    // WABEREQ: reads succeed after SANITIZE with BLOCK ERASE.
    page[3] = u8::from(call.facts.can_block_erase()) << 6;
    // FUAB: SYNCHRONIZE CACHE makes data as durable as FUA does. ZONED is 0 for host-managed units: the
    // device type tells it.
    page[4] = 0x02;
    page
}

/// Returns VPD page B2h.
fn provisioning(call: &Call<'_>) -> Vec<u8> {
    let facts = &call.facts;
    let same = u8::from(facts.can_unmap_same());
    let flags =
        u8::from(facts.can_unmap()) << 7 | same << 6 | same << 5 | u8::from(facts.unmaps_to_zeroes()) << 2;
    let kind = match facts.is_thin() {
        false => 0,
        true if facts.media.can.contains(Can::THIN) => 2,
        true => 1,
    };
    vec![0, flags, kind, 0]
}
