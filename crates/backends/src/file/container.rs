//! Formats of disk images, recognised by the first sector of a file.
//!
//! A raw disk holds whatever its clients write, so its first bytes say nothing about what the file is. They decide two
//! things here: a file that begins as an image is not served as a raw disk unless the user asked for that, and a client
//! cannot make a raw disk begin as one (see [`head`](super::head)).
//!
//! The list has what QEMU probes (`bdrv_probe` of its drivers), which is what a host may open such a file with. LUKS is
//! missing on purpose: it is what a raw disk holds when its user encrypts it. So are compressed files and archives:
//! no program opens those as a disk, and clients do write them to raw disks.

/// Bytes that decide: QEMU's `BLOCK_PROBE_BUF_SIZE`.
pub const HEAD_LEN: usize = 512;

/// Formats and the bytes that a file of each begins with.
const BEGINNINGS: [(&[u8], &str); 12] = [
    (b"QFI\xfb\0\0\0\x01", "qcow"),
    (b"QFI\xfb", "qcow2"),
    (b"QED\0", "qed"),
    (b"KDMV", "vmdk"),
    (b"COWD", "vmdk"),
    (b"# Disk DescriptorFile", "vmdk"),
    (b"vhdxfile", "vhdx"),
    (b"conectix", "vhd"),
    (b"WithoutFreeSpace", "parallels"),
    (b"WithouFreSpacExt", "parallels"),
    (b"Bochs Virtual HD Image", "bochs"),
    (b"#!/bin/sh\n#V2.0 Format\n", "cloop"),
];
/// Where VirtualBox images have their signature, and the signature.
const VDI: (usize, &[u8]) = (0x40, &[0x7f, 0x10, 0xda, 0xbe]);

/// The format that a file with these first bytes would be taken for, unless it is a raw disk. `head`: the first
/// [`HEAD_LEN`] bytes, or all if there are fewer.
pub fn container(head: &[u8]) -> Option<&'static str> {
    let head = &head[..head.len().min(HEAD_LEN)];
    if let Some((_, name)) = BEGINNINGS.iter().find(|(beginning, _)| head.starts_with(beginning)) {
        return Some(name);
    }
    if head.get(VDI.0..).is_some_and(|rest| rest.starts_with(VDI.1)) {
        return Some("vdi");
    }
    is_vmdk_descriptor(head).then_some("vmdk")
}

/// Why a file that begins as an image is not served as a raw disk, and what to do.
pub fn not_raw(format: &str) -> String {
    let what = match format {
        "qcow2" | "vmdk" => format!("add format={format} to serve what is in it"),
        _ => "convert it with qemu-img to serve what is in it".to_owned(),
    };
    format!("it begins as a {format} image ({what}, or add format=raw to serve the file as it is)")
}

/// QEMU's rule for the text of a vmdk: after comments and blank lines, `version=` and 1, 2 or 3.
fn is_vmdk_descriptor(head: &[u8]) -> bool {
    let mut lines = head.split_inclusive(|&byte| byte == b'\n');
    let is_passed = |line: &[u8]| line.starts_with(b"#") || line.trim_ascii().is_empty();
    let Some(line) = lines.find(|line| !is_passed(line)) else { return false };
    let Some(rest) = line.strip_prefix(b"version=") else { return false };
    matches!(rest, [b'1'..=b'3', b'\n'] | [b'1'..=b'3', b'\r', b'\n'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_recognised_by_their_first_bytes() {
        let vdi = [&[b' '; 0x40][..], VDI.1].concat();
        for (head, name) in [
            (&b"QFI\xfb\0\0\0\x03rest"[..], "qcow2"),
            (b"QFI\xfb\0\0\0\x02", "qcow2"),
            (b"QFI\xfb", "qcow2"),
            (b"QFI\xfb\0\0\0\x01", "qcow"),
            (b"QED\0", "qed"),
            (b"KDMV\x01", "vmdk"),
            (b"COWD", "vmdk"),
            (b"# Disk DescriptorFile\nversion=1\n", "vmdk"),
            (b"# any comment\n \nversion=3\r\n", "vmdk"),
            (b"version=1\n", "vmdk"),
            (b"vhdxfile", "vhdx"),
            (b"conectix", "vhd"),
            (b"WithoutFreeSpace", "parallels"),
            (b"Bochs Virtual HD Image", "bochs"),
            (b"#!/bin/sh\n#V2.0 Format\nmodprobe", "cloop"),
            (&vdi, "vdi"),
        ] {
            assert_eq!(container(head), Some(name), "{}", head.escape_ascii());
        }
    }

    #[test]
    fn what_raw_disks_hold_is_no_image() {
        let mut boot = [0x90; HEAD_LEN];
        boot[..3].copy_from_slice(&[0xeb, 0x63, 0x90]);
        boot[510..].copy_from_slice(&[0x55, 0xaa]);
        for head in [
            &b""[..],
            b"QFI",
            b"QED",
            b"# Disk",
            b"#!/bin/sh\necho\n",
            b"version=4\n",
            b"version=1",
            b"LUKS\xba\xbe\0\x01",
            b"\x1f\x8b\x08",
            b"PK\x03\x04",
            &[0; HEAD_LEN],
            &boot,
        ] {
            assert_eq!(container(head), None, "{}", head.escape_ascii());
        }
        let late = [&[0; HEAD_LEN][..], b"QFI\xfb"].concat();
        assert_eq!(container(&late), None);
    }
}
