//! Tests of the kernel's rules for limits, one rule each.

use super::*;

fn valid(change: impl FnOnce(&mut QueueLimits)) -> QueueLimits {
    let mut limits = QueueLimits::default();
    change(&mut limits);
    limits.validate().expect("valid limits");
    limits
}

fn refused(change: impl FnOnce(&mut QueueLimits)) -> (&'static str, u64) {
    let mut limits = QueueLimits::default();
    change(&mut limits);
    let before = limits.clone();
    let error = limits.validate().expect_err("limits that cannot be");
    assert_eq!(limits, before, "an error changes nothing");
    assert!(error.to_string().starts_with(&format!("{} = {}: ", error.field, error.value)));
    (error.field, error.value)
}

/// Stacks a device over `bottoms`, each from its first sector.
fn stacked(bottoms: &[&QueueLimits]) -> QueueLimits {
    let mut top = QueueLimits::stacking();
    for bottom in bottoms {
        let _ = top.stack(bottom, Sectors(0));
    }
    top
}

#[test]
fn unset_limits_get_the_kernels_defaults() {
    let limits = valid(|_| {});
    for (name, value) in [
        ("logical_block_size", 512),
        ("physical_block_size", 512),
        ("io_min", 512),
        ("io_opt", 0),
        ("max_hw_sectors", 255),
        ("max_sectors", 255),
        ("max_user_sectors", 0),
        ("chunk_sectors", 0),
        ("max_segments", 128),
        ("max_segment_size", 65536),
        ("seg_boundary_mask", 0xffff_ffff),
        ("virt_boundary_mask", 0),
        ("dma_alignment", 511),
        ("max_discard_sectors", 0),
        ("discard_granularity", 0),
        ("max_discard_segments", 1),
        ("max_write_zeroes_sectors", 0),
        ("max_wzeroes_unmap_sectors", 0),
        ("atomic_write_max_sectors", 0),
    ] {
        assert_eq!(limits.value(name), Some(value), "{name}");
    }
}

#[test]
fn a_stacking_device_starts_without_limits() {
    let limits = QueueLimits::stacking();
    for (name, value) in [
        ("max_sectors", 0xffff_ffff),
        ("max_hw_sectors", 0xffff_ffff),
        ("max_segments", 0xffff),
        ("max_segment_size", 0xffff_ffff),
        ("max_write_zeroes_sectors", 0xffff_ffff),
        ("discard_granularity", 512),
        ("max_discard_sectors", 0),
        ("max_secure_erase_sectors", 0),
        ("atomic_write_hw_max", 0xffff_ffff),
        ("max_zone_append_sectors", 0),
    ] {
        assert_eq!(limits.value(name), Some(value), "{name}");
    }
}

#[test]
fn validating_twice_changes_nothing() {
    for change in [
        (|_: &mut QueueLimits| {}) as fn(&mut QueueLimits),
        |l| l.virt_boundary_mask = 4095,
        |l| l.max_hw_discard_sectors = Sectors(1 << 20),
        |l| {
            l.features = Features::ZONED;
            l.chunk_sectors = Sectors(1 << 19);
        },
    ] {
        let once = valid(change);
        let mut twice = once.clone();
        twice.validate().expect("still valid");
        assert_eq!(once, twice);
    }
}

#[test]
fn invalid_limits_are_refused_with_field_value_and_rule() {
    type Row = (fn(&mut QueueLimits), (&'static str, u64));
    let rows: [Row; 15] = [
        (|l| l.logical_block_size = Bytes(256), ("logical_block_size", 256)),
        (|l| l.logical_block_size = Bytes(1536), ("logical_block_size", 1536)),
        (|l| l.logical_block_size = Bytes(131_072), ("logical_block_size", 131_072)),
        (|l| l.physical_block_size = Bytes(3000), ("physical_block_size", 3000)),
        (|l| l.max_hw_sectors = Sectors(7), ("max_hw_sectors", 7)),
        (
            |l| {
                l.logical_block_size = Bytes(65536);
                l.max_hw_sectors = Sectors(64);
            },
            ("max_hw_sectors", 64),
        ),
        (|l| l.max_user_sectors = Sectors(4), ("max_user_sectors", 4)),
        (|l| l.max_hw_sectors = Sectors(1 << 32), ("max_hw_sectors", 1 << 32)),
        (|l| l.seg_boundary_mask = 2047, ("seg_boundary_mask", 2047)),
        (|l| l.max_segment_size = Bytes(512), ("max_segment_size", 512)),
        (|l| l.dma_alignment = 8191, ("dma_alignment", 8191)),
        (|l| l.max_hw_wzeroes_unmap_sectors = Sectors(5), ("max_hw_wzeroes_unmap_sectors", 5)),
        (|l| l.max_open_zones = 3, ("max_open_zones", 3)),
        (|l| l.zone_write_granularity = Bytes(512), ("zone_write_granularity", 512)),
        (
            |l| {
                l.features = Features::ZONED;
                l.max_active_zones = 4;
                l.max_open_zones = 5;
            },
            ("max_open_zones", 5),
        ),
    ];
    for (change, expected) in rows {
        assert_eq!(refused(change), expected);
    }
}

#[test]
fn max_sectors_follows_hardware_device_user_and_the_cap() {
    let hw = |hw, dev, user, opt| {
        valid(|l| {
            l.max_hw_sectors = Sectors(hw);
            l.max_dev_sectors = Sectors(dev);
            l.max_user_sectors = Sectors(user);
            l.io_opt = Bytes(opt);
        })
        .max_sectors
        .0
    };
    assert_eq!(hw(65536, 0, 0, 0), 8192, "the cap of 4 MiB");
    assert_eq!(hw(65536, 0, 16384, 0), 16384, "the user may raise it");
    assert_eq!(hw(1024, 0, 16384, 0), 1024, "but not above the hardware");
    assert_eq!(hw(1024, 512, 0, 0), 512, "nor above the device");
    assert_eq!(hw(65536, 0, 0, 8 << 20), 16384, "a large io_opt raises it");
    let block_4k = valid(|l| l.logical_block_size = Bytes(4096));
    assert_eq!((block_4k.max_sectors.0, block_4k.max_hw_sectors.0), (248, 248), "whole logical blocks");
    let io_min = valid(|l| {
        l.max_hw_sectors = Sectors(65536);
        l.io_min = Bytes::mib(6);
    });
    assert_eq!(io_min.max_sectors.0, 12288, "and so does a large io_min");
}

#[test]
fn block_sizes_raise_the_limits_that_depend_on_them() {
    let limits = valid(|l| {
        l.logical_block_size = Bytes(4096);
        l.physical_block_size = Bytes(512);
        l.io_opt = Bytes(10_000);
        l.max_hw_discard_sectors = Sectors(100);
        l.discard_granularity = Bytes(512);
    });
    assert_eq!(limits.physical_block_size, Bytes(4096));
    assert_eq!(limits.io_min, Bytes(4096));
    assert_eq!(limits.io_opt, Bytes(8192), "rounded down");
    assert_eq!(limits.discard_granularity, Bytes(4096));
}

#[test]
fn a_virtual_boundary_removes_the_segment_size() {
    assert_eq!(valid(|l| l.virt_boundary_mask = 4095).max_segment_size, UNLIMITED_BYTES);
}

#[test]
fn a_driver_without_discard_has_no_granularity() {
    assert_eq!(valid(|l| l.discard_granularity = Bytes(4096)).discard_granularity, Bytes::ZERO);
    let user_off = valid(|l| {
        l.max_hw_discard_sectors = Sectors(100);
        l.max_user_discard_sectors = Sectors(0);
    });
    assert_eq!((user_off.max_discard_sectors.0, user_off.discard_granularity.0), (0, 0));
}

#[test]
fn fua_without_a_write_cache_is_cleared() {
    assert_eq!(valid(|l| l.features = Features::FUA).features, Features::empty());
    let both = Features::FUA.union(Features::WRITE_CACHE);
    assert_eq!(valid(|l| l.features = both).features, both);
}

#[test]
fn an_alignment_offset_lies_within_a_physical_block() {
    let limits = valid(|l| {
        l.physical_block_size = Bytes(4096);
        l.alignment_offset = Bytes(4096 + 3584);
        l.misaligned = true;
    });
    assert_eq!((limits.alignment_offset, limits.misaligned), (Bytes(3584), false));
}

#[test]
fn a_zone_append_fits_the_zone_and_the_hardware() {
    let append = |hw_append| {
        valid(|l| {
            l.features = Features::ZONED;
            l.chunk_sectors = Sectors(4096);
            l.max_hw_sectors = Sectors(2048);
            l.max_hw_zone_append_sectors = Sectors(hw_append);
        })
    };
    assert_eq!(append(0).max_zone_append_sectors.0, 2048, "emulated");
    assert_eq!(append(1000).max_zone_append_sectors.0, 1000);
    assert_eq!(append(0).zone_write_granularity.0, 512);
}

fn atomic(change: impl FnOnce(&mut QueueLimits)) -> QueueLimits {
    valid(|l| {
        l.features = Features::ATOMIC_WRITES;
        l.max_hw_sectors = Sectors(1024);
        l.atomic_write_hw_max = Bytes::kib(64);
        l.atomic_write_hw_unit_min = Bytes::kib(4);
        l.atomic_write_hw_unit_max = Bytes::kib(64);
        change(l);
    })
}

#[test]
fn atomic_writes_with_inconsistent_limits_are_disabled() {
    let good = atomic(|_| {});
    assert_eq!((good.atomic_write_max_sectors.0, good.atomic_write_unit_max.0), (128, 65536));
    assert_eq!(atomic(|l| l.max_segments = 4).atomic_write_unit_max.0, 8192, "2 × 512 + 2 pages, rounded");
    type Row = (&'static str, fn(&mut QueueLimits));
    let rows: [Row; 8] = [
        ("no feature", |l| l.features = Features::empty()),
        ("unit_min no power of two", |l| l.atomic_write_hw_unit_min = Bytes(3000)),
        ("unit_max no power of two", |l| l.atomic_write_hw_unit_max = Bytes(60_000)),
        ("unit_min above unit_max", |l| l.atomic_write_hw_unit_max = Bytes(2048)),
        ("unit_max above max", |l| l.atomic_write_hw_max = Bytes::kib(32)),
        ("max above a chunk", |l| l.chunk_sectors = Sectors(64)),
        ("max above the boundary", |l| l.atomic_write_hw_boundary = Bytes::kib(32)),
        ("boundary no power of two", |l| l.atomic_write_hw_boundary = Bytes::kib(96)),
    ];
    for (why, change) in rows {
        let limits = atomic(change);
        assert_eq!((limits.atomic_write_max_sectors.0, limits.atomic_write_unit_max.0), (0, 0), "{why}");
    }
}

#[test]
fn most_maxima_stack_by_the_smaller_that_is_not_zero() {
    type Set = fn(&mut QueueLimits, u64);
    let rows: [(&str, Set); 11] = [
        ("max_sectors", |l, v| l.max_sectors.0 = v),
        ("max_user_sectors", |l, v| l.max_user_sectors.0 = v),
        ("max_hw_sectors", |l, v| l.max_hw_sectors.0 = v),
        ("max_dev_sectors", |l, v| l.max_dev_sectors.0 = v),
        ("max_secure_erase_sectors", |l, v| l.max_secure_erase_sectors.0 = v),
        ("max_hw_discard_sectors", |l, v| l.max_hw_discard_sectors.0 = v),
        ("max_segment_size", |l, v| l.max_segment_size.0 = v),
        ("seg_boundary_mask", |l, v| l.seg_boundary_mask = v),
        ("virt_boundary_mask", |l, v| l.virt_boundary_mask = v),
        ("max_segments", |l, v| l.max_segments = v as u16),
        ("max_discard_segments", |l, v| l.max_discard_segments = v as u16),
    ];
    for (name, set) in rows {
        for (top, bottom, both) in [(8192, 4096, 4096), (4096, 8192, 4096), (0, 4096, 4096), (4096, 0, 4096)]
        {
            let (mut upper, mut lower) = (QueueLimits::stacking(), QueueLimits::stacking());
            set(&mut upper, top);
            set(&mut lower, bottom);
            upper.stack(&lower, Sectors(0)).expect("aligned");
            assert_eq!(upper.value(name), Some(both), "{name} of {top} over {bottom}");
        }
    }
}

#[test]
fn write_zeroes_is_unsupported_when_one_child_lacks_it() {
    let able = valid(|l| l.max_write_zeroes_sectors = Sectors(1000));
    let unable = valid(|_| {});
    assert_eq!(stacked(&[&able]).max_write_zeroes_sectors, Sectors(1000));
    assert_eq!(stacked(&[&able, &unable]).max_write_zeroes_sectors, Sectors(0));
    assert_eq!(stacked(&[&unable, &able]).max_write_zeroes_sectors, Sectors(0));
}

#[test]
fn unmapping_write_zeroes_and_zone_appends_stack_by_plain_min_too() {
    let able = valid(|l| {
        l.max_write_zeroes_sectors = Sectors(1000);
        l.max_hw_wzeroes_unmap_sectors = Sectors(1000);
        l.max_hw_zone_append_sectors = Sectors(70);
    });
    let above = stacked(&[&able]);
    assert_eq!((above.max_hw_wzeroes_unmap_sectors.0, above.max_hw_zone_append_sectors.0), (1000, 70));
    let above = stacked(&[&able, &valid(|_| {})]);
    assert_eq!((above.max_hw_wzeroes_unmap_sectors.0, above.max_hw_zone_append_sectors.0), (0, 0));
}

#[test]
fn io_opt_stacks_by_lcm() {
    let opt = |bytes| valid(|l| l.io_opt = Bytes(bytes));
    assert_eq!(stacked(&[&opt(4096 * 3), &opt(4096 * 4)]).io_opt, Bytes(4096 * 12));
    assert_eq!(stacked(&[&opt(0), &opt(8192)]).io_opt, Bytes(8192), "0 is no preference");
    let huge = stacked(&[&opt((1 << 31) - 512), &opt(1 << 30)]);
    assert_eq!(huge.io_opt, Bytes::ZERO, "a multiple beyond 32 bits is no preference");
}

#[test]
fn chunk_sectors_stack_by_gcd() {
    let chunk = |sectors| valid(|l| l.chunk_sectors = Sectors(sectors));
    assert_eq!(stacked(&[&chunk(24), &chunk(36)]).chunk_sectors, Sectors(12));
    assert_eq!(stacked(&[&chunk(0), &chunk(36)]).chunk_sectors, Sectors(36));
    assert_eq!(stacked(&[&chunk(36), &chunk(0)]).chunk_sectors, Sectors(36));
}

#[test]
fn chunks_that_are_no_physical_blocks_are_dropped_and_flagged() {
    let mut top = QueueLimits::stacking();
    let bottom = valid(|l| {
        l.chunk_sectors = Sectors(12);
        l.physical_block_size = Bytes(4096);
    });
    assert_eq!(top.stack(&bottom, Sectors(0)), Err(Misaligned::Chunk));
    assert_eq!((top.chunk_sectors, top.misaligned), (Sectors(0), true));
}

#[test]
fn misaligned_bottom_is_flagged() {
    let disk = valid(|l| l.physical_block_size = Bytes(4096));
    let mut top = stacked(&[&disk]);
    assert_eq!((top.misaligned, top.alignment_offset_shown()), (false, 0));
    // A partition from sector 63: its first physical block begins 512 bytes in; 4096 and 4608 do not fit.
    assert_eq!(top.stack(&disk, Sectors(63)), Err(Misaligned::Offset));
    assert!(top.misaligned);
    assert_eq!(top.alignment_offset_shown(), -1);
    assert!(stacked(&[&top]).misaligned, "misalignment is inherited");
}

#[test]
fn the_alignment_offset_of_a_child_is_inherited() {
    let disk = valid(|l| l.physical_block_size = Bytes(4096));
    assert_eq!(disk.alignment_offset_at(Sectors(63)), Bytes(512));
    let mut top = QueueLimits::stacking();
    // 512 over 4096 + 512 lines up: 4608 is nine times 512.
    assert_eq!(top.stack(&disk, Sectors(63)), Ok(()));
    assert_eq!(top.alignment_offset, Bytes(512));
}

#[test]
fn preferred_sizes_that_do_not_fit_the_larger_block_are_dropped_and_flagged() {
    let raid = |io_min, io_opt| {
        valid(|l| {
            l.io_min = Bytes(io_min);
            l.io_opt = Bytes(io_opt);
        })
    };
    let disk = valid(|l| l.physical_block_size = Bytes(4096));
    let mut top = stacked(&[&raid(512, 1536)]);
    assert_eq!(top.stack(&disk, Sectors(0)), Err(Misaligned::IoOpt));
    assert_eq!((top.io_opt.0, top.misaligned), (0, true));
    let mut top = stacked(&[&raid(6144, 0)]);
    assert_eq!(top.stack(&disk, Sectors(0)), Err(Misaligned::IoMin));
    assert_eq!(top.io_min.0, 4096);
}

#[test]
fn block_sizes_and_memory_alignment_stack_by_the_larger() {
    let small = valid(|l| l.dma_alignment = 3);
    let large = valid(|l| {
        l.logical_block_size = Bytes(4096);
        l.physical_block_size = Bytes(8192);
        l.io_min = Bytes(16384);
        l.dma_alignment = 1023;
    });
    let top = stacked(&[&small, &large]);
    assert_eq!((top.logical_block_size.0, top.physical_block_size.0, top.io_min.0), (4096, 8192, 16384));
    assert_eq!(top.dma_alignment, 1023);
    assert_eq!(top.max_sectors.0, 248, "whole blocks of the larger");
}

#[test]
fn sizes_never_fall_below_a_page() {
    let mut bottom = QueueLimits::stacking();
    bottom.max_sectors = Sectors(3);
    assert_eq!(stacked(&[&bottom]).max_sectors, Sectors(8));
}

#[test]
fn discard_takes_the_coarsest_granularity_and_the_common_alignment() {
    let disk = |granularity, alignment| {
        valid(|l| {
            l.max_hw_discard_sectors = Sectors(granularity >> 4);
            l.discard_granularity = Bytes(granularity);
            l.discard_alignment = Bytes(alignment);
        })
    };
    let top = stacked(&[&disk(65536, 4096), &disk(32768, 8192)]);
    assert_eq!((top.discard_granularity.0, top.discard_alignment.0), (65536, 8192));
    assert_eq!(top.max_hw_discard_sectors.0, 2048);
    let mut shifted = QueueLimits::stacking();
    shifted.stack(&disk(65536, 0), Sectors(8)).expect("aligned");
    assert_eq!(shifted.discard_alignment.0, 65536 - 4096);
}

#[test]
fn a_child_without_discard_does_not_disable_it() {
    let able = valid(|l| l.max_hw_discard_sectors = Sectors(1000));
    let mut top = stacked(&[&able, &valid(|_| {})]);
    top.validate().expect("valid");
    assert_eq!(top.max_discard_sectors, Sectors(1000));
}

#[test]
fn features_are_inherited_or_shared() {
    let cache =
        valid(|l| l.features = Features::WRITE_CACHE.union(Features::NOWAIT).union(Features::SYNCHRONOUS));
    let plain = valid(|l| l.features = Features::NOWAIT.union(Features::ROTATIONAL));
    let mut top = QueueLimits::stacking();
    top.features = Features::NOWAIT.union(Features::POLL);
    top.stack(&cache, Sectors(0)).expect("aligned");
    top.stack(&plain, Sectors(0)).expect("aligned");
    assert_eq!(
        top.features,
        Features::WRITE_CACHE.union(Features::ROTATIONAL).union(Features::NOWAIT),
        "one cache is a cache; only one polls, so none; being synchronous is not inherited"
    );
}

#[test]
fn zone_limits_are_zeroed_above_a_device_that_is_not_zoned() {
    let mut bottom = valid(|_| {});
    bottom.zone_write_granularity = Bytes(4096);
    let mut top = QueueLimits::stacking();
    top.max_zone_append_sectors = Sectors(9);
    top.stack(&bottom, Sectors(0)).expect("aligned");
    assert_eq!((top.zone_write_granularity.0, top.max_zone_append_sectors.0), (0, 0));
    bottom.features = Features::ZONED;
    top.stack(&bottom, Sectors(0)).expect("aligned");
    assert_eq!(top.zone_write_granularity.0, 4096);
}

#[test]
fn atomic_writes_start_from_the_first_child_and_are_narrowed_by_the_others() {
    let wide = atomic(|_| {});
    let narrow = atomic(|l| {
        l.atomic_write_hw_max = Bytes::kib(32);
        l.atomic_write_hw_unit_max = Bytes::kib(16);
        l.atomic_write_hw_unit_min = Bytes::kib(8);
    });
    let units = |l: &QueueLimits| {
        [l.atomic_write_hw_unit_min, l.atomic_write_hw_unit_max, l.atomic_write_hw_max].map(|b| b.0 >> 10)
    };
    assert_eq!(units(&stacked(&[&wide])), [4, 64, 64]);
    assert_eq!(units(&stacked(&[&wide, &narrow])), [8, 16, 32]);
    assert_eq!(units(&stacked(&[&wide, &valid(|_| {})])), [0, 0, 0], "one that cannot is enough");
    let disjoint = atomic(|l| l.atomic_write_hw_unit_min = Bytes::kib(64));
    assert_eq!(units(&stacked(&[&narrow, &disjoint])), [0, 0, 0], "no common unit");
    let bounded = atomic(|l| l.atomic_write_hw_boundary = Bytes::kib(64));
    assert_eq!(units(&stacked(&[&bounded])), [4, 64, 64]);
    assert_eq!(units(&stacked(&[&wide, &bounded])), [0, 0, 0], "boundaries must agree");
    let mut off_unit = QueueLimits::stacking();
    off_unit.stack(&wide, Sectors(4)).expect("aligned");
    assert_eq!(units(&off_unit), [0, 0, 0], "the start must be aligned to the unit");
}

#[test]
fn atomic_writes_fit_a_chunk_that_is_no_power_of_two() {
    let mut top = QueueLimits::stacking();
    top.chunk_sectors = Sectors(48);
    top.stack(&atomic(|_| {}), Sectors(0)).expect("aligned");
    assert_eq!((top.atomic_write_hw_unit_max, top.atomic_write_hw_max), (Bytes::kib(8), Bytes::kib(24)));
}

fn set(text: &str) -> Result<QueueLimits, String> {
    let overrides: LimitOverrides = text.parse().map_err(|e: ParseLimitsError| e.to_string())?;
    assert_eq!(
        overrides.to_string().parse::<LimitOverrides>().map(|o| o.to_string()),
        Ok(overrides.to_string())
    );
    let mut limits = valid(|l| l.max_hw_sectors = Sectors(4096));
    overrides.apply(&mut limits).map_err(|e| e.to_string())?;
    Ok(limits)
}

#[test]
fn a_user_sets_limits_by_the_kernels_names() {
    let limits =
        set("max_sectors=255,max_segments=64,max_segment_size=64K,seg_boundary_mask=0xffff").expect("ok");
    assert_eq!((limits.max_sectors.0, limits.max_segments), (255, 64));
    assert_eq!((limits.max_segment_size.0, limits.seg_boundary_mask), (65536, 65535));
    assert_eq!(set("max_sectors=1M").expect("ok").max_sectors.0, 2048);
    let discard = set("max_hw_discard_sectors=1G,max_discard_sectors=64").expect("ok");
    assert_eq!(discard.max_discard_sectors.0, 64);
    assert_eq!(set("").expect("ok"), valid(|l| l.max_hw_sectors = Sectors(4096)));
}

#[test]
fn an_unknown_limit_is_refused_with_a_list_of_known_ones() {
    let error = set("max_sector=1").expect_err("unknown");
    for part in ["max_sector\"", "max_sectors,", "chunk_sectors", "atomic_write_hw_unit_max"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    for (text, part) in [
        ("atomic_write_max_sectors=8", "set atomic_write_hw_max"),
        ("zone_append_max_bytes=4096", "zone_append_max_bytes is read-only"),
        ("features=3", "read-only"),
        ("write_cache=0", "read-only: a flush that is not passed on"),
        ("max_integrity_segments=1", "integrity"),
        ("write_stream_granularity=4096", "write streams"),
    ] {
        let error = set(text).expect_err(text);
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn a_user_sets_limits_by_the_names_and_units_of_sysfs() {
    let limits = set("max_sectors_kb=127,max_segments=128,minimum_io_size=8K,rotational=1").expect("ok");
    assert_eq!((limits.max_sectors.0, limits.max_segments, limits.io_min.0), (254, 128, 8192));
    assert!(limits.features.contains(Features::ROTATIONAL));
    assert_eq!(
        set("max_hw_discard_sectors=1G,discard_max_bytes=64K").expect("ok").max_discard_sectors.0,
        128
    );
    assert_eq!(set("max_sectors_kb=1M").expect("ok").max_sectors.0, 2048);
    assert!(set("max_sectors_kb=127,max_sectors=255").expect_err("twice").contains("twice"));
    for attribute in crate::Attribute::ALL {
        assert_eq!(attribute.shown(8) == 8, attribute.scale == crate::Scale::Same, "{}", attribute.name);
        attribute.field();
    }
}

/// As `queue_max_sectors_store` and `blk_validate_limits` do since Linux 6.9.
#[test]
fn max_sectors_is_capped_to_the_device_and_0_restores_the_default() {
    assert_eq!(set("max_sectors=8192").expect("capped").max_sectors.0, 4096);
    assert_eq!(set("max_hw_sectors=65536,max_sectors=0").expect("the default").max_sectors.0, 8192);
}

#[test]
fn later_overrides_win() {
    let parse = |text: &str| text.parse::<LimitOverrides>().expect(text);
    let both = parse("max_sectors=255,max_segments=128").then(&parse("io_min=8K,max_sectors_kb=64"));
    assert_eq!(both.to_string(), "max_segments=128,io_min=8192,max_sectors=128");
    assert_eq!(both.names().collect::<Vec<_>>(), ["max_segments", "io_min", "max_sectors"]);
}

#[test]
fn limits_beyond_the_device_below_are_refused() {
    let below = valid(|l| {
        l.max_hw_sectors = Sectors(4096);
        l.logical_block_size = Bytes(4096);
        l.virt_boundary_mask = 4095;
        l.chunk_sectors = Sectors(64);
    });
    let over = |text: &str| {
        let mut limits = below.clone();
        text.parse::<LimitOverrides>().expect(text).apply_over(&mut limits).map(|()| limits)
    };
    for refused in [
        "max_hw_sectors=8192",
        "max_segments=129",
        "logical_block_size=512",
        "virt_boundary_mask=511",
        "chunk_sectors=48",
        "chunk_sectors=0",
        "max_write_zeroes_sectors=8",
        "max_hw_discard_sectors=8",
        "atomic_write_hw_max=4096",
    ] {
        let error = over(refused).expect_err(refused).to_string();
        assert!(error.contains("device below"), "{refused}: {error}");
    }
    for taken in ["max_hw_sectors=255", "max_segments=1", "chunk_sectors=16", "virt_boundary_mask=8191"] {
        over(taken).expect(taken);
    }
}

#[test]
fn malformed_limits_are_refused_with_a_reason() {
    for (text, part) in [
        ("max_sectors", "not name=value"),
        ("max_sectors=255,max_sectors=8", "twice"),
        ("max_sectors=lots", "neither sectors"),
        ("max_sectors=1.5K,max_segments=many", "whole number"),
        ("max_sectors=0.125K", "whole number of sectors"),
        ("max_segments=65536", "more than"),
        ("seg_boundary_mask=0xzz", "mask"),
        ("max_segment_size=-1", "size"),
        ("max_sectors=4", "at least 8 sectors"),
    ] {
        let error = set(text).expect_err(text);
        assert!(error.contains(part), "{text}: {error}");
    }
}
