//! Compressed clusters.

use crate::damaged;
use crate::header::Compression;
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
use std::io::{self, Read};

/// The cluster of `len` bytes that was compressed to `bytes`, behind which there may be others.
pub(crate) fn expand(compression: Compression, bytes: &[u8], len: usize) -> io::Result<Vec<u8>> {
    let mut cluster = vec![0; len];
    match compression {
        Compression::Deflate => {
            let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
            let (status, _, done) = decompress(&mut DecompressorOxide::new(), bytes, &mut cluster, 0, flags);
            // It may end with the cluster and say so only after more of its input.
            let whole = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput) && done == len;
            if !whole {
                return Err(damaged("a compressed cluster is damaged"));
            }
        }
        Compression::Zstd => {
            let damage = |_| damaged("a cluster that is compressed with zstd is damaged");
            let mut decoder = ruzstd::decoding::StreamingDecoder::new(bytes)
                .map_err(|_| damaged("a cluster that is compressed with zstd is damaged"))?;
            decoder.read_exact(&mut cluster).map_err(damage)?;
        }
    }
    Ok(cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deflated_clusters_expand_with_others_behind_them() {
        let cluster: Vec<u8> = (0..4096u32).map(|at| (at / 7) as u8).collect();
        let mut bytes = miniz_oxide::deflate::compress_to_vec(&cluster, 6);
        let len = bytes.len();
        bytes.extend([0x5a; 300]);
        assert!(expand(Compression::Deflate, &bytes, 4096).unwrap() == cluster);
        assert!(expand(Compression::Deflate, &bytes[..len / 2], 4096).is_err());
        assert!(expand(Compression::Deflate, &bytes, 8192).is_err(), "it is shorter");
        assert!(expand(Compression::Zstd, &bytes, 4096).is_err());
    }
}
