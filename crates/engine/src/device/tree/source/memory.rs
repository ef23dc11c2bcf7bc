//! Backends that keep nothing outside the process: `ram`, `null`, `zero` and `error`.

use super::{Source, Traits};
use crate::device::DeviceError;
use crate::device::tree::RingResources;
use crate::spec::{NullSpec, RamSpec};
use backends::{Backend, Failing, Null, Ram, Zero, ZeroPages, zero_file};
use block::{Bytes, Integrity};
use queue::Node;
use ring::KernelRing;
use std::io;
use std::sync::Arc;

struct RamSource(Arc<Ram>);

pub(super) fn open_ram(spec: &RamSpec) -> Result<Arc<dyn Source>, DeviceError> {
    Ok(Arc::new(RamSource(Ram::new(spec)?)))
}

impl Source for RamSource {
    fn name(&self) -> &'static str {
        "ram"
    }

    fn backend(&self) -> &dyn Backend {
        &*self.0
    }

    fn traits(&self) -> Traits {
        Traits { zero_copy_reads: true, sparse: true, ..Traits::default() }
    }

    fn integrity(&self) -> Option<Integrity> {
        self.0.integrity()
    }

    fn build_node(
        &self,
        ring: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        let region = resources.region(ring, self.0.memory());
        Ok(Box::new(self.0.node(Some(region))))
    }
}

/// A null device, with the pages that its reads return.
struct NullSource(Null, Arc<ZeroPages>);

pub(super) fn open_null(spec: &NullSpec) -> Result<Arc<dyn Source>, DeviceError> {
    Ok(Arc::new(NullSource(Null::new(spec)?, Arc::new(ZeroPages::new()?))))
}

impl Source for NullSource {
    fn name(&self) -> &'static str {
        "null"
    }

    fn backend(&self) -> &dyn Backend {
        &self.0
    }

    fn traits(&self) -> Traits {
        Traits { zero_copy_reads: true, opaque: self.0.is_hollow(), ..Traits::default() }
    }

    fn null(&self) -> Option<&Null> {
        Some(&self.0)
    }

    fn build_node(
        &self,
        ring: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        let NullSource(null, pages) = self;
        null.admit_queue()?;
        let memory = null.ram().map_or_else(|| pages.memory(), |ram| ram.memory());
        let region = resources.region(ring, memory);
        let file = resources.file(ring, zero_file()?)?;
        Ok(Box::new(null.node(Some(region)).with_file(file)))
    }
}

/// A device of zeroes, with the pages that its reads return.
struct ZeroSource(Zero, Arc<ZeroPages>);

pub(super) fn open_zero(size: Bytes) -> Result<Arc<dyn Source>, DeviceError> {
    Ok(Arc::new(ZeroSource(Zero::new(size), Arc::new(ZeroPages::new()?))))
}

impl Source for ZeroSource {
    fn name(&self) -> &'static str {
        "zero"
    }

    fn backend(&self) -> &dyn Backend {
        &self.0
    }

    fn traits(&self) -> Traits {
        Traits { zero_copy_reads: true, sparse: true, opaque: true, ..Traits::default() }
    }

    fn build_node(
        &self,
        ring: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        let region = resources.region(ring, self.1.memory());
        let file = resources.file(ring, zero_file()?)?;
        Ok(Box::new(self.0.node(Some(region)).with_file(file)))
    }
}

struct FailingSource(Failing);

pub(super) fn open_failing(size: Bytes) -> Arc<dyn Source> {
    Arc::new(FailingSource(Failing::new(size)))
}

impl Source for FailingSource {
    fn name(&self) -> &'static str {
        "error"
    }

    fn backend(&self) -> &dyn Backend {
        &self.0
    }

    fn traits(&self) -> Traits {
        Traits { opaque: true, ..Traits::default() }
    }

    fn build_node(&self, _: &mut KernelRing, _: &mut RingResources) -> io::Result<Box<dyn Node<KernelRing>>> {
        Ok(Box::new(self.0.node()))
    }
}
