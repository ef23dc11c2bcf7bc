//! Bodies of the fuzz targets: no input may panic, unless it reveals a bug.
//!
//! `fuse_call` parses the input as a request read from `/dev/fuse`, `fuse_entry` as one that arrived through
//! io_uring. Each request is answered as a server would, and the answer is checked as the kernel checks it.

use super::wire::uring::{HEADER_LEN, PAYLOAD_LEN_AT};
use super::wire::{CALL_LEN_MAX, Fields, IN_HEADER_LEN, OUT_HEADER_LEN};
use super::{
    Arrival, Attributes, Call, Header, Offer, REPLY_LEN_MAX, StatFs, negotiate, put_answer, put_attributes,
    put_end, put_init, put_number, put_open, put_statfs, put_written,
};

/// Parses `data` as a request read from the device.
pub fn call(data: &[u8]) {
    let Ok(header) = Header::parse(data, data.len()) else { return };
    assert_eq!(header.len as usize, data.len(), "a request is as long as it says");
    answer(header.unique, &Call::parse(&header, &data[IN_HEADER_LEN..data.len().min(CALL_LEN_MAX)]));
}

/// Parses `data` as a request in the memory of an entry.
pub fn entry(data: &[u8]) {
    let Ok(arrival) = Arrival::parse(data) else { return };
    answer(arrival.header.unique, &arrival.call);
    let mut header = [0xff; HEADER_LEN];
    put_answer(&mut header, arrival.header.unique, libc::EIO, 0);
    let fields = Fields(&header);
    assert_eq!((fields.u32(4) as i32, fields.u64(8)), (-libc::EIO, arrival.header.unique));
    assert_eq!(fields.u32(PAYLOAD_LEN_AT), 0);
}

fn answer(unique: u64, call: &Call) {
    let mut room = [0xff; REPLY_LEN_MAX];
    let attributes = Attributes {
        size: 1 << 30,
        blocks: 1 << 21,
        mode: 0o600,
        uid: 0,
        gid: 0,
        block_len: 4096,
        time_s: 1,
    };
    let len = match *call {
        Call::Init { major, minor, max_readahead, flags } => {
            let offer =
                Offer { transfer_max: 1 << 20, background_max: 64, passthrough: true, over_io_uring: true };
            let Some(agreed) = negotiate(&offer, major, minor, max_readahead, flags) else { return };
            // Only features that the kernel offered are agreed on.
            assert_eq!(agreed.flags & !flags, 0);
            assert!(agreed.minor <= minor && agreed.write_max >= 4096);
            assert_eq!(agreed.write_max, u32::from(agreed.pages_max) * 4096);
            put_init(&mut room, unique, &agreed)
        }
        Call::GetAttr | Call::SetAttr(_) => put_attributes(&mut room, unique, &attributes),
        Call::Open => put_open(&mut room, unique, 1, 0),
        Call::StatFs => put_statfs(&mut room, unique, &StatFs { size: 1 << 30, block_len: 512 }),
        Call::Write(transfer) => put_written(&mut room, unique, transfer.len),
        Call::Seek { offset, .. } => put_number(&mut room, unique, offset),
        Call::Unanswered => return,
        _ => put_end(&mut room, unique, libc::ENOSYS, 0),
    };
    let fields = Fields(&room);
    assert!(len >= OUT_HEADER_LEN && fields.u32(0) as usize == len, "an answer is as long as it says");
    assert!((-511..=0).contains(&(fields.u32(4) as i32)) && fields.u64(8) == unique);
}
