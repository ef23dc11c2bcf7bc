//! Checks the Rust ABI against the kernel's header: a C compiler reports every size, offset and value.
//!
//! The header is the system's, or the one named by `BLOCKYARD_UBLK_HEADER`. Items that an older header lacks
//! are skipped and listed.

#![forbid(unsafe_code)]

use blockyard_ublk::abi::*;
use std::collections::HashMap;
use std::io::Write;
use std::mem::offset_of;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const SYSTEM_HEADER: &str = "/usr/include/linux/ublk_cmd.h";

/// A Rust structure under its kernel name: its length, and the offset and length of each field.
struct Layout {
    name: &'static str,
    len: usize,
    fields: Vec<(&'static str, usize, usize)>,
}

/// Fields with their names in older headers.
const RENAMED: [(&str, &str); 1] = [("io_desc_size", "pad0")];

fn len_of<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! layout {
    ($kernel:literal, $ours:ident: $($field:ident),+) => {
        Layout {
            name: $kernel,
            len: size_of::<$ours>(),
            fields: vec![$((
                stringify!($field),
                offset_of!($ours, $field),
                len_of::<$ours, _>(|s| &s.$field),
            )),+],
        }
    };
}

fn layouts() -> Vec<Layout> {
    vec![
        layout!("ublksrv_ctrl_cmd", ControlCommand: dev_id, queue_id, len, addr, data, dev_path_len, pad, reserved),
        layout!("ublksrv_ctrl_dev_info", DeviceInfo: nr_hw_queues, queue_depth, state, io_desc_size,
            max_io_buf_bytes,
            dev_id, ublksrv_pid, pad1, flags, ublksrv_flags, owner_uid, owner_gid, reserved1, reserved2),
        layout!("ublk_shmem_buf_reg", ShmemBufferReg: addr, len, flags, reserved),
        layout!("ublksrv_io_desc", IoDescriptor: op_flags, nr_sectors, start_sector, addr),
        layout!("ublk_auto_buf_reg", AutoBufReg: index, flags, reserved0, reserved1),
        layout!("ublksrv_io_cmd", IoCommand: q_id, tag, result, addr),
        layout!("ublk_elem_header", ElementHeader: tag, buf_index, result),
        layout!("ublk_batch_io", BatchIo: q_id, flags, nr_elem, elem_bytes, reserved, reserved2),
        layout!("ublk_param_basic", ParamBasic: attrs, logical_bs_shift, physical_bs_shift, io_opt_shift,
            io_min_shift, max_sectors, chunk_sectors, dev_sectors, virt_boundary_mask),
        layout!("ublk_param_discard", ParamDiscard: discard_alignment, discard_granularity, max_discard_sectors,
            max_write_zeroes_sectors, max_discard_segments, reserved0),
        layout!("ublk_param_devt", ParamDevt: char_major, char_minor, disk_major, disk_minor),
        layout!("ublk_param_zoned", ParamZoned: max_open_zones, max_active_zones, max_zone_append_sectors, reserved),
        layout!("ublk_param_dma_align", ParamDmaAlign: alignment, pad),
        layout!("ublk_param_segment", ParamSegment: seg_boundary_mask, max_segment_size, max_segments, pad),
        layout!("ublk_param_integrity", ParamIntegrity: flags, max_integrity_segments, interval_exp, metadata_size,
            pi_offset, csum_type, tag_size, pad),
        layout!("ublk_params", Params: len, types, basic, discard, devt, zoned, dma, seg, integrity),
    ]
}

fn values() -> Vec<(String, u64)> {
    let mut all: Vec<(String, u64)> = Vec::new();
    for (feature, name) in Features::NAMED {
        all.push((format!("UBLK_F_{name}"), feature.0));
    }
    for op in ControlOp::ALL {
        all.push((format!("UBLK_U_CMD_{}", op.name()), op.code().into()));
        if let Some(code) = op.legacy_code() {
            all.push((format!("UBLK_CMD_{}", op.name()), code.into()));
        }
    }
    let mut add = |name: &str, value: u64| all.push((name.to_owned(), value));
    for (name, op) in [
        ("FETCH_REQ", IoOp::FetchReq),
        ("COMMIT_AND_FETCH_REQ", IoOp::CommitAndFetchReq),
        ("NEED_GET_DATA", IoOp::NeedGetData),
        ("REGISTER_IO_BUF", IoOp::RegisterIoBuf),
        ("UNREGISTER_IO_BUF", IoOp::UnregisterIoBuf),
        ("PREP_IO_CMDS", IoOp::PrepIoCmds),
        ("COMMIT_IO_CMDS", IoOp::CommitIoCmds),
        ("FETCH_IO_CMDS", IoOp::FetchIoCmds),
    ] {
        add(&format!("UBLK_U_IO_{name}"), op.code().into());
        if let Some(code) = op.legacy_code() {
            add(&format!("UBLK_IO_{name}"), code.into());
        }
    }
    for (name, op) in [
        ("READ", KernelOp::Read),
        ("WRITE", KernelOp::Write),
        ("FLUSH", KernelOp::Flush),
        ("DISCARD", KernelOp::Discard),
        ("WRITE_SAME", KernelOp::WriteSame),
        ("WRITE_ZEROES", KernelOp::WriteZeroes),
        ("ZONE_OPEN", KernelOp::ZoneOpen),
        ("ZONE_CLOSE", KernelOp::ZoneClose),
        ("ZONE_FINISH", KernelOp::ZoneFinish),
        ("ZONE_APPEND", KernelOp::ZoneAppend),
        ("ZONE_RESET_ALL", KernelOp::ZoneResetAll),
        ("ZONE_RESET", KernelOp::ZoneReset),
        ("REPORT_ZONES", KernelOp::ReportZones),
    ] {
        assert_eq!(KernelOp::from_number(op as u8), Some(op));
        add(&format!("UBLK_IO_OP_{name}"), op as u64);
    }
    for (name, flag) in [
        ("FAILFAST_DEV", IoFlags::FAILFAST_DEV),
        ("FAILFAST_TRANSPORT", IoFlags::FAILFAST_TRANSPORT),
        ("FAILFAST_DRIVER", IoFlags::FAILFAST_DRIVER),
        ("META", IoFlags::META),
        ("FUA", IoFlags::FUA),
        ("NOUNMAP", IoFlags::NOUNMAP),
        ("SWAP", IoFlags::SWAP),
        ("NEED_REG_BUF", IoFlags::NEED_REG_BUF),
        ("INTEGRITY", IoFlags::INTEGRITY),
        ("SHMEM_ZC", IoFlags::SHMEM_ZC),
    ] {
        add(&format!("UBLK_IO_F_{name}"), flag.0.into());
    }
    add("UBLK_S_DEV_DEAD", State::Dead as u64);
    add("UBLK_S_DEV_LIVE", State::Live as u64);
    add("UBLK_S_DEV_QUIESCED", State::Quiesced as u64);
    add("UBLK_S_DEV_FAIL_IO", State::FailIo as u64);
    add("UBLK_IO_RES_NEED_GET_DATA", IoResult::NeedGetData.to_result() as u64);
    add("UBLK_IO_RES_ABORT", IoResult::Abort.to_result() as u64);
    add("UBLK_MAX_QUEUE_DEPTH", QUEUE_DEPTH_MAX.into());
    add("UBLK_MAX_NR_QUEUES", QUEUES_MAX.into());
    add("(1ULL << UBLK_IO_BUF_BITS)", IO_BUFFER_BYTES_MAX.into());
    add(
        "(UBLKSRV_IO_BUF_OFFSET + (3ULL << UBLK_QID_OFF) + (5ULL << UBLK_TAG_OFF) + 7)",
        user_copy_offset(3, 5, 7),
    );
    add("UBLKSRV_IO_INTEGRITY_FLAG", user_copy_integrity_offset(0, 0, 0) & !user_copy_offset(0, 0, 0));
    add("UBLK_SHMEM_BUF_READ_ONLY", ShmemBufferReg::READ_ONLY.into());
    add("(UBLK_AUTO_BUF_REG_FALLBACK)", AutoBufReg::FALLBACK.into());
    add("(UBLK_BATCH_F_HAS_ZONE_LBA)", BatchFlags::HAS_ZONE_LBA.0.into());
    add("(UBLK_BATCH_F_HAS_BUF_ADDR)", BatchFlags::HAS_BUF_ADDR.0.into());
    add("(UBLK_BATCH_F_AUTO_BUF_REG_FALLBACK)", BatchFlags::AUTO_BUF_REG_FALLBACK.0.into());
    add("UBLK_ATTR_READ_ONLY", Attributes::READ_ONLY.0.into());
    add("UBLK_ATTR_ROTATIONAL", Attributes::ROTATIONAL.0.into());
    add("UBLK_ATTR_VOLATILE_CACHE", Attributes::VOLATILE_CACHE.0.into());
    add("UBLK_ATTR_FUA", Attributes::FUA.0.into());
    for (name, part) in [
        ("BASIC", ParamTypes::BASIC),
        ("DISCARD", ParamTypes::DISCARD),
        ("DEVT", ParamTypes::DEVT),
        ("ZONED", ParamTypes::ZONED),
        ("DMA_ALIGN", ParamTypes::DMA_ALIGN),
        ("SEGMENT", ParamTypes::SEGMENT),
        ("INTEGRITY", ParamTypes::INTEGRITY),
    ] {
        add(&format!("UBLK_PARAM_TYPE_{name}"), part.0.into());
    }
    add("UBLK_MIN_SEGMENT_SIZE", SEGMENT_SIZE_MIN.into());
    all
}

/// Returns whether the text contains the word as a whole.
fn has_word(text: &str, word: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(is_word) && !text[at + word.len()..].starts_with(is_word))
}

/// Returns the body of a structure's definition.
fn body<'a>(header: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = header.split_once(&format!("struct {name} {{"))?;
    rest.split_once("\n};").map(|(body, _)| body)
}

/// Returns the macro names in an expression, which the header must define.
fn macros(expression: &str) -> Vec<&str> {
    expression.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| w.starts_with("UBLK")).collect()
}

/// Compiles and runs a probe that prints `NAME VALUE` lines. Returns `None` if there is no compiler.
fn compile_and_run(source: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("probe");
    let spawned = Command::new("cc")
        .args(["-x", "c", "-w", "-o"])
        .arg(&program)
        .arg("-")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut compiler = spawned.ok()?;
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    let ended = compiler.wait_with_output().unwrap();
    assert!(ended.status.success(), "the probe does not compile: {}", String::from_utf8_lossy(&ended.stderr));
    let output = Command::new(&program).output().unwrap();
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn the_abi_matches_the_header() {
    let path = std::env::var_os("BLOCKYARD_UBLK_HEADER").map_or_else(|| SYSTEM_HEADER.into(), PathBuf::from);
    let Ok(header) = std::fs::read_to_string(&path) else {
        println!("skipped the_abi_matches_the_header: there is no {}", path.display());
        return;
    };
    let mut source = format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include <errno.h>\n#include <sys/ioctl.h>\n#include \"{}\"\n\
         int main(void) {{\n",
        path.display()
    );
    let mut expected: HashMap<String, u64> = HashMap::new();
    let mut absent = Vec::new();
    for mut layout in layouts() {
        let Some(body) = body(&header, layout.name) else {
            absent.push(format!("struct {}", layout.name));
            continue;
        };
        for (field, ..) in layout.fields.iter_mut().filter(|(field, ..)| !has_word(body, field)) {
            let old = RENAMED.iter().find(|(new, old)| new == field && has_word(body, old));
            *field = old.map_or(*field, |(_, old)| old);
        }
        let missing = |field: &&str| !has_word(body, field);
        let fields: Vec<&str> = layout.fields.iter().map(|(field, ..)| *field).collect();
        let new: Vec<&&str> = fields.iter().filter(|field| missing(field)).collect();
        absent.extend(new.iter().map(|field| format!("{}.{field}", layout.name)));
        if new.is_empty() {
            expected.insert(layout.name.to_owned(), layout.len as u64);
            source += &format!("printf(\"%s %zu\\n\", \"{0}\", sizeof(struct {0}));\n", layout.name);
        }
        for (field, offset, len) in layout.fields.iter().filter(|(field, ..)| !missing(field)) {
            let name = format!("{}.{field}", layout.name);
            expected.insert(format!("{name}@"), *offset as u64);
            source += &format!("printf(\"{name}@ %zu\\n\", offsetof(struct {}, {field}));\n", layout.name);
            // In an older header, an earlier field covers the later ones.
            if new.is_empty() {
                expected.insert(format!("{name}#"), *len as u64);
                source +=
                    &format!("printf(\"{name}# %zu\\n\", sizeof(((struct {} *)0)->{field}));\n", layout.name);
            }
        }
    }
    for (number, (expression, value)) in values().into_iter().enumerate() {
        if macros(&expression).iter().any(|name| !has_word(&header, name)) {
            absent.push(expression);
            continue;
        }
        let key = format!("{number}:{}", expression.replace(' ', ""));
        source +=
            &format!("printf(\"%s %llu\\n\", \"{key}\", (unsigned long long)(long long)({expression}));\n");
        expected.insert(key, value);
    }
    source += "return 0; }\n";
    let Some(output) = compile_and_run(&source) else {
        println!("skipped the_abi_matches_the_header: there is no C compiler (cc)");
        return;
    };
    let mut seen = 0;
    for line in output.lines() {
        let (name, value) = line.split_once(' ').unwrap();
        let value: u64 = value.parse().unwrap();
        // A negative number is printed with 64 bits, but has the type's own bits here.
        assert_eq!(expected[name], value, "{name}, by {}", path.display());
        seen += 1;
    }
    assert_eq!(seen, expected.len(), "the probe did not report everything");
    assert!(seen > 60, "{seen} facts only");
    println!("{} facts by {}; it does not have: {}", seen, path.display(), absent.join(", "));
}

#[test]
fn only_whole_words_match() {
    assert!(has_word("__u32\tflags;", "flags"));
    assert!(!has_word("__u64 ublksrv_flags;", "flags"));
}
