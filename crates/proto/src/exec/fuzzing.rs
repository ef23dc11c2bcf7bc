//! Bodies of the exec protocol's fuzz targets. `cargo test` replays them over the committed corpora.

use super::{HELLO_LEN, Hello, READY_LEN, Ready, Replies};

/// Feeds a program's answer and its replies to a host, in chunks of the length in the first byte.
pub fn replies(data: &[u8]) {
    let Some((&piece, data)) = data.split_first() else { return };
    let hello = Hello { transfer_max: 1 << 20, depth_max: 64, read_only: piece & 1 == 1 };
    assert_eq!(hello.encode().len(), HELLO_LEN);
    let (ready, stream) = data.split_at(data.len().min(READY_LEN));
    if let Ok(ready) = Ready::parse(ready, &hello) {
        assert!(ready.transfer_max <= hello.transfer_max && ready.transfer_max >= ready.block);
        assert!((1..=hello.depth_max).contains(&ready.depth_max));
        assert!(ready.size > 0 && ready.size.is_multiple_of(u64::from(ready.block)));
    }
    let mut replies = Replies::default();
    for mut part in stream.chunks(usize::from(piece).max(1)) {
        while !part.is_empty() {
            let (taken, reply) = replies.take(part);
            assert!(taken > 0 && taken <= part.len());
            if let Some(Some(reply)) = reply {
                assert!(reply.errno <= 4095);
            }
            part = &part[taken..];
        }
    }
}
