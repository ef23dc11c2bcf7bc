//! Compressed clusters.

use crate::header::Compression;
use crate::{damaged, lock};
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress, inflate_flags};
use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::{Arc, Mutex};

/// Cache of the most recently decompressed clusters, by their offset: consecutive small requests read a
/// cluster several times.
///
/// Compressed data does not change as long as an entry refers to it, so the cache never becomes stale.
#[derive(Debug, Default)]
pub(crate) struct Decompressed(Mutex<VecDeque<(u64, Arc<Vec<u8>>)>>);

/// Maximum number of cached clusters: as many as threads that read an image.
const CACHED_MAX: usize = 4;

impl Decompressed {
    /// Returns the cluster at `at`, which `expand` decompresses if it is not cached.
    pub(crate) fn cluster(
        &self,
        at: u64,
        expand: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> io::Result<Arc<Vec<u8>>> {
        if let Some((_, cluster)) = lock(&self.0).iter().find(|(place, _)| *place == at) {
            return Ok(cluster.clone());
        }
        let cluster = Arc::new(expand()?);
        let mut clusters = lock(&self.0);
        clusters.truncate(CACHED_MAX - 1);
        clusters.push_front((at, cluster.clone()));
        Ok(cluster)
    }
}

/// Decompresses a cluster of `len` bytes; `bytes` may continue with other clusters.
pub(crate) fn expand(compression: Compression, bytes: &[u8], len: usize) -> io::Result<Vec<u8>> {
    let mut cluster = vec![0; len];
    match compression {
        Compression::Deflate => {
            let flags = inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
            let (status, _, done) = decompress(&mut DecompressorOxide::new(), bytes, &mut cluster, 0, flags);
            // The decoder may produce the whole cluster before it has consumed the end of its input.
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
    fn the_last_clusters_are_decompressed_once() {
        let (expanded, count) = (Decompressed::default(), std::cell::Cell::new(0));
        let read = |at: u64| {
            let expand = || {
                count.set(count.get() + 1);
                Ok(vec![at as u8; 512])
            };
            assert_eq!(*expanded.cluster(at, expand).unwrap(), vec![at as u8; 512]);
        };
        [1, 1, 2, 3, 4, 1, 2].into_iter().for_each(read);
        assert_eq!(count.get(), 4);
        [5, 1].into_iter().for_each(read);
        assert_eq!(count.get(), 6, "the oldest was evicted");
    }

    #[test]
    fn deflated_clusters_are_decompressed_from_longer_input() {
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
