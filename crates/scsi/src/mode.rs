//! Mode pages: SPC-6 section 7.5, SBC-4 section 6.5.
//!
//! Pages: 01h read-write error recovery, 08h caching, 0Ah control, 1Ch informational exceptions control. No page
//! can be saved.

use crate::bytes::{be8, be16, be32, be64, put};
use crate::dispatch::Call;
use crate::sense::Sense;
use crate::{Attributes, Begin, BlockIo, Media, Outcome};

/// Changeable values of the mode pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Modes {
    /// WCE: a write may complete before it is on stable storage.
    pub(crate) write_cache: bool,
    /// D_SENSE: sense data uses the descriptor format.
    pub(crate) descriptor_sense: bool,
    /// SWP: writes fail.
    pub(crate) software_write_protect: bool,
    /// TAS: commands that another nexus aborted end with TASK ABORTED.
    pub(crate) task_aborted_status: bool,
    /// UA_INTLCK_CTRL, as in the page: 0, 2 or 3.
    pub(crate) attention_interlock: u8,
    /// QUEUE ALGORITHM MODIFIER: 0 restricted, 1 unrestricted reordering. Commands are never reordered in a
    /// way that either value forbids, so the value is only stored.
    pub(crate) queue_algorithm: u8,
}

impl Modes {
    /// Returns the default values.
    pub(crate) fn new(media: &Media, attributes: &Attributes) -> Modes {
        Modes {
            write_cache: media.write_cache || attributes.emulate_write_cache,
            // LBAs of larger devices do not fit into the INFORMATION field of the fixed format.
            descriptor_sense: media.blocks > u64::from(u32::MAX),
            software_write_protect: false,
            task_aborted_status: attributes.emulate_tas,
            attention_interlock: match attributes.emulate_ua_intlck_ctrl {
                0 => 0,
                1 => 2,
                _ => 3,
            },
            queue_algorithm: 1,
        }
    }

    /// Returns whether a unit attention is cleared when it is reported.
    pub(crate) fn clears_reported_attention(&self) -> bool {
        self.attention_interlock == 0
    }
}

/// A mode page. All have subpage 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Page {
    ErrorRecovery,
    Caching,
    Control,
    Exceptions,
}

/// Bytes of the longest page.
const PAGE_MAX: usize = 20;
const ALL_PAGES: u8 = 0x3F;
const ALL_SUBPAGES: u8 = 0xFF;

impl Page {
    const ALL: [Page; 4] = [Page::ErrorRecovery, Page::Caching, Page::Control, Page::Exceptions];

    const fn code(self) -> u8 {
        match self {
            Page::ErrorRecovery => 0x01,
            Page::Caching => 0x08,
            Page::Control => 0x0A,
            Page::Exceptions => 0x1C,
        }
    }

    /// Returns the bytes of the page, including its header of two bytes.
    const fn len(self) -> usize {
        match self {
            Page::Caching => 20,
            Page::ErrorRecovery | Page::Control | Page::Exceptions => 12,
        }
    }

    /// Returns the page with these values.
    fn encode(self, modes: &Modes) -> [u8; PAGE_MAX] {
        let mut page = [0; PAGE_MAX];
        (page[0], page[1]) = (self.code(), self.len() as u8 - 2);
        let bit = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
        match self {
            Page::ErrorRecovery | Page::Exceptions => {}
            Page::Caching => page[2] = bit(modes.write_cache, 0x04),
            Page::Control => {
                // GLTSD: log parameters are not saved implicitly.
                page[2] = 0x02 | bit(modes.descriptor_sense, 0x04);
                page[3] = modes.queue_algorithm << 4;
                page[4] = modes.attention_interlock << 4 | bit(modes.software_write_protect, 0x08);
                page[5] = bit(modes.task_aborted_status, 0x40);
                // BUSY TIMEOUT PERIOD: unlimited. EXTENDED SELF-TEST COMPLETION TIME: one second.
                put(&mut page, 8, &[0xFF, 0xFF, 0x00, 0x01]);
            }
        }
        page
    }

    /// Returns the page with ones in all bits that MODE SELECT can change.
    fn changeable(self, media: &Media, attributes: &Attributes) -> [u8; PAGE_MAX] {
        let mut page = [0; PAGE_MAX];
        (page[0], page[1]) = (self.code(), self.len() as u8 - 2);
        match self {
            Page::ErrorRecovery | Page::Exceptions => {}
            Page::Caching if media.write_cache || attributes.emulate_write_cache => page[2] = 0x04,
            Page::Caching => {}
            Page::Control => [page[2], page[3], page[4], page[5]] = [0x04, 0x10, 0x38, 0x40],
        }
        page
    }

    /// Stores the values of a page in which only changeable bits differ.
    fn decode(self, page: &[u8; PAGE_MAX], modes: &mut Modes) -> Result<(), u16> {
        match self {
            Page::ErrorRecovery | Page::Exceptions => {}
            Page::Caching => modes.write_cache = page[2] & 0x04 != 0,
            Page::Control => {
                modes.descriptor_sense = page[2] & 0x04 != 0;
                modes.queue_algorithm = page[3] >> 4;
                modes.attention_interlock = page[4] >> 4 & 3;
                if modes.attention_interlock == 1 {
                    return Err(4);
                }
                modes.software_write_protect = page[4] & 0x08 != 0;
                modes.task_aborted_status = page[5] & 0x40 != 0;
            }
        }
        Ok(())
    }
}

/// Returns the block descriptor: the capacity in blocks, or all ones if it does not fit, and the block
/// size.
fn block_descriptor(media: &Media, is_long: bool) -> Vec<u8> {
    if is_long {
        let mut descriptor = vec![0; 16];
        put(&mut descriptor, 0, &media.blocks.to_be_bytes());
        put(&mut descriptor, 12, &media.block_size.to_be_bytes());
        return descriptor;
    }
    let mut descriptor = vec![0; 8];
    put(&mut descriptor, 0, &u32::try_from(media.blocks).unwrap_or(u32::MAX).to_be_bytes());
    put(&mut descriptor, 5, &media.block_size.to_be_bytes()[1..]);
    descriptor
}

/// Executes MODE SENSE (6) and (10): SPC-6 sections 6.14 and 6.15.
pub(crate) fn sense(call: &Call<'_>) -> Begin {
    let is_long_command = call.cdb[0] == 0x5A;
    let allocation = if is_long_command { be16(&call.cdb, 7).into() } else { call.cdb[4].into() };
    let no_descriptor = call.cdb[1] & 0x08 != 0;
    let long_lba = is_long_command && call.cdb[1] & 0x10 != 0;
    let (control, code, subpage) = (call.cdb[2] >> 6, call.cdb[2] & 0x3F, call.cdb[3]);
    let facts = &call.facts;
    if control == 3 {
        return Sense::SAVING_UNSUPPORTED.into();
    }
    let pages: Vec<Page> =
        Page::ALL.into_iter().filter(|page| matches!(code, ALL_PAGES) || page.code() == code).collect();
    if pages.is_empty() {
        return Sense::cdb_field(2, Some(5)).into();
    }
    if !matches!(subpage, 0 | ALL_SUBPAGES) {
        return Sense::cdb_field(3, None).into();
    }
    let descriptor = match no_descriptor {
        true => Vec::new(),
        false => block_descriptor(&facts.media, long_lba),
    };
    let is_protected = facts.is_write_protected() || call.is_mapping_read_only();
    let device_specific = if is_protected { 0x80 } else { 0 } | if facts.has_fua() { 0x10 } else { 0 };
    let mut data = if is_long_command {
        let long_bit = u8::from(long_lba && !no_descriptor);
        vec![0, 0, 0, device_specific, long_bit, 0, 0, descriptor.len() as u8]
    } else {
        vec![0, 0, device_specific, descriptor.len() as u8]
    };
    data.extend_from_slice(&descriptor);
    for page in pages {
        let bytes = match control {
            0 => page.encode(&facts.modes),
            1 => page.changeable(&facts.media, &facts.attributes),
            _ => page.encode(&Modes::new(&facts.media, &facts.attributes)),
        };
        data.extend_from_slice(&bytes[..page.len()]);
    }
    if is_long_command {
        let len = data.len() as u16 - 2;
        put(&mut data, 0, &len.to_be_bytes());
    } else {
        data[0] = data.len() as u8 - 1;
    }
    Outcome::with_data(data, allocation).into()
}

/// Begins MODE SELECT (6) and (10): SPC-6 sections 6.12 and 6.13. The parameter list has not been received
/// yet.
pub(crate) fn select_begin(call: &Call<'_>) -> Begin {
    if call.cdb[1] & 0x10 == 0 {
        // PF: pages in a vendor-specific format are not supported.
        return Sense::cdb_field(1, Some(4)).into();
    }
    let len = if call.cdb[0] == 0x55 { be16(&call.cdb, 7).into() } else { u32::from(call.cdb[4]) };
    call.parameters(len)
}

/// Continues MODE SELECT with its parameter list. All pages are checked before any is changed.
pub(crate) fn select(call: &Call<'_>, list: &[u8]) -> Begin {
    match parse(call, list) {
        Ok(modes) => {
            let flushes = call.facts.modes.write_cache && !modes.write_cache;
            call.unit().set_modes(modes, call.nexus);
            if flushes {
                // Cached data must reach stable storage before the initiator relies on the change.
                return Begin::Io(BlockIo { wanted: list.len() as u64, ..call.flush() });
            }
            Outcome::good(list.len() as u64).into()
        }
        Err(sense) => sense.into(),
    }
}

fn parse(call: &Call<'_>, list: &[u8]) -> Result<Modes, Sense> {
    let (facts, is_long_command) = (&call.facts, call.cdb[0] == 0x55);
    let mut modes = facts.modes;
    if list.is_empty() {
        return Ok(modes);
    }
    let header = if is_long_command { 8 } else { 4 };
    if list.len() < header {
        return Err(Sense::PARAMETER_LIST_LENGTH);
    }
    let medium_type_at = if is_long_command { 2 } else { 1 };
    if be8(list, medium_type_at) != 0 {
        return Err(Sense::parameter_field(medium_type_at as u16, None));
    }
    let is_long_descriptor = is_long_command && be8(list, 4) & 1 != 0;
    let descriptor_len = if is_long_command { be16(list, 6).into() } else { usize::from(be8(list, 3)) };
    check_descriptor(&facts.media, list, header, descriptor_len, is_long_descriptor)?;
    let mut at = header + descriptor_len;
    while at < list.len() {
        let pointer = at as u16;
        // SPF: there are no pages with a subpage code. PS is reserved here.
        if list[at] & 0xC0 != 0 {
            return Err(Sense::parameter_field(pointer, Some(if list[at] & 0x80 != 0 { 7 } else { 6 })));
        }
        let page = Page::ALL.into_iter().find(|page| page.code() == list[at] & 0x3F);
        let page = page.ok_or(Sense::parameter_field(pointer, Some(5)))?;
        let Some(bytes) = list.get(at..at + page.len()) else { return Err(Sense::PARAMETER_LIST_LENGTH) };
        if usize::from(bytes[1]) != page.len() - 2 {
            return Err(Sense::parameter_field(pointer + 1, None));
        }
        let current = page.encode(&facts.modes);
        let changeable = page.changeable(&facts.media, &facts.attributes);
        let mut whole = [0; PAGE_MAX];
        put(&mut whole, 0, bytes);
        for index in 2..page.len() {
            let wrong = (whole[index] ^ current[index]) & !changeable[index];
            if wrong != 0 {
                let bit = 7 - wrong.leading_zeros() as u8;
                return Err(Sense::parameter_field(pointer + index as u16, Some(bit)));
            }
        }
        page.decode(&whole, &mut modes).map_err(|byte| Sense::parameter_field(pointer + byte, Some(5)))?;
        at += page.len();
    }
    Ok(modes)
}

/// Checks that a block descriptor describes the medium as it is.
fn check_descriptor(media: &Media, list: &[u8], at: usize, len: usize, is_long: bool) -> Result<(), Sense> {
    if len == 0 {
        return Ok(());
    }
    if len != if is_long { 16 } else { 8 } {
        return Err(Sense::parameter_field(if at == 8 { 6 } else { 3 }, None));
    }
    if list.len() < at + len {
        return Err(Sense::PARAMETER_LIST_LENGTH);
    }
    let (blocks, unlimited, block_size, size_at) = match is_long {
        true => (be64(list, at), u64::MAX, be32(list, at + 12), 12),
        false => (be32(list, at).into(), u64::from(u32::MAX), be32(list, at + 4) & 0xFF_FFFF, 5),
    };
    if blocks != 0 && blocks != unlimited && blocks != media.blocks {
        return Err(Sense::parameter_field(at as u16, None));
    }
    if block_size != media.block_size {
        return Err(Sense::parameter_field((at + size_at) as u16, None));
    }
    Ok(())
}
