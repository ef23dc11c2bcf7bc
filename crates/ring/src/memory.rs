use block::{Region, Segment};
use std::any::Any;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

const CHUNK_LEN: usize = 64 << 20;
const CLASS_MIN: u32 = 9;
const CLASS_MAX: u32 = 25;
const SLAB_LEN: u64 = 1 << 20;

pub struct ForeignMemory {
    base: NonNull<u8>,
    len: usize,
    keep: Arc<dyn Any + Send + Sync>,
}
// SAFETY: it is an address and a keeper; whoever made it promised that any thread may name it.
unsafe impl Send for ForeignMemory {}
impl ForeignMemory {
    /// # Safety
    /// see docs
    pub unsafe fn new(base: NonNull<u8>, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, len, keep }
    }
}

struct Entry {
    base: NonNull<u8>,
    len: usize,
    own: bool,
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

pub(crate) struct Memory {
    entries: Vec<Option<Entry>>,
    free: Vec<Vec<(u16, u64)>>,
    current: Option<(u16, u64)>,
}

pub(crate) fn map(len: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: a fresh anonymous mapping touches nothing that there is.
    let p = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if p == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(p.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

impl Memory {
    pub(crate) fn new() -> Self {
        Memory {
            entries: vec![None],
            free: (0..=CLASS_MAX - CLASS_MIN).map(|_| Vec::new()).collect(),
            current: None,
        }
    }
    fn add(&mut self, e: Entry) -> Region {
        let i = self.entries.iter().skip(1).position(Option::is_none).map(|p| p + 1).unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[i] = Some(e);
        Region(i as u16)
    }
    pub(crate) fn add_own(&mut self, len: usize) -> io::Result<Region> {
        let base = map(len)?;
        Ok(self.add(Entry { base, len, own: true, _keep: None }))
    }
    pub(crate) fn add_foreign(&mut self, m: ForeignMemory) -> Region {
        self.add(Entry { base: m.base, len: m.len, own: false, _keep: Some(m.keep) })
    }
    pub(crate) fn remove(&mut self, r: Region) {
        self.entries[r.0 as usize] = None;
    }
    #[inline]
    pub(crate) fn address(&self, s: Segment) -> *mut u8 {
        let e = self.entries[s.region.0 as usize].as_ref().expect("a region that there is");
        assert!(s.offset + u64::from(s.len) <= e.len as u64, "a segment past its region");
        // SAFETY: within the region, as was just checked.
        unsafe { e.base.as_ptr().add(s.offset as usize) }
    }
    #[inline]
    fn own(&self, s: Segment) -> *mut u8 {
        if s.len == 0 {
            return NonNull::dangling().as_ptr();
        }
        assert!(
            self.entries[s.region.0 as usize].as_ref().is_some_and(|e| e.own),
            "lent memory is not looked at"
        );
        self.address(s)
    }
    #[inline]
    pub(crate) fn bytes(&self, s: Segment) -> &[u8] {
        // SAFETY: own memory of this thread, in bounds.
        unsafe { std::slice::from_raw_parts(self.own(s), s.len as usize) }
    }
    #[inline]
    pub(crate) fn bytes_mut(&mut self, s: Segment) -> &mut [u8] {
        // SAFETY: own memory of this thread, in bounds, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.own(s), s.len as usize) }
    }
    pub(crate) fn copy(&mut self, from: Segment, to: Segment) {
        assert_eq!(from.len, to.len);
        let (a, b) = (self.own(from), self.own(to));
        // SAFETY: both in bounds; `copy` allows overlap.
        unsafe { std::ptr::copy(a, b, from.len as usize) }
    }
    fn class(len: u32) -> usize {
        (len.max(1 << CLASS_MIN).next_power_of_two().trailing_zeros() - CLASS_MIN) as usize
    }
    #[inline]
    pub(crate) fn allocate(&mut self, len: u32) -> Option<Segment> {
        if len > 1 << CLASS_MAX {
            return None;
        }
        let c = Self::class(len);
        if self.free[c].is_empty() {
            self.refill(c)?;
        }
        let (region, offset) = self.free[c].pop()?;
        Some(Segment { offset, len, region: Region(region) })
    }
    #[cold]
    fn refill(&mut self, c: usize) -> Option<()> {
        let size = 1u64 << (c as u32 + CLASS_MIN);
        let take = size.max(SLAB_LEN);
        let (r, at) = match self.current {
            Some((r, at)) if at + take <= CHUNK_LEN as u64 => (r, at),
            _ => (self.add_own(CHUNK_LEN).ok()?.0, 0),
        };
        self.current = Some((r, at + take));
        let mut o = at + take;
        while o > at {
            o -= size;
            self.free[c].push((r, o));
        }
        Some(())
    }
    #[inline]
    pub(crate) fn free(&mut self, s: Segment) {
        self.free[Self::class(s.len)].push((s.region.0, s.offset));
    }
}
