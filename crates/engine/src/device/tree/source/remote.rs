//! Backends behind a connection or a program: `nbd`, `nbdkit`, `rbd`, `exec`, and drivers of the program
//! itself.

use super::{Source, Traits};
use crate::connect::{AssumedExport, Remote};
use crate::device::DeviceError;
use crate::device::dependencies::Dependencies;
use crate::device::tree::RingResources;
use crate::programs::ExecDevice;
use crate::spec::{NbdSpec, RbdSpec};
use backends::{Backend, Custom};
use queue::Node;
use rbd::Rbd;
use ring::KernelRing;
use std::io;
use std::sync::Arc;

impl Source for Remote {
    fn name(&self) -> &'static str {
        if self.is_nbdkit() { "nbdkit" } else { "nbd" }
    }

    fn label(&self) -> String {
        self.nbd.uri().to_owned()
    }

    fn backend(&self) -> &dyn Backend {
        &self.nbd
    }

    fn traits(&self) -> Traits {
        // A server may require blocks smaller than a sector.
        Traits { bytewise: self.nbd.export().block_sizes.minimum <= 1, ..Traits::default() }
    }

    fn add_dependencies(&self, dependencies: &mut Dependencies) {
        dependencies.servers.push(self.label());
    }

    fn is_single(&self) -> bool {
        self.nbd.is_single()
    }

    fn remote(&self) -> Option<&Remote> {
        Some(self)
    }

    fn build_node(
        &self,
        _: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        Ok(Box::new(self.nbd.node(resources.waker.clone()).map_err(io::Error::other)?))
    }
}

/// Opens an NBD backend that is assumed to be `assumed` if its server cannot be reached now.
///
/// # Errors
/// The server refuses, or its export is another one.
pub(in crate::device::tree) fn open_assumed(
    spec: &NbdSpec,
    assumed: &AssumedExport,
    device: Option<&str>,
) -> Result<Arc<dyn Source>, DeviceError> {
    Ok(Arc::new(Remote::open_assumed(spec, assumed, device)?))
}

struct RbdSource(Arc<Rbd>);

pub(super) fn open_rbd(spec: &RbdSpec) -> Result<Arc<dyn Source>, DeviceError> {
    Ok(reuse_rbd(Rbd::open(spec)?))
}

/// Returns a backend on an image that is open.
pub(in crate::device::tree) fn reuse_rbd(image: Arc<Rbd>) -> Arc<dyn Source> {
    Arc::new(RbdSource(image))
}

impl Source for RbdSource {
    fn name(&self) -> &'static str {
        "rbd"
    }

    fn label(&self) -> String {
        self.0.spec().place()
    }

    fn backend(&self) -> &dyn Backend {
        &*self.0
    }

    fn traits(&self) -> Traits {
        Traits { sparse: true, ..Traits::default() }
    }

    fn add_dependencies(&self, dependencies: &mut Dependencies) {
        dependencies.servers.push(format!("rbd:{}", self.label()));
    }

    /// Two handles on one image would take its exclusive lock from each other.
    fn is_single(&self) -> bool {
        true
    }

    fn compares_and_writes(&self) -> bool {
        self.0.compares_and_writes()
    }

    fn rbd(&self) -> Option<&Arc<Rbd>> {
        Some(&self.0)
    }

    fn build_node(
        &self,
        ring: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        let event = resources.file(ring, self.0.event())?;
        Ok(Box::new(self.0.node(event, resources.waker.clone())))
    }
}

impl Source for ExecDevice {
    fn name(&self) -> &'static str {
        "exec"
    }

    fn label(&self) -> String {
        self.exec().command().to_owned()
    }

    fn backend(&self) -> &dyn Backend {
        self
    }

    fn traits(&self) -> Traits {
        Traits { bytewise: self.exec().is_bytewise(), ..Traits::default() }
    }

    fn add_dependencies(&self, dependencies: &mut Dependencies) {
        dependencies.servers.push(format!("exec:{}", self.label()));
    }

    fn is_single(&self) -> bool {
        self.exec().is_single()
    }

    fn build_node(
        &self,
        ring: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        let (memory, connector) = self.connection()?;
        let region = ring.add_guest_memory(memory.lend())?;
        resources.regions.push(region);
        let node = self.exec().node(region.into(), resources.waker.clone(), connector);
        Ok(Box::new(node.map_err(io::Error::other)?))
    }
}

impl Source for Custom {
    fn name(&self) -> &'static str {
        "driver"
    }

    fn label(&self) -> String {
        Custom::name(self).to_owned()
    }

    fn backend(&self) -> &dyn Backend {
        self
    }

    fn traits(&self) -> Traits {
        Traits { bytewise: self.is_bytewise(), ..Traits::default() }
    }

    fn build_node(&self, _: &mut KernelRing, _: &mut RingResources) -> io::Result<Box<dyn Node<KernelRing>>> {
        Ok(Box::new(self.node()))
    }
}
