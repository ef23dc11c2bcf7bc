//! The backends that a tree may end in, and how each is put on a ring.

use super::Held;
use crate::device::DeviceError;
use crate::dial::Remote;
use crate::spec::{Backing, Direct, FileFormat, FileSpec, Format, IrqMode, NullSpec, StackSpec};
use backends::{Backend, Completion, Failing, File, Null, Ram, Zero, ZeroPages, zero_file};
use block::Profile;
use images::{Image, ImageSpec};
use queue::Node;
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
}

impl Source {
    pub(crate) fn open(spec: &StackSpec) -> Result<Source, DeviceError> {
        Ok(match spec {
            StackSpec::File(spec) => match image_format(spec)? {
                Format::Raw => Source::File(open_raw(spec)?),
                format => Source::Image(Image::open(&image(spec, format)?)?),
            },
            StackSpec::Ram(spec) => {
                let (size, huge, integrity) = (spec.size, spec.hugepages, spec.integrity);
                Source::Ram(Ram::new(&backends::RamSpec { size, huge, integrity })?)
            }
            StackSpec::Null(spec) => Source::Null(null(spec)?, Arc::new(ZeroPages::new()?)),
            StackSpec::Zero(size) => Source::Zero(Zero::new(*size), Arc::new(ZeroPages::new()?)),
            StackSpec::Error(size) => Source::Failing(Failing::new(*size)),
            StackSpec::Nbd(spec) => Source::Nbd(Box::new(Remote::open(spec)?)),
            // A word of a table cannot be one, and a device that is one is a tree.
            StackSpec::Table(_) => unreachable!("a table is no backend"),
        })
    }

    /// Its kind, as it is typed.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Source::File(_) => "file",
            Source::Image(_) => "image",
            Source::Ram(_) => "ram",
            Source::Null(..) => "null",
            Source::Zero(..) => "zero",
            Source::Failing(_) => "error",
            Source::Nbd(_) => "nbd",
        }
    }

    /// The words for it from here on: what `format=probe` found is not looked for again.
    pub(crate) fn settle(&self, stack: &mut StackSpec) {
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
        }
    }

    /// What it is to those above it, as of now.
    pub(crate) fn profile(&self) -> Profile {
        let backend = self.backend();
        Profile {
            size: backend.size(),
            read_only: backend.read_only(),
            abilities: backend.features(),
            limits: backend.limits(),
            // A server may want whole blocks of less than a sector.
            bytewise: !matches!(self, Source::Nbd(remote) if remote.nbd.export().block_sizes.minimum > 1),
            lends: matches!(self, Source::Ram(_) | Source::Null(..) | Source::Zero(..)),
            in_place: matches!(self, Source::File(file) if file.shared().facts().direct.is_none()),
            sparse: matches!(self, Source::File(_) | Source::Image(_) | Source::Ram(_) | Source::Zero(..)),
            opaque: match self {
                Source::File(file) => file.shared().facts().takes_any_block(),
                Source::Null(null, _) => null.is_hollow(),
                Source::Zero(..) | Source::Failing(_) => true,
                Source::Ram(_) | Source::Image(_) | Source::Nbd(_) => false,
            },
        }
    }

    /// Make the node of a queue on the thread that owns `ring`.
    pub(crate) fn mount(
        &self,
        ring: &mut KernelRing,
        held: &mut Held,
    ) -> io::Result<Box<dyn Node<KernelRing>>> {
        Ok(match self {
            Source::File(file) => {
                let id = ring.add_file(Arc::new(file.descriptor()?))?;
                held.files.push(id);
                if file.shared().facts().direct.is_some() {
                    match ring.register_memory() {
                        Ok(()) => held.registrations += 1,
                        Err(error) => tracing::info!(%error, "direct I/O goes without registered memory"),
                    }
                }
                let mut node = file.node(id).woken_by(held.nudge.clone());
                if let Some(again) = file.error_descriptor()? {
                    // It is synced only: no slot of the ring's table is spent on it.
                    let again = ring.add_unregistered_file(Arc::new(again));
                    held.files.push(again);
                    node = node.with_error_file(again);
                }
                if let Some(scratch) = file.scratch_descriptor()? {
                    let scratch = ring.add_unregistered_file(Arc::new(scratch));
                    held.files.push(scratch);
                    node = node.with_scratch_file(scratch);
                }
                match file.memory() {
                    Some(memory) => Box::new(node.lending(held.region(ring, memory))),
                    None => Box::new(node),
                }
            }
            Source::Image(image) => Box::new(image.node(held.nudge.clone())),
            Source::Ram(ram) => {
                let region = held.region(ring, ram.memory());
                Box::new(ram.node(Some(region)))
            }
            Source::Null(null, pages) => {
                null.admit_queue()?;
                let memory = null.ram().map_or_else(|| pages.memory(), |ram| ram.memory());
                let region = held.region(ring, memory);
                let file = ring.add_file(zero_file()?)?;
                held.files.push(file);
                Box::new(null.node(Some(region)).with_file(file))
            }
            Source::Zero(zero, pages) => {
                let region = held.region(ring, pages.memory());
                let file = ring.add_file(zero_file()?)?;
                held.files.push(file);
                Box::new(zero.node(Some(region)).with_file(file))
            }
            Source::Failing(failing) => Box::new(failing.node()),
            Source::Nbd(remote) => Box::new(remote.nbd.node(held.nudge.clone()).map_err(io::Error::other)?),
        })
    }
}

/// What a file is to be served as. Only `format=probe` lets the file decide.
fn image_format(spec: &FileSpec) -> Result<Format, DeviceError> {
    match spec.format {
        FileFormat::Given(format) => Ok(format),
        FileFormat::Probe => Ok(images::detect(&spec.path)?),
        FileFormat::Unspecified => Ok(Format::Raw),
    }
}

fn open_raw(spec: &FileSpec) -> Result<Arc<File>, DeviceError> {
    let file = File::open(&raw(spec))?;
    if let Some(compression) = file.compression() {
        let path = spec.path.display();
        tracing::warn!(
            "{path} begins with data compressed with {compression}, and is served as a raw disk (if it is a compressed \
             image, unpack it first; format=raw says that it is a disk)"
        );
    }
    Ok(file)
}

fn raw(spec: &FileSpec) -> backends::FileSpec {
    backends::FileSpec {
        path: spec.path.clone(),
        direct: match spec.direct {
            Direct::Auto => backends::Direct::Auto,
            Direct::On => backends::Direct::On,
            Direct::Off => backends::Direct::Off,
        },
        offset: spec.offset,
        sizelimit: spec.sizelimit,
        block: spec.block,
        read_only: spec.ro,
        create: spec.create.is_some(),
        size: spec.create,
        share: spec.share,
        stays_raw: spec.format != FileFormat::Given(Format::Raw),
    }
}

fn image(spec: &FileSpec, format: Format) -> Result<ImageSpec, DeviceError> {
    let detected = spec.format == FileFormat::Probe;
    if let Some(option) = spec.raw_only() {
        return Err(DeviceError::RawOnly { path: spec.path.clone(), format, option });
    }
    if detected {
        let path = spec.path.display();
        tracing::info!("{path} begins as a {format} image and is served as one, as format=probe asks");
    }
    let (path, read_only, share) = (spec.path.clone(), spec.ro, spec.share);
    let (snapshot, backing, create) = (spec.snapshot.clone(), spec.backing.clone(), spec.creation());
    if snapshot.is_some() && format != Format::Qcow2 {
        return Err(DeviceError::NoSnapshots { path: spec.path.clone(), format });
    }
    Ok(ImageSpec { path, format, detected, snapshot, read_only, share, backing, create })
}

fn null(spec: &NullSpec) -> Result<Null, DeviceError> {
    let (irqmode, completion_ns) = match spec.irqmode {
        IrqMode::None => (backends::IrqMode::None, None),
        IrqMode::Softirq => (backends::IrqMode::Softirq, None),
        IrqMode::Timer => (backends::IrqMode::Timer, u64::try_from(spec.completion.as_nanos()).ok()),
    };
    let completion = Completion::new(Some(irqmode), completion_ns)?;
    let NullSpec { size, memory_backed, zoned, knobs, .. } = spec.clone();
    Ok(Null::new(&backends::NullSpec { size, completion, memory_backed, zoned, knobs })?)
}
