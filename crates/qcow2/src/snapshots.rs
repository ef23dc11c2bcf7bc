//! The table of internal snapshots: earlier states of a disk in its image.

use crate::header::{Header, half, word};
use crate::{Storage, damaged, unsupported};
use std::io;

/// Bytes of an entry before its extra data.
const HEAD_LEN: u64 = 40;
/// Largest table in bytes, as in QEMU: 65536 entries of 1 KiB.
const TABLE_LEN_MAX: u64 = 64 << 20;
/// Maximum number of names in a message.
const NAMED_MAX: usize = 8;

/// An entry of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Snapshot {
    /// Id, unique in the image, usually a decimal number.
    id: String,
    /// Name given by the user. Several snapshots may have the same name.
    name: String,
    /// Size of the disk at the time of the snapshot, in bytes.
    size: u64,
    pub(crate) l1_at: u64,
    pub(crate) l1_entries: u64,
}

/// Passes every entry to `each`, in the order of the table. Returns the end of the table.
///
/// # Errors
/// The table cannot be read, is past the end of the file, or `each` fails.
pub(crate) fn for_each(
    storage: &dyn Storage,
    header: &Header,
    mut each: impl FnMut(Snapshot) -> io::Result<()>,
) -> io::Result<u64> {
    let file_len = storage.len()?.next_multiple_of(1 << header.cluster_bits);
    let mut at = header.snapshots_at;
    for _ in 0..header.snapshots {
        let mut head = [0; HEAD_LEN as usize];
        storage.read_at(&mut head, at)?;
        let lens = half(&head, 12);
        let (id_len, name_len, extra_len) = (lens >> 16, lens & 0xffff, u64::from(half(&head, 36)));
        let len = HEAD_LEN + extra_len + u64::from(id_len) + u64::from(name_len);
        let end = at.checked_add(len.next_multiple_of(8)).filter(|end| *end <= file_len);
        let end = end.ok_or_else(|| damaged("its table of snapshots is past the end of the file"))?;
        if end - header.snapshots_at > TABLE_LEN_MAX {
            return Err(unsupported("its table of snapshots is larger than QEMU allows (64 MiB)".into()));
        }
        let mut size = [0; 8];
        if extra_len >= 16 {
            storage.read_at(&mut size, at + HEAD_LEN + 8)?;
        } else {
            // Version 2 has no such field: the disk had its current size.
            size = header.size.to_be_bytes();
        }
        let mut names = vec![0; (id_len + name_len) as usize];
        storage.read_at(&mut names, at + HEAD_LEN + extra_len)?;
        let (id, name) = names.split_at(id_len as usize);
        each(Snapshot {
            id: String::from_utf8_lossy(id).into_owned(),
            name: String::from_utf8_lossy(name).into_owned(),
            size: u64::from_be_bytes(size),
            l1_at: word(&head, 0),
            l1_entries: u64::from(half(&head, 8)),
        })?;
        at = end;
    }
    Ok(at)
}

/// Changes the header to that of a snapshot: the one with this id, or otherwise the only one with this
/// name.
pub(crate) fn select(storage: &dyn Storage, header: &mut Header, wanted: &str) -> io::Result<()> {
    let (mut by_id, mut by_name, mut named) = (None, Vec::new(), Vec::new());
    for_each(storage, header, |snapshot| {
        if named.len() < NAMED_MAX {
            named.push(format!("{} ({})", snapshot.id, snapshot.name.escape_default()));
        }
        if snapshot.id == wanted {
            by_id = Some(snapshot);
        } else if snapshot.name == wanted && by_name.len() < 2 {
            by_name.push(snapshot);
        }
        Ok(())
    })?;
    if by_id.is_none() && by_name.len() > 1 {
        let why =
            format!("several of its snapshots are called {wanted:?}: use the id ({})", named.join(", "));
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let Some(snapshot) = by_id.or_else(|| by_name.pop()) else {
        let there = if named.is_empty() { "none".to_owned() } else { named.join(", ") };
        let why = format!("it has no snapshot {wanted:?}; there is {there}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    };
    (header.size, header.l1_at, header.l1_entries) = (snapshot.size, snapshot.l1_at, snapshot.l1_entries);
    header.check_numbers()
}
