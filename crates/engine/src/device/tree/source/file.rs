//! Files: raw ones, served as they are, and images in a container format.

use super::{Source, Traits};
use crate::device::DeviceError;
use crate::device::dependencies::Dependencies;
use crate::device::tree::RingResources;
use crate::spec::{Backing, DiskFileSpec, FileFormat, FileSpec, Format, StackSpec};
use backends::{Backend, File};
use images::{Image, ImageSpec};
use queue::Node;
use ring::KernelRing;
use std::io;
use std::sync::Arc;

pub(super) fn open(spec: &DiskFileSpec, device: Option<&str>) -> Result<Arc<dyn Source>, DeviceError> {
    Ok(match image_format(spec)? {
        Format::Raw => reuse_file(open_raw(spec, device)?),
        format => Arc::new(ImageSource(Image::open(&image(spec, format)?)?)),
    })
}

struct FileSource(Arc<File>);

/// Returns a backend on a file that is open.
pub(in crate::device::tree) fn reuse_file(file: Arc<File>) -> Arc<dyn Source> {
    Arc::new(FileSource(file))
}

impl Source for FileSource {
    fn name(&self) -> &'static str {
        "file"
    }

    fn label(&self) -> String {
        self.0.spec().path.display().to_string()
    }

    fn backend(&self) -> &dyn Backend {
        &*self.0
    }

    fn traits(&self) -> Traits {
        let facts = self.0.shared().facts();
        Traits {
            inline: facts.direct.is_none(),
            sparse: true,
            opaque: facts.takes_any_block(),
            ..Traits::default()
        }
    }

    fn add_dependencies(&self, dependencies: &mut Dependencies) {
        dependencies.files.push(self.0.spec().path.clone());
    }

    fn record_format(&self, stack: &mut StackSpec) {
        record_format(stack, FileFormat::Unspecified, Backing::Beside);
    }

    fn file(&self) -> Option<&Arc<File>> {
        Some(&self.0)
    }

    fn build_node(
        &self,
        ring: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        let file = &self.0;
        let id = resources.file(ring, Arc::new(file.descriptor()?))?;
        if file.shared().facts().direct.is_some() {
            match ring.register_memory() {
                Ok(()) => resources.registrations += 1,
                Err(error) => tracing::info!(%error, "direct I/O runs without registered memory"),
            }
        }
        let mut node = file.node(id);
        if let Some(again) = file.sync_descriptor()? {
            // This file is only synced: it needs no slot in the ring's table.
            let again = ring.add_unregistered_file(Arc::new(again));
            resources.files.push(again);
            node = node.with_sync_file(again);
        }
        if let Some(scratch) = file.scratch_descriptor()? {
            let scratch = ring.add_unregistered_file(Arc::new(scratch));
            resources.files.push(scratch);
            node = node.with_scratch_file(scratch);
        }
        Ok(match file.memory() {
            Some(memory) => Box::new(node.with_memory(resources.region(ring, memory))),
            None => Box::new(node),
        })
    }
}

struct ImageSource(Arc<Image>);

impl Source for ImageSource {
    fn name(&self) -> &'static str {
        "image"
    }

    fn label(&self) -> String {
        self.0.spec().path.display().to_string()
    }

    fn backend(&self) -> &dyn Backend {
        &*self.0
    }

    fn traits(&self) -> Traits {
        Traits { sparse: true, ..Traits::default() }
    }

    fn add_dependencies(&self, dependencies: &mut Dependencies) {
        dependencies.files.push(self.0.spec().path.clone());
    }

    /// An image that is written has metadata in memory until a flush.
    fn survives(&self) -> bool {
        self.0.spec().read_only
    }

    fn record_format(&self, stack: &mut StackSpec) {
        let spec = self.0.spec();
        record_format(stack, FileFormat::Given(spec.format), spec.backing.clone());
    }

    fn build_node(
        &self,
        _: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        Ok(Box::new(self.0.node(resources.waker.clone())))
    }
}

fn record_format(stack: &mut StackSpec, format: FileFormat, backing: Backing) {
    if let StackSpec::File(spec) = stack
        && spec.format == FileFormat::Probe
    {
        (spec.format, spec.backing) = (format, backing);
    }
}

/// Returns the format in which a file is served. Only `format=probe` detects it.
fn image_format(spec: &DiskFileSpec) -> Result<Format, DeviceError> {
    match spec.format {
        FileFormat::Given(format) => Ok(format),
        FileFormat::Probe => Ok(images::detect(&spec.file.path)?),
        FileFormat::Unspecified => Ok(Format::Raw),
    }
}

fn open_raw(spec: &DiskFileSpec, device: Option<&str>) -> Result<Arc<File>, DeviceError> {
    let stays_raw = spec.format != FileFormat::Given(Format::Raw);
    let file = File::open(&FileSpec { stays_raw, ..spec.file.clone() })?;
    if let Some(compression) = file.compression() {
        let path = spec.file.path.display();
        tracing::warn!(
            device,
            "{path} begins with data compressed with {compression}, and is served as a raw disk (if it is a compressed \
             image, unpack it first; format=raw says that it is a disk)"
        );
    }
    Ok(file)
}

fn image(spec: &DiskFileSpec, format: Format) -> Result<ImageSpec, DeviceError> {
    let detected = spec.format == FileFormat::Probe;
    if let Some(option) = spec.raw_only() {
        return Err(DeviceError::RawOnly { path: spec.file.path.clone(), format, option });
    }
    if detected {
        let path = spec.file.path.display();
        tracing::info!("{path} begins as a {format} image and is served as one, as format=probe asks");
    }
    let (path, read_only, share) = (spec.file.path.clone(), spec.file.ro, spec.file.share);
    let (snapshot, backing, create) = (spec.snapshot.clone(), spec.backing.clone(), spec.creation());
    if snapshot.is_some() && format != Format::Qcow2 {
        return Err(DeviceError::NoSnapshots { path: spec.file.path.clone(), format });
    }
    Ok(ImageSpec { path, format, detected, snapshot, read_only, share, backing, create })
}
