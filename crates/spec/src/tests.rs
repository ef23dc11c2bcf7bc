use super::*;
use backends::{Knobs, Sharing, ZonedSpec};
use block::{Bytes, Sectors};
use proptest::prelude::*;
use proto::nbd::Uri;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn stack(text: &str) -> Result<StackSpec, SpecError> {
    text.parse()
}

fn why(text: &str) -> String {
    stack(text).expect_err(text).to_string()
}

#[test]
fn a_file_parses_with_all_its_options() {
    let text = "file:disk.img,direct=off,offset=1M,sizelimit=2G,block=4096,size=10G,create,share";
    let StackSpec::File(file) = stack(text).unwrap() else { panic!() };
    assert_eq!(file.file.path, Path::new("disk.img"));
    assert_eq!((file.file.direct, file.file.offset), (Direct::Off, Bytes::mib(1)));
    assert_eq!((file.file.sizelimit, file.file.block), (Some(Bytes::gib(2)), Some(4096)));
    assert_eq!((file.file.create, file.file.share, file.file.ro), (Some(Bytes::gib(10)), true, false));
    assert_eq!(file.to_string(), text);
}

#[test]
fn an_image_is_created_with_the_options_of_qemu_img() {
    let text =
        "file:vm.qcow2,size=10G,create,cluster_size=4096,backing_file=a,,b.img,backing_fmt=raw,format=qcow2";
    let StackSpec::File(file) = stack(text).unwrap() else { panic!() };
    let creation = file.creation().expect("an image");
    assert_eq!((creation.size, creation.cluster_size), (Bytes::gib(10), Some(4096)));
    assert_eq!(creation.backing_file, Some((PathBuf::from("a,b.img"), Format::Raw)));
    assert_eq!(file.to_string(), text);
    let StackSpec::File(raw) = stack("file:d,size=10G,create").unwrap() else { panic!() };
    assert_eq!(raw.creation(), None);
}

#[test]
fn an_image_that_cannot_be_created_is_refused_with_a_correction() {
    for (options, expected) in [
        ("create,format=qcow2", "create needs a size (write size=10G,create)"),
        ("size=1G,format=qcow2", "size goes with create"),
        ("size=1G,create,format=qcow2,ro", "cannot be created read-only"),
        ("size=1G,create,format=vmdk", "vmdk images are not created (use format=qcow2, or leave"),
        ("size=1G,create,format=probe", "no content to detect a format by (use format=raw or format=qcow2)"),
        (
            "size=1G,create,format=qcow2,cluster_size=3000",
            "a cluster cannot be 3000 bytes (use a power of two",
        ),
        ("size=1G,create,format=qcow2,cluster_size=4M", "a cluster cannot be 4M bytes"),
        ("size=1G,create,cluster_size=4K", "cluster_size means nothing to a raw file (add format=qcow2"),
        (
            "size=1G,create,format=raw,backing_file=a,backing_fmt=raw",
            "backing_file means nothing to a raw file",
        ),
        (
            "format=qcow2,cluster_size=4K",
            "cluster_size goes with create (write size=10G,create,format=qcow2)",
        ),
        (
            "size=1G,create,format=qcow2,backing_file=a",
            "backing_file needs its format (add backing_fmt=raw or",
        ),
        ("size=1G,create,format=qcow2,backing_fmt=raw", "backing_fmt goes with backing_file"),
        ("size=1G,create,format=qcow2,backing_file=a,backing_fmt=vmdk", "backing_fmt does not know \"vmdk\""),
        ("size=1G,create,format=qcow2,offset=4096", "offset means nothing to a qcow2 image (leave it out)"),
        (
            "size=1G,create,format=qcow2,snapshot=a",
            "has no snapshots (leave out snapshot, or create and size)",
        ),
        ("size=1G,create,format=qcow2,block=4096", "block means nothing to a qcow2 image"),
        (
            "size=3P,create,format=qcow2",
            "too large for clusters of 65536 bytes, which reach 2251799813685248 bytes",
        ),
        ("size=1T,create,format=qcow2,cluster_size=512", "too large for clusters of 512 bytes"),
    ] {
        let why = why(&format!("file:d,{options}"));
        assert!(why.contains(expected), "{options}: {why}");
    }
    assert!(stack("file:d,size=2P,create,format=qcow2").is_ok());
    assert!(stack("file:d,size=2E,create,format=qcow2,cluster_size=2M").is_ok());
}

#[test]
fn a_doubled_comma_belongs_to_the_path() {
    let StackSpec::File(file) = stack("file:/a,,b,,,ro").unwrap() else { panic!() };
    assert_eq!((file.file.path.as_path(), file.file.ro), (Path::new("/a,b,"), true));
    assert_eq!(file.to_string(), "file:/a,,b,,,ro");
}

#[test]
fn zone_options_need_zoned() {
    let StackSpec::Null(null) = stack("null:1G,zoned,zone_size=4M,zone_readonly=0+8192").unwrap() else {
        panic!()
    };
    let zoned = null.zoned.unwrap();
    assert_eq!((zoned.zone_size, zoned.read_only), (Bytes::mib(4), vec![Sectors(0), Sectors(8192)]));
    assert!(why("null:1G,zone_size=4M").contains("zone_size goes with zoned"));
    assert!(why("null:1G,zoned,zone_offline=1M").contains("\"1M\" is not the number of a sector"));
}

#[test]
fn null_zero_and_error_default_to_null_blks_size() {
    for kind in ["null", "zero", "error"] {
        assert_eq!(stack(&format!("{kind}:")).unwrap().to_string(), format!("{kind}:250G"));
    }
    assert_eq!(why("ram:"), "\"\" is not a size: it does not start with a digit (for example ram:1G)");
}

#[test]
fn a_completion_time_implies_the_timer() {
    let StackSpec::Null(null) = stack("null:1G,completion=5ms").unwrap() else { panic!() };
    assert_eq!((null.irqmode, null.completion), (IrqMode::Timer, Duration::from_millis(5)));
    assert!(why("null:1G,irqmode=none,completion=5ms").contains("irqmode=timer"));
}

#[test]
fn an_invalid_stack_is_refused_with_a_correction() {
    for (text, expected) in [
        ("disk.img", "\"disk.img\" has no kind (for a file write file:disk.img)"),
        ("rbd:x", "names no pool and image"),
        ("nbd:host", "is not an NBD URI"),
        ("nbd:nbd://host/x,timeout=5", "is not a time"),
        ("nbd:nbd://me@host/x", "a user is for keys"),
        ("rbd:pool/", "has an empty name"),
        ("tape:x", "unknown backend \"tape\" (backends: file:PATH"),
        ("file:", "file: has no path (write file:PATH)"),
        ("file:x,dirct=on", "file has no option \"dirct\": did you mean direct? (file has direct, offset"),
        ("file:x,format=qcow", "option format does not know \"qcow\" (did you mean qcow2? use one of raw, "),
        ("null:1G,irqmode=timr", "(did you mean timer? use one of none, "),
        ("file:x,direct=maybe", "option direct does not know \"maybe\" (use one of auto, on, off)"),
        ("file:x,ro=1", "option ro takes no value (write ro alone)"),
        ("file:x,ro,ro", "option ro is given twice (leave one out)"),
        ("file:x,offset", "option offset needs a value (write offset=VALUE)"),
        ("file:x,offset=-1", "option offset"),
        ("file:x,block=1000", "a block cannot be 1000 bytes"),
        ("file:x,size=1G", "size goes with create"),
        ("file:x,create", "create needs a size (write size=10G,create)"),
        ("file:x,size=1G,create,ro", "a file cannot be created read-only"),
        ("file:x,partscan=1", "option partscan takes no value"),
        ("file:x,", "an item between two commas is empty"),
        ("file:x,block=1M", "a block cannot be 1M bytes"),
        ("ram:1G,block=4096", "ram has no option \"block\" (ram has hugepages"),
        ("ram:100", "ram cannot be 100 bytes"),
        ("ram:15E", "ram cannot be 15E bytes"),
        ("null:1G,completion=5", "\"5\" is not a time"),
        ("zero:1G,ro", "zero has no option \"ro\" (zero has no options)"),
    ] {
        assert!(why(text).contains(expected), "{text}: {}", why(text));
    }
}

#[test]
fn names_are_derived_from_files_and_kinds() {
    for (text, name) in [
        ("file:/srv/disk.img", "disk"),
        ("file:/dev/sda1", "sda1"),
        ("file:a b.img", "a-b"),
        ("file:.hidden", "hidden"),
        ("file:/srv/..", "file"),
        ("ram:1G", "ram"),
        ("null:", "null"),
    ] {
        assert_eq!(stack(text).unwrap().derived_name().as_str(), name, "{text}");
    }
}

#[test]
fn a_taken_name_is_numbered() {
    let name = stack("ram:1G").unwrap().derived_name();
    assert_eq!(name.unique(|_| false).as_str(), "ram");
    assert_eq!(name.unique(|n| n == "ram" || n == "ram-2").as_str(), "ram-3");
    let long: DeviceName = "x".repeat(64).parse().unwrap();
    assert_eq!(long.unique(|n| n.ends_with('x')).as_str().len(), 64);
}

#[test]
fn a_device_name_has_safe_characters_only() {
    for text in ["disk", "a.b_c+d-2", "7"] {
        assert_eq!(text.parse::<DeviceName>().unwrap().as_str(), text);
    }
    for text in ["", ".x", "-x", "a/b", "a b", "ü", &"x".repeat(65)] {
        assert!(text.parse::<DeviceName>().is_err(), "{text}");
    }
}

#[test]
fn nbd_addresses_parse_back_from_their_text() {
    for (text, back, uri) in [
        ("unix:/run/d.sock", "unix:/run/d.sock", "nbd+unix:///disk?socket=/run/d.sock"),
        ("unix:a b", "unix:a b", "nbd+unix:///disk?socket=a%20b"),
        ("tcp:localhost:10810", "tcp:localhost:10810", "nbd://localhost:10810/disk"),
        ("tcp:10.0.0.1", "tcp:10.0.0.1:10809", "nbd://10.0.0.1:10809/disk"),
        ("tcp::0", "tcp::0", "nbd://localhost:0/disk"),
        ("tcp:[::1]:7", "tcp:[::1]:7", "nbd://[::1]:7/disk"),
        ("tcp:[::1]", "tcp:[::1]:10809", "nbd://[::1]:10809/disk"),
    ] {
        let address: NbdAddress = text.parse().unwrap();
        assert_eq!(address.to_string(), back);
        assert_eq!(nbd_uri(&address, "disk", TlsMode::Off), uri);
    }
    let address: NbdAddress = "tcp:h:1".parse().unwrap();
    assert_eq!(nbd_uri(&address, "", TlsMode::Require), "nbds://h:1/");
    let long = format!("unix:/{}", "x".repeat(107));
    for text in
        ["", "/run/x", "unix:", "tcp:h:x", "tcp:h:65536", "tcp:::1:10809", "tcp:a/b:1", "tcp:[::1]7x", &long]
    {
        assert!(text.parse::<NbdAddress>().is_err(), "{text}");
    }
}

#[test]
fn tls_needs_certificates_and_certificates_imply_tls() {
    let certificates = || Some(PathBuf::from("/pki"));
    assert_eq!(TlsSpec::new(None, None, false).unwrap(), TlsSpec::default());
    assert_eq!(TlsSpec::new(None, certificates(), false).unwrap().mode, TlsMode::Require);
    assert_eq!(TlsSpec::new(None, certificates(), true).unwrap().mode, TlsMode::Require);
    assert_eq!(TlsSpec::new(Some(TlsMode::On), certificates(), false).unwrap().mode, TlsMode::On);
    for mode in [TlsMode::On, TlsMode::Off] {
        let why = TlsSpec::new(Some(mode), certificates(), true).unwrap_err().to_string();
        assert!(why.contains("tls-verify-peer") && why.contains("use tls require"), "{why}");
    }
    assert!(TlsSpec::new(Some(TlsMode::Require), None, false).is_err());
    assert!(TlsSpec::new(None, None, true).is_err());
    let files = TlsSpec::new(Some(TlsMode::Require), certificates(), true).unwrap().files().unwrap();
    assert_eq!(files.1, Path::new("/pki/server-key.pem"));
    assert_eq!(files.2.as_deref(), Some(Path::new("/pki/ca-cert.pem")));
    assert!(TlsSpec::new(Some(TlsMode::Off), certificates(), false).is_err());
}

#[test]
fn a_layer_is_known_and_has_limits() {
    let layer: LayerSpec = "split,max_sectors=255,max_segments=4".parse().unwrap();
    assert_eq!(layer, LayerSpec::Split("max_sectors=255,max_segments=4".to_owned()));
    assert_eq!(layer.to_string(), "split,max_sectors=255,max_segments=4");
    for text in [
        "part,2",
        "part,LABEL=ro,,ot",
        "part,PARTUUID=c0ffee-01",
        "cow,file=/a,,b.img",
        "cow,file=o,direct=on,chunk=64K,size=1G,create",
    ] {
        assert_eq!(text.parse::<LayerSpec>().unwrap().to_string(), text);
    }
    for text in [
        "",
        "split",
        "part",
        "part,",
        "part,0",
        "part,1,2",
        "cow",
        "cow,file=",
        "cow,overlay.img",
        "cow,file=o,chunk=64K",
        "cow,file=o,chunk=5000,create",
        "cow,file=o,size=1000,create",
        "sleep,read=5ms",
        "split,",
        "split,max_sectors",
        "split,=4",
        "split,max_sektors=4",
        "split,max_sectors=x",
    ] {
        assert!(text.parse::<LayerSpec>().is_err(), "{text}");
    }
}

#[test]
fn a_time_needs_a_unit() {
    for (text, nanos) in [("0", 0), ("5ns", 5), ("10us", 10_000), ("3ms", 3_000_000), ("2s", 2_000_000_000)] {
        let time = parse_time(text).unwrap();
        assert_eq!(time, Duration::from_nanos(nanos));
        assert_eq!(format_time(time), text);
    }
    for (text, seconds) in [("2m", "120s"), ("1h", "3600s")] {
        assert_eq!(format_time(parse_time(text).unwrap()), seconds);
    }
    for text in ["", "5", "ms", "1.5ms", "5d", "m", "-1s", "99999999999s", "6000000h"] {
        assert!(parse_time(text).is_err(), "{text}");
    }
}

fn any_block() -> impl Strategy<Value = Option<u32>> {
    proptest::option::of((9u32..=16).prop_map(|shift| 1 << shift))
}

fn any_file() -> impl Strategy<Value = StackSpec> {
    let direct = prop_oneof![Just(Direct::Auto), Just(Direct::On), Just(Direct::Off)];
    let size = || proptest::option::of((1u64..1 << 40).prop_map(|n| Bytes(n * 512)));
    let part = proptest::option::of(prop_oneof![
        (1u32..200).prop_map(Selector::Number),
        "[a-z, =]{1,12}".prop_map(Selector::Label),
        "[a-f0-9-]{1,36}".prop_map(Selector::Uuid),
    ]);
    let flags = any::<[bool; 5]>();
    let format = prop_oneof![
        Just((FileFormat::Unspecified, Backing::Beside)),
        Just((FileFormat::Given(Format::Raw), Backing::Beside)),
        Just((FileFormat::Probe, Backing::None)),
        Just((FileFormat::Given(Format::Vmdk), Backing::Any)),
        Just((FileFormat::Given(Format::Qcow2), Backing::Listed(vec!["/a, b".into(), "c".into()]))),
    ];
    ("[a-z=:,/\\\\ .]{1,20}", direct, 0u64..512, size(), any_block(), flags, part, format).prop_flat_map(
        move |(path, direct, offset, sizelimit, block, flags, part, (format, backing))| {
            let [ro, share, autosize, autoclear, partscan] = flags;
            let create = if ro { Just(None).boxed() } else { size().boxed() };
            create.prop_map(move |create| {
                let offset = if create.is_some() { Bytes::ZERO } else { Bytes(offset * 100) };
                let path = PathBuf::from(&path);
                // An image is created where every option that only a raw file has is left out.
                let is_image = format == FileFormat::Given(Format::Qcow2)
                    && create.is_some_and(|size| size < Bytes::gib(1 << 20))
                    && (sizelimit, block, autosize) == (None, None, false)
                    && direct != Direct::On;
                let backing_file = is_image.then(|| (PathBuf::from("a, b"), Format::Raw));
                let is_raw = create.is_some() && !is_image;
                StackSpec::File(DiskFileSpec {
                    file: FileSpec {
                        path,
                        direct,
                        offset,
                        sizelimit,
                        block,
                        ro,
                        create,
                        share,
                        sync: false,
                        stays_raw: false,
                    },
                    part: part.clone(),
                    format: if is_raw { FileFormat::Given(Format::Raw) } else { format },
                    snapshot: (format == FileFormat::Probe && create.is_none()).then(|| "a, b".to_owned()),
                    backing: if is_raw { Backing::Beside } else { backing.clone() },
                    cluster_size: is_image.then_some(65536),
                    backing_file,
                    autosize,
                    autoclear,
                    partscan,
                })
            })
        },
    )
}

fn any_nbd() -> impl Strategy<Value = StackSpec> {
    let uri = prop_oneof![
        ("[a-z.]{1,9}", any::<u16>(), "[a-z, /]{0,9}")
            .prop_map(|(host, port, name)| Uri::tcp(host, port, name)),
        ("/[a-z, ]{1,9}", "[a-z, /]{0,9}").prop_map(|(socket, name)| Uri::unix(socket, name)),
    ];
    (uri, any::<bool>(), any::<u32>(), any::<u32>(), any::<bool>()).prop_map(
        |(uri, tls, timeout, reconnect, ro)| {
            let time = |nanos: u32| Duration::from_nanos(nanos.into());
            let timeout = Some(time(timeout)).filter(|time| !time.is_zero());
            StackSpec::Nbd(NbdSpec { uri: Uri { tls, ..uri }, timeout, reconnect: time(reconnect), ro })
        },
    )
}

#[test]
fn an_nbd_backend_has_timeouts() {
    let StackSpec::Nbd(nbd) = stack("nbd:nbd+unix:///a?socket=/s").unwrap() else { panic!() };
    assert_eq!(
        (nbd.timeout, nbd.reconnect, nbd.ro),
        (Some(NBD_TIMEOUT_DEFAULT), NBD_RECONNECT_DEFAULT, false)
    );
    let StackSpec::Nbd(nbd) = stack("nbd:nbds://h/a,timeout=0,reconnect=5ms,ro").unwrap() else { panic!() };
    assert_eq!((nbd.timeout, nbd.reconnect, nbd.ro), (None, Duration::from_millis(5), true));
    assert!(nbd.uri.tls);
    let plain = stack("nbd:nbd://h/a?tls-certificates=/pki").unwrap_err().to_string();
    assert!(plain.contains("tls-certificates needs TLS") && plain.contains("write nbds:"), "{plain}");
    let rooted = stack("nbd:nbd+unix:///a?socket=s.sock").unwrap().rooted(Path::new("/etc/view"));
    assert_eq!(rooted.to_string(), "nbd:nbd+unix:///a?socket=/etc/view/s.sock");
    assert_eq!(rooted.derived_name().as_str(), "a");
}

fn any_null() -> impl Strategy<Value = StackSpec> {
    let irqmode = prop_oneof![Just(IrqMode::None), Just(IrqMode::Softirq), Just(IrqMode::Timer)];
    (1u64..1 << 40, irqmode, any::<u32>(), any::<bool>(), any_knobs()).prop_map(
        |(size, irqmode, nanos, memory_backed, knobs)| {
            let completion = match irqmode {
                IrqMode::Timer => Duration::from_nanos(nanos.into()),
                _ => Duration::from_micros(10),
            };
            let (size, zoned) = (Bytes(size * 65536), None);
            StackSpec::Null(NullSpec { size, irqmode, completion, memory_backed, zoned, knobs })
        },
    )
}

fn any_knobs() -> impl Strategy<Value = Knobs> {
    let fault = || {
        proptest::option::of(
            "[0-9]{1,3}:[0-9]{1,2}:[0-9]{1,3}:(-1|[0-9])".prop_map(|fault| fault.parse().unwrap()),
        )
    };
    let sharing = prop_oneof![Just(Sharing::Queue), Just(Sharing::Device), Just(Sharing::Process)];
    let number = || proptest::option::of(1u32..40000);
    (any::<[bool; 7]>(), (number(), number(), number(), number()), (fault(), fault(), fault()), sharing)
        .prop_map(|(flags, (mbps, hw_queue_depth, pages, max), (timeout, requeue, init_hctx), sharing)| {
            Knobs {
                blocksize: Bytes(if flags[0] { 4096 } else { 512 }),
                max_sectors: max.map(|max| Sectors(max.into())),
                virt_boundary: flags[1],
                rotational: flags[2],
                discard: flags[3],
                blocking: flags[4],
                cache_size: pages.map(|pages| Bytes(u64::from(pages) * 4096)),
                fua: flags[0],
                mbps,
                hw_queue_depth,
                sharing,
                badblocks: if flags[1] { "0-7+64-1000".parse().unwrap() } else { Default::default() },
                badblocks_once: flags[5],
                badblocks_partial_io: flags[6],
                timeout,
                requeue,
                init_hctx,
            }
        })
}

#[test]
fn a_missing_option_of_null_blk_is_refused_with_its_replacement() {
    for (item, fix) in [
        ("queue_mode=2", "multi-queue"),
        ("home_node=0", "thread"),
        ("no_sched", "--scheduler"),
        ("submit_queues=4", "--queues"),
        ("use_per_node_hctx=1", "--queues"),
        ("poll_queues=1", "--poll"),
        ("gb=1", "null:250G"),
        ("size=1", "null:250G"),
        ("bs=512", "blocksize"),
        ("nr_devices=2", "blockyard add"),
    ] {
        let why = why(&format!("null:1G,{item}"));
        assert!(why.contains("as null_blk has") && why.contains(fix), "{why}");
    }
    assert_eq!(stack("null:1G,irqmode=2").unwrap().to_string(), "null:1G,irqmode=timer,completion=10us");
    assert_eq!(stack("null:1G,irqmode=1").unwrap().to_string(), "null:1G,irqmode=softirq");
    assert!(why("null:1G,irqmode=3").contains("none, softirq, timer"));
    assert_eq!(stack("null:1G,badblocks=+8-15").unwrap().to_string(), "null:1G,badblocks=8-15");
}

#[test]
fn options_of_null_have_null_blks_names() {
    let StackSpec::Null(null) = stack("null:1G,completion_nsec=500,shared_tags,timeout=1,,2,,3,,-1").unwrap()
    else {
        panic!()
    };
    assert_eq!((null.irqmode, null.completion), (IrqMode::Timer, Duration::from_nanos(500)));
    assert_eq!(null.knobs.timeout.unwrap().to_string(), "1:2:3:-1");
    assert_eq!(null.knobs.sharing, Sharing::Process);
    for wrong in [
        "null:1G,completion=1us,completion_nsec=5",
        "null:1G,shared_tags,shared_tag_bitmap",
        "null:1G,badblocks=9-8",
        "null:1G,timeout=1",
        "null:1G,fua=maybe",
        "null:1G,mbps=fast",
    ] {
        assert!(stack(wrong).is_err(), "{wrong}");
    }
}

fn any_zoned() -> impl Strategy<Value = StackSpec> {
    let size = proptest::option::of((1u64..1 << 20).prop_map(|n| Bytes(n * 512)));
    let list = || proptest::collection::vec(any::<u64>().prop_map(Sectors), 0..3);
    let numbers = (12u32..40, any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>());
    (numbers, size, any::<bool>(), list(), list()).prop_map(
        |(numbers, zone_capacity, full, read_only, offline)| {
            let (shift, nr_conv, max_open, max_active, append_max) = numbers;
            let zone_size = Bytes(1 << shift);
            let append_max = Sectors(append_max.into());
            let zoned = ZonedSpec {
                zone_size,
                zone_capacity,
                nr_conv,
                max_open,
                max_active,
                append_max,
                full,
                read_only,
                offline,
            };
            let Ok(StackSpec::Null(null)) = stack("null:1T") else { panic!("null:1T is a stack") };
            StackSpec::Null(NullSpec { zoned: Some(zoned), ..null })
        },
    )
}

fn any_stack() -> impl Strategy<Value = StackSpec> {
    let size = || (1u64..1 << 40).prop_map(|n| Bytes(n * 65536));
    let ram = (size(), any::<bool>(), proptest::option::of("t10|ip|nvme|[1-9]")).prop_map(
        |(size, hugepages, word)| {
            let integrity = word.map(|word| word.parse().unwrap());
            StackSpec::Ram(RamSpec { size, hugepages, integrity })
        },
    );
    prop_oneof![
        any_file(),
        any_null(),
        any_zoned(),
        ram,
        any_nbd(),
        size().prop_map(StackSpec::Zero),
        size().prop_map(StackSpec::Error)
    ]
}

proptest! {
    #[test]
    fn every_stack_parses_back_from_its_text(stack in any_stack()) {
        let text = stack.to_string();
        prop_assert_eq!(text.parse::<StackSpec>(), Ok(stack), "{}", text);
    }

    #[test]
    fn no_text_panics(text in "(file:|ram:|null:|split,|unix:|tcp:)?.{0,40}") {
        let _ = text.parse::<StackSpec>();
        let _ = text.parse::<LayerSpec>();
        let _ = text.parse::<NbdAddress>();
        if let Ok(name) = text.parse::<StackSpec>().map(|stack| stack.derived_name()) {
            prop_assert_eq!(name.as_str().parse::<DeviceName>(), Ok(name.clone()));
        }
    }
}
