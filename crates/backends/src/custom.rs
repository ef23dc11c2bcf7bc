//! Backend for drivers that are written in Rust against a small interface, [`Driver`].
//!
//! A driver answers each request inline, on the thread of the queue, with slices of the request's memory.
//! It knows nothing of tags, rings or verdicts. Requests of several queues arrive concurrently.

use crate::segments::{each_segment, one_extent};
use crate::{Backend, CLEAR_MAX, Fact, Features, REQUEST_MAX, base_limits};
use block::Status;
use block::{
    Bytes, Cookie, Extent, Features as Limits, Flags, LimitsError, Op, QueueLimits, Request, Sectors,
};
use queue::{Cx, Node, Ring, Verdict};
use std::io;
use std::sync::Arc;

/// A block driver. Offsets and lengths are in bytes; ranges lie within [`size`](Driver::size).
///
/// Methods are called on an I/O thread, which serves no other requests until they return. They must not
/// wait for another device of the same process.
pub trait Driver: Send + Sync + 'static {
    /// Returns the size of the disk: a positive multiple of 512 and of the block size. It must not change.
    fn size(&self) -> u64;

    /// Returns the block size, a power of two up to 65536: offsets and lengths of requests are multiples of
    /// it.
    fn block_size(&self) -> u32 {
        512
    }

    /// Returns whether the device is read-only, so that writes fail without calling
    /// [`write`](Driver::write).
    fn is_read_only(&self) -> bool {
        false
    }

    /// Fills the slice with the data from `offset` on.
    ///
    /// # Errors
    /// The errno becomes the request's status; an error without an errno becomes EIO.
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Stores the data from `offset` on.
    ///
    /// # Errors
    /// See [`read`](Driver::read).
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Returns whether written data is volatile until [`flush`](Driver::flush).
    fn is_volatile(&self) -> bool {
        false
    }

    /// Makes the data of all writes that have returned durable. Called only if the driver is volatile.
    ///
    /// # Errors
    /// See [`read`](Driver::read).
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Returns whether [`discard`](Driver::discard) has an effect.
    fn can_discard(&self) -> bool {
        false
    }

    /// Releases a range, whose content is undefined afterwards.
    ///
    /// # Errors
    /// See [`read`](Driver::read).
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let _ = (offset, len);
        Ok(())
    }
}

impl<D: Driver + ?Sized> Driver for Arc<D> {
    fn size(&self) -> u64 {
        (**self).size()
    }

    fn block_size(&self) -> u32 {
        (**self).block_size()
    }

    fn is_read_only(&self) -> bool {
        (**self).is_read_only()
    }

    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        (**self).read(offset, data)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        (**self).write(offset, data)
    }

    fn is_volatile(&self) -> bool {
        (**self).is_volatile()
    }

    fn flush(&self) -> io::Result<()> {
        (**self).flush()
    }

    fn can_discard(&self) -> bool {
        (**self).can_discard()
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        (**self).discard(offset, len)
    }
}

/// Reasons why a driver cannot become a device.
#[derive(Debug, thiserror::Error)]
pub enum CustomError {
    /// The size is not a positive multiple of 512 and of the block size.
    #[error("driver:{name}: its size {size} is not a positive multiple of 512 and of its block size {block}")]
    Size {
        /// Name of the driver.
        name: String,
        /// Size in bytes.
        size: u64,
        /// Block size in bytes.
        block: u32,
    },
    /// The block size is invalid.
    #[error("driver:{name}: its block size: {why}")]
    Limits {
        /// Name of the driver.
        name: String,
        /// The cause.
        why: LimitsError,
    },
}

/// A driver with its name.
#[derive(Clone)]
pub struct CustomSpec {
    /// The name, for listings.
    pub name: String,
    /// The driver.
    pub driver: Arc<dyn Driver>,
}

impl std::fmt::Debug for CustomSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CustomSpec").field("name", &self.name).finish_non_exhaustive()
    }
}

impl PartialEq for CustomSpec {
    fn eq(&self, other: &CustomSpec) -> bool {
        self.name == other.name && Arc::ptr_eq(&self.driver, &other.driver)
    }
}

impl Eq for CustomSpec {}

/// The part of a custom device that all queues share.
#[derive(Debug)]
pub struct Custom {
    spec: CustomSpec,
    limits: QueueLimits,
}

impl Custom {
    /// Creates a device.
    ///
    /// # Errors
    /// The driver's size or block size is invalid.
    pub fn new(spec: &CustomSpec) -> Result<Custom, CustomError> {
        let (size, block) = (spec.driver.size(), spec.driver.block_size());
        let logical = u64::from(block.max(512));
        if size == 0 || !size.is_multiple_of(logical) || size > i64::MAX as u64 {
            return Err(CustomError::Size { name: spec.name.clone(), size, block });
        }
        let clear = if spec.driver.can_discard() { CLEAR_MAX } else { Sectors(0) };
        let volatile = spec.driver.is_volatile();
        let mut limits = QueueLimits {
            features: if volatile { Limits::WRITE_CACHE } else { Limits::empty() },
            logical_block_size: Bytes(logical),
            physical_block_size: Bytes(logical),
            max_hw_discard_sectors: clear,
            discard_granularity: Bytes(logical),
            max_write_zeroes_sectors: REQUEST_MAX.sectors(),
            max_hw_wzeroes_unmap_sectors: Sectors(0),
            ..base_limits()
        };
        limits.validate().map_err(|why| CustomError::Limits { name: spec.name.clone(), why })?;
        Ok(Custom { spec: spec.clone(), limits })
    }

    /// Creates the node of one hardware queue.
    pub fn node(&self) -> CustomNode {
        CustomNode { driver: self.spec.driver.clone() }
    }

    /// Returns the name of the driver.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns whether ranges of any length are possible.
    pub fn is_bytewise(&self) -> bool {
        self.spec.driver.block_size() == 1
    }
}

impl Backend for Custom {
    fn size(&self) -> Bytes {
        Bytes(self.spec.driver.size())
    }

    fn read_only(&self) -> bool {
        self.spec.driver.is_read_only()
    }

    fn features(&self) -> Features {
        let writable = !self.read_only();
        Features {
            flush: writable && self.spec.driver.is_volatile(),
            fua: true,
            discard: writable && self.spec.driver.can_discard(),
            write_zeroes: writable,
            fast_zero: false,
            rotational: false,
        }
    }

    fn limits(&self) -> QueueLimits {
        self.limits.clone()
    }

    fn describe(&self) -> Vec<Fact> {
        vec![
            ("backend", "driver".to_owned()),
            ("driver", self.spec.name.clone()),
            ("size", self.size().to_string()),
        ]
    }
}

/// The node of a custom device in one hardware queue.
pub struct CustomNode {
    driver: Arc<dyn Driver>,
}

/// Zeroes for WRITE_ZEROES.
static ZEROES: [u8; 65536] = [0; 65536];

impl CustomNode {
    fn carry<R: Ring>(&self, req: &Request, cx: &mut Cx<'_, R>) -> io::Result<()> {
        let (offset, len) = (req.offset.0, req.len.0);
        let mut done = Ok(());
        match req.op {
            Op::Read => each_segment(cx, req.data, len, |ring, piece, at| {
                if done.is_ok() {
                    done = self.driver.read(offset + at, ring.bytes_mut(piece));
                }
            }),
            Op::Write => each_segment(cx, req.data, len, |ring, piece, at| {
                if done.is_ok() {
                    done = self.driver.write(offset + at, ring.bytes(piece));
                }
            }),
            Op::WriteZeroes => {
                let mut at = 0;
                while at < len && done.is_ok() {
                    let part = (len - at).min(ZEROES.len() as u64);
                    done = self.driver.write(offset + at, &ZEROES[..part as usize]);
                    at += part;
                }
            }
            Op::Discard => done = self.driver.discard(offset, len),
            _ => {}
        }
        done?;
        let through = req.op.is_write() && req.flags.contains(Flags::FUA) || req.op == Op::Flush;
        if through && self.driver.is_volatile() { self.driver.flush() } else { Ok(()) }
    }
}

impl<R: Ring> Node<R> for CustomNode {
    fn submit(&mut self, _: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let supported = match req.op {
            Op::Read | Op::Write | Op::Flush | Op::Prefetch => true,
            Op::WriteZeroes => !req.flags.contains(Flags::FAST_ZERO),
            Op::Discard => self.driver.can_discard(),
            Op::Extents => {
                one_extent(cx, req.data, Extent { len: req.len, hole: false, zero: false });
                return Verdict::Up(Status::Ok);
            }
            _ => false,
        };
        if !supported {
            return Verdict::Up(Status::NotSupported);
        }
        if req.op.is_write() && self.driver.is_read_only() {
            return Verdict::Up(Status::IoError);
        }
        Verdict::Up(match self.carry(req, cx) {
            Ok(()) => Status::Ok,
            Err(error) => Status::from_errno(error.raw_os_error().unwrap_or(libc::EIO)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Harness;
    use std::sync::Mutex;

    struct Memory(Mutex<Vec<u8>>);

    impl Driver for Memory {
        fn size(&self) -> u64 {
            1 << 20
        }

        fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
            data.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..data.len()]);
            Ok(())
        }

        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            if offset >= 1 << 19 {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            self.0.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
            Ok(())
        }
    }

    #[test]
    fn a_driver_answers_requests_and_its_errno_is_the_status() {
        let driver = Arc::new(Memory(Mutex::new(vec![7; 1 << 20])));
        let custom = Custom::new(&CustomSpec { name: "memory".to_owned(), driver }).unwrap();
        let mut disk = Harness::new(Box::new(custom.node()));
        assert_eq!(disk.bare(Op::WriteZeroes, 4096, 100_352), Status::Ok);
        let (status, data) = disk.read(3584, 1024);
        assert_eq!((status, &data[..]), (Status::Ok, &[[7; 512], [0; 512]].concat()[..]));
        assert_eq!(disk.bare(Op::WriteZeroes, 1 << 19, 512), Status::NoSpace);
        assert_eq!(disk.bare(Op::Discard, 0, 512), Status::NotSupported);
        assert_eq!(disk.bare(Op::Flush, 0, 0), Status::Ok);
    }
}
