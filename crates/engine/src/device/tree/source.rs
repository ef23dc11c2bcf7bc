//! The backends of a tree, and how each is put on a ring.

use super::RingResources;
use crate::connect::Remote;
use crate::device::DeviceError;
use crate::programs::ExecDevice;
use crate::spec::{Backing, DiskFileSpec, FileFormat, FileSpec, Format, StackSpec};
use backends::{Backend, Custom, Failing, File, Null, Ram, Zero, ZeroPages, zero_file};
use block::Profile;
use images::{Image, ImageSpec};
use queue::Node;
use rbd::Rbd;
use ring::KernelRing;
use std::io;
use std::sync::Arc;

/// The shared part of a backend.
pub(crate) enum Source {
    File(Arc<File>),
    Image(Arc<Image>),
    Ram(Arc<Ram>),
    Null(Null, Arc<ZeroPages>),
    Zero(Zero, Arc<ZeroPages>),
    Failing(Failing),
    Nbd(Box<Remote>),
    Rbd(Arc<Rbd>),
    Exec(Box<ExecDevice>),
    Custom(Box<Custom>),
}

impl Source {
    pub(crate) fn open(spec: &StackSpec) -> Result<Source, DeviceError> {
        Source::open_for(spec, None)
    }

    /// Opens a backend. `device`: the name of the device that it is opened for, for the log.
    pub(crate) fn open_for(spec: &StackSpec, device: Option<&str>) -> Result<Source, DeviceError> {
        Ok(match spec {
            StackSpec::File(spec) => match image_format(spec)? {
                Format::Raw => Source::File(open_raw(spec, device)?),
                format => Source::Image(Image::open(&image(spec, format)?)?),
            },
            StackSpec::Ram(spec) => Source::Ram(Ram::new(spec)?),
            StackSpec::Null(spec) => Source::Null(Null::new(spec)?, Arc::new(ZeroPages::new()?)),
            StackSpec::Zero(size) => Source::Zero(Zero::new(*size), Arc::new(ZeroPages::new()?)),
            StackSpec::Error(size) => Source::Failing(Failing::new(*size)),
            StackSpec::Nbd(spec) => Source::Nbd(Box::new(Remote::open(spec, device)?)),
            StackSpec::Rbd(spec) => Source::Rbd(Rbd::open(spec)?),
            StackSpec::Exec(spec) => Source::Exec(Box::new(ExecDevice::open(spec, device)?)),
            StackSpec::Custom(spec) => Source::Custom(Box::new(Custom::new(spec)?)),
            StackSpec::Nbdkit(spec) => Source::Nbd(Box::new(Remote::open_nbdkit(spec, device)?)),
            // A table's argument cannot be a table, and a device with a table is a tree.
            StackSpec::Table(_) => unreachable!("a table is no backend"),
        })
    }

    /// Returns its kind, as it is typed.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Source::File(_) => "file",
            Source::Image(_) => "image",
            Source::Ram(_) => "ram",
            Source::Null(..) => "null",
            Source::Zero(..) => "zero",
            Source::Failing(_) => "error",
            Source::Nbd(remote) if remote.is_nbdkit() => "nbdkit",
            Source::Nbd(_) => "nbd",
            Source::Exec(_) => "exec",
            Source::Custom(_) => "driver",
            Source::Rbd(_) => "rbd",
        }
    }

    /// Returns the path, the URI or the size that distinguishes it from others of its kind.
    pub(crate) fn label(&self) -> String {
        match self {
            Source::File(file) => file.spec().path.display().to_string(),
            Source::Image(image) => image.spec().path.display().to_string(),
            Source::Nbd(remote) => remote.nbd.uri().to_owned(),
            Source::Rbd(rbd) => rbd.spec().place(),
            Source::Exec(device) => device.exec().command().to_owned(),
            Source::Custom(custom) => custom.name().to_owned(),
            Source::Ram(_) | Source::Null(..) | Source::Zero(..) | Source::Failing(_) => {
                self.backend().size().to_string()
            }
        }
    }

    /// Replaces `format=probe` in a description by the format that was found, which is not probed again.
    pub(crate) fn record_format(&self, stack: &mut StackSpec) {
        if let StackSpec::File(spec) = stack
            && spec.format == FileFormat::Probe
        {
            (spec.format, spec.backing) = match self {
                Source::Image(image) => {
                    (FileFormat::Given(image.spec().format), image.spec().backing.clone())
                }
                _ => (FileFormat::Unspecified, Backing::Beside),
            };
        }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        match self {
            Source::File(file) => &**file,
            Source::Image(image) => &**image,
            Source::Ram(ram) => &**ram,
            Source::Null(null, _) => null,
            Source::Zero(zero, _) => zero,
            Source::Failing(failing) => failing,
            Source::Nbd(remote) => &remote.nbd,
            Source::Rbd(rbd) => &**rbd,
            Source::Exec(device) => &**device,
            Source::Custom(custom) => &**custom,
        }
    }

    /// Returns its current profile.
    pub(crate) fn profile(&self) -> Profile {
        let backend = self.backend();
        Profile {
            size: backend.size(),
            read_only: backend.read_only(),
            abilities: backend.features(),
            limits: backend.limits(),
            // A server may require blocks smaller than a sector.
            bytewise: match self {
                Source::Nbd(remote) => remote.nbd.export().block_sizes.minimum <= 1,
                Source::Exec(device) => device.exec().is_bytewise(),
                Source::Custom(custom) => custom.is_bytewise(),
                _ => true,
            },
            zero_copy_reads: matches!(self, Source::Ram(_) | Source::Null(..) | Source::Zero(..)),
            inline: matches!(self, Source::File(file) if file.shared().facts().direct.is_none()),
            sparse: matches!(
                self,
                Source::File(_) | Source::Image(_) | Source::Ram(_) | Source::Zero(..) | Source::Rbd(_)
            ),
            opaque: match self {
                Source::File(file) => file.shared().facts().takes_any_block(),
                Source::Null(null, _) => null.is_hollow(),
                Source::Zero(..) | Source::Failing(_) => true,
                Source::Ram(_)
                | Source::Image(_)
                | Source::Nbd(_)
                | Source::Rbd(_)
                | Source::Exec(_)
                | Source::Custom(_) => false,
            },
        }
    }

    /// Builds the node of a queue, on the thread that owns `ring`.
    pub(crate) fn build_nodes(
        &self,
        ring: &mut KernelRing,
        resources: &mut RingResources,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        Ok(match self {
            Source::File(file) => {
                let id = ring.add_file(Arc::new(file.descriptor()?))?;
                resources.files.push(id);
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
                match file.memory() {
                    Some(memory) => Box::new(node.with_memory(resources.region(ring, memory))),
                    None => Box::new(node),
                }
            }
            Source::Image(image) => Box::new(image.node(resources.waker.clone())),
            Source::Ram(ram) => {
                let region = resources.region(ring, ram.memory());
                Box::new(ram.node(Some(region)))
            }
            Source::Null(null, pages) => {
                null.admit_queue()?;
                let memory = null.ram().map_or_else(|| pages.memory(), |ram| ram.memory());
                let region = resources.region(ring, memory);
                let file = ring.add_file(zero_file()?)?;
                resources.files.push(file);
                Box::new(null.node(Some(region)).with_file(file))
            }
            Source::Zero(zero, pages) => {
                let region = resources.region(ring, pages.memory());
                let file = ring.add_file(zero_file()?)?;
                resources.files.push(file);
                Box::new(zero.node(Some(region)).with_file(file))
            }
            Source::Failing(failing) => Box::new(failing.node()),
            Source::Nbd(remote) => {
                Box::new(remote.nbd.node(resources.waker.clone()).map_err(io::Error::other)?)
            }
            Source::Custom(custom) => Box::new(custom.node()),
            Source::Exec(device) => {
                let (memory, connector) = device.connection()?;
                let region = ring.add_guest_memory(memory.lend())?;
                resources.regions.push(region);
                let node = device.exec().node(region.into(), resources.waker.clone(), connector);
                Box::new(node.map_err(io::Error::other)?)
            }
            Source::Rbd(rbd) => {
                let event = ring.add_file(rbd.event())?;
                resources.files.push(event);
                Box::new(rbd.node(event, resources.waker.clone()))
            }
        })
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
