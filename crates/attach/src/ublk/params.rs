//! The driver's parameters of a device: it promises no more than its stack keeps.

use block::{
    Bytes, Features as Can, Guard, Integrity, Profile, QueueLimits, SEG_BOUNDARY_MASK, Sectors,
    UNLIMITED_BYTES,
};
use ublk::{
    Attributes, ParamBasic, ParamDiscard, ParamDmaAlign, ParamIntegrity, ParamSegment, ParamTypes,
    ParamZoned, Params, SEGMENT_SIZE_MIN,
};

/// Largest logical block of the driver: a page.
const LOGICAL_BLOCK_MAX: Bytes = Bytes(4096);
/// DMA alignment mask that the driver assumes by default: dwords.
const DMA_ALIGNMENT_DEFAULT: u64 = 3;
/// Largest alignment mask of the driver: a page less one.
const DMA_ALIGNMENT_MAX: u64 = 4095;
/// Largest number of segments of a request, by the field's type. It is also the driver's default.
const SEGMENTS_DEFAULT: u16 = u16::MAX;

/// Bytes of the application tag in a tuple of a known guard type.
const APPLICATION_TAG: u8 = 2;

/// Why the driver cannot represent a stack.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotPresentable {
    /// The logical block is too large.
    #[error("its logical block of {0} is larger than the kernel's page of 4K (choose a smaller block)")]
    Block(Bytes),
    /// The largest request is too small.
    #[error("its requests of at most {0} are smaller than the 4K that the driver wants (raise max_sectors)")]
    Requests(Bytes),
    /// The device is too small.
    #[error("it holds less than one block (make it larger)")]
    Size,
    /// The zone size is no power of two.
    #[error("its zone size {0} is not a power of two (choose another zone_size)")]
    Zone(Bytes),
}

/// Returns the parameters of a device whose requests move at most `io_max`.
///
/// # Errors
/// [`NotPresentable`].
pub(super) fn of(profile: &Profile, io_max: Bytes) -> Result<Params, NotPresentable> {
    let limits = &profile.limits;
    let block = limits.logical_block_size;
    if block > LOGICAL_BLOCK_MAX {
        return Err(NotPresentable::Block(block));
    }
    // A partial block at the end is cut off, as the block layer does.
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
    if limits.features.contains(Can::ZONED) {
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

/// Adds integrity data to parameters.
pub(super) fn with_integrity(params: Params, integrity: Option<Integrity>) -> Params {
    let Some(shape) = integrity else { return params };
    let (csum_type, is_guard) = match shape.guard {
        Guard::None => (ParamIntegrity::CSUM_NONE, false),
        Guard::Ip => (ParamIntegrity::CSUM_IP, true),
        Guard::Crc16 => (ParamIntegrity::CSUM_CRC16, true),
        Guard::Crc64 => (ParamIntegrity::CSUM_CRC64, true),
    };
    let flags = if is_guard { ParamIntegrity::CAN_GUARD | ParamIntegrity::HAS_REF_TAG } else { 0 };
    let integrity = ParamIntegrity {
        flags,
        // The driver copies only the integrity data of a request's first bio, so bios must not be merged.
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
        .with(Attributes::ROTATIONAL, profile.abilities.rotational || can.contains(Can::ROTATIONAL))
        .with(Attributes::VOLATILE_CACHE, can.contains(Can::WRITE_CACHE))
        .with(Attributes::FUA, can.contains(Can::WRITE_CACHE.union(Can::FUA)));
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

/// Returns `log2(size)`, or 0 if `size` is no power of two; 0 means none to the driver.
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

/// Limits on segments, if there are any.
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
            zero_copy_reads: false,
            inline: false,
            sparse: false,
            opaque: false,
        };
        change(&mut profile);
        profile.limits.validate().unwrap();
        profile
    }

    const IO: Bytes = Bytes(512 << 10);

    #[test]
    fn a_plain_stack_has_only_basic_parameters() {
        let params = of(&profile(|p| p.abilities.rotational = true), IO).unwrap();
        assert_eq!(params.types(), ParamTypes::BASIC);
        assert_eq!(params.attributes(), Attributes::ROTATIONAL);
        let basic = params.basic;
        assert_eq!((basic.logical_bs_shift, basic.physical_bs_shift, basic.io_opt_shift), (9, 9, 0));
        assert_eq!((basic.max_sectors, basic.dev_sectors, basic.chunk_sectors), (1024, 2048, 0));
    }

    #[test]
    fn cache_and_fua_follow_the_stacks_features() {
        let with = |can| of(&profile(|p| p.limits.features = can), IO).unwrap().attributes();
        assert_eq!(with(Can::WRITE_CACHE), Attributes::VOLATILE_CACHE);
        assert_eq!(with(Can::WRITE_CACHE.union(Can::FUA)).0, 12);
        assert_eq!(with(Can::empty()).0, 0);
    }

    #[test]
    fn a_read_only_device_does_not_discard() {
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
    fn segment_and_alignment_limits_are_passed_on() {
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
    fn integrity_parameters_follow_the_shape() {
        let plain = of(&profile(|_| {}), IO).unwrap();
        let with = |word: &str| with_integrity(plain, Some(word.parse().unwrap()));
        let t10 = with("t10");
        assert!(t10.types().has(ParamTypes::INTEGRITY));
        let sent = t10.integrity;
        assert_eq!((sent.metadata_size, sent.csum_type, sent.flags, sent.interval_exp), (8, 2, 3, 9));
        let opaque = with("64").integrity;
        assert_eq!((opaque.metadata_size, opaque.csum_type, opaque.flags, opaque.tag_size), (64, 0, 0, 0));
        assert_eq!(with_integrity(plain, None), plain);
    }

    #[test]
    fn a_partial_block_at_the_end_is_cut_off() {
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
    fn stacks_that_the_driver_cannot_represent_are_refused() {
        let large = profile(|p| p.limits.logical_block_size = Bytes(8192));
        assert_eq!(of(&large, IO), Err(NotPresentable::Block(Bytes(8192))));
        assert_eq!(of(&profile(|p| p.size = Bytes(100)), IO), Err(NotPresentable::Size));
    }
}
