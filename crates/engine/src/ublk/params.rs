//! What the driver is told of a device: no more than its stack keeps.

use block::{
    Bytes, Features as Can, Guard, Integrity, Profile, QueueLimits, SEG_BOUNDARY_MASK, Sectors,
    UNLIMITED_BYTES,
};
use ublk::{
    Attributes, ParamBasic, ParamDiscard, ParamDmaAlign, ParamIntegrity, ParamSegment, ParamTypes,
    ParamZoned, Params, SEGMENT_SIZE_MIN,
};

/// The largest logical block that the driver takes: a page.
const LOGICAL_BLOCK_MAX: Bytes = Bytes(4096);
/// What the driver assumes of memory when it is not told: dword alignment.
const DMA_ALIGNMENT_DEFAULT: u64 = 3;
/// The largest mask that it takes: a page less one.
const DMA_ALIGNMENT_MAX: u64 = 4095;
/// The most segments of a request, by the type of the field, which is also what the driver has when not told.
const SEGMENTS_DEFAULT: u16 = u16::MAX;

/// Bytes of the application tag in every tuple of a known kind.
const APPLICATION_TAG: u8 = 2;

/// Why a stack cannot be shown by this driver.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotPresentable {
    /// Its blocks.
    #[error("its logical block of {0} is larger than the kernel's page of 4K (choose a smaller block)")]
    Block(Bytes),
    /// Its requests.
    #[error("its requests of at most {0} are smaller than the 4K that the driver wants (raise max_sectors)")]
    Requests(Bytes),
    /// Its size.
    #[error("it holds less than one block (make it larger)")]
    Size,
    /// Its zones.
    #[error("its zones of {0} are no power of two (choose another zone_size)")]
    Zone(Bytes),
}

/// The parameters of a device whose requests move at most `io_max`.
///
/// # Errors
/// See [`NotPresentable`].
pub(super) fn of(profile: &Profile, io_max: Bytes) -> Result<Params, NotPresentable> {
    let limits = &profile.limits;
    let block = limits.logical_block_size;
    if block > LOGICAL_BLOCK_MAX {
        return Err(NotPresentable::Block(block));
    }
    // The end that is no whole block is not shown, as the block layer would not.
    let sectors = Bytes(profile.size.0 / block.0 * block.0).sectors();
    if sectors == Sectors(0) {
        return Err(NotPresentable::Size);
    }
    let mut params = Params::new();
    params.basic = basic(profile, limits, sectors, io_max)?;
    let mut types = ParamTypes::BASIC;
    if let Some(discard) = discard(profile, limits) {
        params.discard = discard;
        types = types.with(ParamTypes::DISCARD);
    }
    if limits.dma_alignment != DMA_ALIGNMENT_DEFAULT {
        params.dma =
            ParamDmaAlign { alignment: limits.dma_alignment.min(DMA_ALIGNMENT_MAX) as u32, pad: [0; 4] };
        types = types.with(ParamTypes::DMA_ALIGN);
    }
    if let Some(segments) = segments(limits) {
        params.seg = segments;
        types = types.with(ParamTypes::SEGMENT);
    }
    if limits.features.has(Can::ZONED) {
        if !limits.chunk_sectors.0.is_power_of_two() {
            return Err(NotPresentable::Zone(limits.chunk_sectors.bytes()));
        }
        params.zoned = ParamZoned {
            max_open_zones: limits.max_open_zones,
            max_active_zones: limits.max_active_zones,
            max_zone_append_sectors: whole(limits.max_hw_zone_append_sectors.0.min(io_max.sectors().0)),
            ..ParamZoned::default()
        };
        types = types.with(ParamTypes::ZONED);
    }
    params.types = types.0;
    Ok(params)
}

/// The same with integrity data.
pub(super) fn with_integrity(params: Params, integrity: Option<Integrity>) -> Params {
    let Some(shape) = integrity else { return params };
    let (csum_type, is_guard) = match shape.guard {
        Guard::None => (ParamIntegrity::CSUM_NONE, false),
        Guard::Ip => (ParamIntegrity::CSUM_IP, true),
        Guard::Crc16 => (ParamIntegrity::CSUM_CRC16, true),
        Guard::Crc64 => (ParamIntegrity::CSUM_CRC64, true),
    };
    let flags = if is_guard { ParamIntegrity::CAN_GUARD | ParamIntegrity::HAS_PLACE } else { 0 };
    let integrity = ParamIntegrity {
        flags,
        // The driver copies the integrity data of a request's first bio only, so bios must not be merged.
        max_integrity_segments: 1,
        interval_exp: shift(shape.interval),
        metadata_size: shape.tuple,
        csum_type,
        tag_size: if is_guard { APPLICATION_TAG } else { 0 },
        ..ParamIntegrity::default()
    };
    Params { types: params.types().with(ParamTypes::INTEGRITY).0, integrity, ..params }
}

fn basic(
    profile: &Profile,
    limits: &QueueLimits,
    sectors: Sectors,
    io_max: Bytes,
) -> Result<ParamBasic, NotPresentable> {
    let most = limits.max_sectors.min(io_max.sectors());
    if most.bytes() < LOGICAL_BLOCK_MAX {
        return Err(NotPresentable::Requests(most.bytes()));
    }
    let can = limits.features;
    let attributes = Attributes::default()
        .with(Attributes::READ_ONLY, profile.read_only)
        .with(Attributes::ROTATIONAL, profile.abilities.rotational || can.has(Can::ROTATIONAL))
        .with(Attributes::VOLATILE_CACHE, can.has(Can::WRITE_CACHE))
        .with(Attributes::FUA, can.has(Can::WRITE_CACHE.with(Can::FUA)));
    Ok(ParamBasic {
        attrs: attributes.0,
        logical_bs_shift: shift(limits.logical_block_size),
        physical_bs_shift: shift(limits.physical_block_size),
        io_opt_shift: shift(limits.io_opt),
        io_min_shift: shift(limits.io_min),
        max_sectors: whole(most.0),
        chunk_sectors: whole(limits.chunk_sectors.0),
        dev_sectors: sectors.0,
        virt_boundary_mask: limits.virt_boundary_mask,
    })
}

/// `log2`, and 0, which the driver takes as none, for what is no power of two.
fn shift(size: Bytes) -> u8 {
    if size.0.is_power_of_two() { size.0.trailing_zeros().min(28) as u8 } else { 0 }
}

fn whole(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn discard(profile: &Profile, limits: &QueueLimits) -> Option<ParamDiscard> {
    let writable = !profile.read_only;
    let discards = if profile.abilities.discard && writable { limits.max_discard_sectors.0 } else { 0 };
    let zeroes =
        if profile.abilities.write_zeroes && writable { limits.max_write_zeroes_sectors.0 } else { 0 };
    (discards > 0 || zeroes > 0).then(|| ParamDiscard {
        discard_alignment: whole(limits.discard_alignment.0),
        discard_granularity: whole(limits.discard_granularity.0.max(limits.logical_block_size.0)),
        max_discard_sectors: whole(discards),
        max_write_zeroes_sectors: whole(zeroes),
        max_discard_segments: 1,
        reserved0: 0,
    })
}

/// Limits on the pieces of a request, where there are any.
fn segments(limits: &QueueLimits) -> Option<ParamSegment> {
    let any = limits.max_segments == SEGMENTS_DEFAULT
        && limits.max_segment_size >= UNLIMITED_BYTES
        && limits.seg_boundary_mask >= SEG_BOUNDARY_MASK;
    let least = u64::from(SEGMENT_SIZE_MIN);
    (!any).then(|| ParamSegment {
        seg_boundary_mask: limits.seg_boundary_mask.max(least - 1),
        max_segment_size: whole(limits.max_segment_size.0.max(least)),
        max_segments: limits.max_segments.max(1),
        pad: [0; 2],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Abilities;

    fn profile(change: impl FnOnce(&mut Profile)) -> Profile {
        let mut profile = Profile {
            size: Bytes::mib(1),
            read_only: false,
            abilities: Abilities::MEMORY,
            limits: QueueLimits {
                max_hw_sectors: Bytes::mib(32).sectors(),
                max_user_sectors: Bytes::mib(32).sectors(),
                max_segments: u16::MAX,
                max_segment_size: UNLIMITED_BYTES,
                dma_alignment: 3,
                ..QueueLimits::default()
            },
            bytewise: true,
            lends: false,
            in_place: false,
            sparse: false,
            opaque: false,
        };
        change(&mut profile);
        profile.limits.validate().unwrap();
        profile
    }

    const IO: Bytes = Bytes(512 << 10);

    #[test]
    fn a_plain_stack_promises_nothing_that_it_does_not_keep() {
        let params = of(&profile(|p| p.abilities.rotational = true), IO).unwrap();
        assert_eq!(params.types(), ParamTypes::BASIC);
        assert_eq!(params.attributes(), Attributes::ROTATIONAL);
        let basic = params.basic;
        assert_eq!((basic.logical_bs_shift, basic.physical_bs_shift, basic.io_opt_shift), (9, 9, 0));
        assert_eq!((basic.max_sectors, basic.dev_sectors, basic.chunk_sectors), (1024, 2048, 0));
    }

    #[test]
    fn a_cache_is_volatile_and_fua_only_as_the_stack_says() {
        let with = |can| of(&profile(|p| p.limits.features = can), IO).unwrap().attributes();
        assert_eq!(with(Can::WRITE_CACHE), Attributes::VOLATILE_CACHE);
        assert_eq!(with(Can::WRITE_CACHE.with(Can::FUA)).0, 12);
        assert_eq!(with(Can::NONE).0, 0);
    }

    #[test]
    fn a_device_that_is_not_to_be_written_does_not_discard() {
        let clears = |read_only| {
            profile(|p| {
                p.read_only = read_only;
                p.limits.max_hw_discard_sectors = Sectors(256);
                p.limits.discard_granularity = Bytes(4096);
                p.limits.max_write_zeroes_sectors = Sectors(128);
            })
        };
        let params = of(&clears(false), IO).unwrap();
        assert!(params.types().has(ParamTypes::DISCARD));
        let discard = params.discard;
        assert_eq!((discard.discard_granularity, discard.max_discard_segments), (4096, 1));
        assert_eq!((discard.max_discard_sectors, discard.max_write_zeroes_sectors), (256, 128));
        let params = of(&clears(true), IO).unwrap();
        assert_eq!((params.types(), params.attributes()), (ParamTypes::BASIC, Attributes::READ_ONLY));
    }

    #[test]
    fn limits_on_pieces_and_memory_are_passed_on() {
        let params = of(
            &profile(|p| {
                p.limits.max_segments = 16;
                p.limits.dma_alignment = 511;
            }),
            IO,
        )
        .unwrap();
        assert!(params.types().has(ParamTypes::SEGMENT.with(ParamTypes::DMA_ALIGN)));
        assert_eq!((params.seg.max_segments, params.dma.alignment), (16, 511));
        assert!(params.seg.seg_boundary_mask.wrapping_add(1).is_power_of_two());
    }

    #[test]
    fn integrity_data_is_told_of_as_it_is() {
        let plain = of(&profile(|_| {}), IO).unwrap();
        let with = |word: &str| with_integrity(plain, Some(word.parse().unwrap()));
        let t10 = with("t10");
        assert!(t10.types().has(ParamTypes::INTEGRITY));
        let told = t10.integrity;
        assert_eq!((told.metadata_size, told.csum_type, told.flags, told.interval_exp), (8, 2, 3, 9));
        let opaque = with("64").integrity;
        assert_eq!((opaque.metadata_size, opaque.csum_type, opaque.flags, opaque.tag_size), (64, 0, 0, 0));
        assert_eq!(with_integrity(plain, None), plain);
    }

    #[test]
    fn the_end_that_is_no_whole_block_is_not_shown() {
        let params = of(
            &profile(|p| {
                p.size = Bytes(10_000);
                p.limits.logical_block_size = Bytes(4096);
            }),
            IO,
        );
        assert_eq!(params.unwrap().basic.dev_sectors, 16);
    }

    #[test]
    fn what_the_driver_cannot_take_is_refused_with_a_reason() {
        let large = profile(|p| p.limits.logical_block_size = Bytes(8192));
        assert_eq!(of(&large, IO), Err(NotPresentable::Block(Bytes(8192))));
        assert_eq!(of(&profile(|p| p.size = Bytes(100)), IO), Err(NotPresentable::Size));
    }
}
