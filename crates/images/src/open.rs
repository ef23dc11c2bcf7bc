//! Opens an image, and the files to which it refers.
//!
//! An image may be untrusted. The files named in its header are opened for reading only, if
//! [`beside`](crate::beside) allows it, and to a limited depth. An image with a separate data file, which
//! would be written, is refused.

use crate::beside::{self, Beside};
use crate::detect::container_of;
use crate::lengths::Lengths;
use crate::pool::Pool;
use crate::{Access, Content, Format, Image, ImageSpec, sparse};
use backends::{Direct, File, FileSpec, OpenError};
use block::Bytes;
use imago::file::File as Storage;
use imago::format::gate::ImplicitOpenGate;
use imago::vmdk::Vmdk;
use imago::{FormatAccess, FormatDriverBuilder, Storage as _, StorageOpenOptions};
use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Most backing files of an image.
const BACKING_MAX: usize = 16;

/// Bytes of cached L2 tables per backing file.
const BACKING_CACHE_LEN: u64 = 8 << 20;

/// Why an image cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file cannot be opened or locked.
    #[error(transparent)]
    File(#[from] OpenError),
    /// The content is invalid or unsupported.
    #[error("opening {} as {format} failed: {source}{}", path.display(), hint(source, *writable))]
    Format {
        /// The image.
        path: PathBuf,
        /// The format as which it was opened.
        format: Format,
        /// Whether it was opened for writing.
        writable: bool,
        /// The error.
        source: io::Error,
    },
    /// The file is not an image of the given format.
    #[error("{} is not a {format} image: {why}", path.display())]
    NotOne {
        /// The file.
        path: PathBuf,
        /// The given format.
        format: Format,
        /// The detected content instead, and what to do.
        why: String,
    },
    /// The disk is empty.
    #[error("{}: the disk is smaller than a sector", _0.display())]
    Empty(PathBuf),
    /// The image cannot be created.
    #[error("creating {} failed: {source}{}", path.display(), creation_hint(source))]
    Create {
        /// The image.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The image to create exists with other properties.
    #[error("{}: {why}", path.display())]
    Differs {
        /// The image.
        path: PathBuf,
        /// The difference, and what to do.
        why: io::Error,
    },
    /// A thread cannot be started.
    #[error("starting its threads failed: {0}")]
    Threads(#[source] io::Error),
}

fn hint(source: &io::Error, writable: bool) -> &'static str {
    match source.kind() {
        io::ErrorKind::Unsupported => " (convert it with qemu-img, to qcow2 for example)",
        // The message says what to do.
        io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput => "",
        io::ErrorKind::NotFound => " (provide the files that it refers to, or rebase it with qemu-img)",
        io::ErrorKind::InvalidData if writable => {
            " (qemu-img check -r all may repair it; ro serves what can be read, format=raw the file as it is)"
        }
        _ => " (qemu-img check says more; format=raw serves the file as it is)",
    }
}

fn creation_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOENT) => " (create its directory first)",
        Some(libc::EACCES | libc::EPERM) => " (change the owner or mode of its directory)",
        Some(libc::ENOTDIR) => " (a component of its path is a file: choose another path)",
        Some(libc::EEXIST) => " (remove it, or omit create)",
        Some(libc::EROFS) => " (its file system is read-only: choose another path)",
        Some(libc::ENOSPC | libc::EDQUOT) => " (free some space)",
        Some(libc::EFBIG) => " (the file system does not support files of that size)",
        _ => "",
    }
}

impl Image {
    /// Opens an image, after creating it if requested and its file is missing.
    ///
    /// # Errors
    /// [`ImageError`]; nothing stays open or locked, and a created file is removed.
    pub fn open(spec: &ImageSpec) -> Result<Arc<Image>, ImageError> {
        let Some(creation) = &spec.create else { return Self::open_existing(spec) };
        let created = creation.create(spec)?;
        Self::open_existing(spec).inspect_err(|error| {
            // A new image that another program has opened meanwhile is not removed.
            if created && !matches!(error, ImageError::File(OpenError::InUse { .. })) {
                let _ = std::fs::remove_file(&spec.path);
            }
        })
    }

    fn open_existing(spec: &ImageSpec) -> Result<Arc<Image>, ImageError> {
        // A vmdk and a snapshot are read-only.
        let read_only = spec.read_only || spec.format == Format::Vmdk || spec.snapshot.is_some();
        let file = File::open(&FileSpec {
            direct: Direct::Off,
            ro: read_only,
            share: spec.share,
            ..FileSpec::new(&spec.path)
        })?;
        let wrong = |source| ImageError::Format {
            path: spec.path.clone(),
            format: spec.format,
            writable: !read_only,
            source,
        };
        let gate = Gate::new(spec);
        let content =
            open_format(spec, read_only, &gate).map_err(|source| not_one(spec).unwrap_or(wrong(source)))?;
        if let (Some(creation), Content::Qcow2(disk)) = (&spec.create, &content) {
            let checked = creation.check_existing(disk, &spec.path);
            checked.map_err(|why| ImageError::Differs { path: spec.path.clone(), why })?;
        }
        let size = Bytes(content.size()).align_down(512);
        if size == Bytes::ZERO || size.0 > i64::MAX as u64 {
            return Err(ImageError::Empty(spec.path.clone()));
        }
        let backing = gate.opened();
        let paths = std::iter::once(&spec.path).chain(&backing).map(PathBuf::as_path);
        let lengths = Lengths::of(paths).map_err(wrong)?;
        let access = Arc::new(Access { content, lengths, read_only, file });
        let pool = Pool::start(access.clone()).map_err(ImageError::Threads)?;
        Ok(Arc::new(Image { spec: spec.clone(), size, read_only, backing, access, pool }))
    }
}

/// Describes the content of a file that does not begin like an image of its format. `None`: it does.
///
/// Called only after opening has failed, because there are vmdk descriptors that detection does not
/// recognise.
fn not_one(spec: &ImageSpec) -> Option<ImageError> {
    if container_of(&spec.path).ok()? == Some(spec.format.to_string().as_str()) {
        return None;
    }
    let why = backends::instead_of_image(&std::fs::File::open(&spec.path).ok()?).ok()?;
    Some(ImageError::NotOne { path: spec.path.clone(), format: spec.format, why })
}

/// Opens a new image and its backing files for reading, exactly as they will be opened when it is served.
pub(crate) fn dry_run(spec: &ImageSpec, file: std::fs::File) -> io::Result<()> {
    Gate::new(spec).open_qcow2(file, &spec.path, qcow2::Options::default(), None).map(drop)
}

fn open_format(spec: &ImageSpec, read_only: bool, gate: &Gate) -> io::Result<Content> {
    match spec.format {
        Format::Qcow2 => {
            let file = std::fs::File::options().read(true).write(!read_only).open(&spec.path)?;
            let options = qcow2::Options { writable: !read_only, ..qcow2::Options::default() };
            let disk = gate.open_qcow2(file, &spec.path, options, spec.snapshot.as_deref())?;
            Ok(Content::Qcow2(Box::new(disk)))
        }
        Format::Vmdk => {
            let storage = Storage::open(StorageOpenOptions::new().filename(&spec.path).write(false))?;
            let mut head = [0; 4];
            let read = std::fs::File::open(&spec.path).and_then(|mut file| file.read_exact(&mut head));
            if read.is_ok() && &head == sparse::MAGIC {
                return Ok(Content::Sparse(sparse::Sparse::open(&spec.path)?));
            }
            if read.is_ok() && &head == b"COWD" {
                let why = "this kind of sparse vmdk (COWD) is not supported";
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            }
            let image = Vmdk::<Storage>::builder(storage).write(false).open(gate.clone())?;
            Ok(Content::Imago(FormatAccess::new(image)))
        }
        Format::Raw => Err(io::Error::new(io::ErrorKind::InvalidInput, "a raw image is a file")),
    }
}

/// A raw backing file.
struct RawSource {
    file: std::fs::File,
    len: u64,
}

impl qcow2::Source for RawSource {
    fn size(&self) -> u64 {
        self.len
    }

    fn read(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        qcow2::Storage::read_at(&self.file, into, at)
    }

    fn mapping(&self, _: u64, len: u64) -> io::Result<(bool, u64)> {
        Ok((false, len))
    }
}

/// Decides which files an image may open.
#[derive(Clone)]
struct Gate {
    opened: Arc<Mutex<Vec<PathBuf>>>,
    beside: Arc<Beside>,
    /// Path of the image that is served.
    served: PathBuf,
}

impl Gate {
    fn new(spec: &ImageSpec) -> Gate {
        let beside = Arc::new(Beside::new(&spec.path, spec.backing.clone()));
        Gate { opened: Arc::default(), beside, served: spec.path.clone() }
    }

    fn opened(&self) -> Vec<PathBuf> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Opens a file that an image refers to, for reading.
    fn open_named(&self, naming: &Path, name: &Path) -> io::Result<(std::fs::File, PathBuf)> {
        let (file, path) = self.beside.open(naming, name)?;
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if opened.len() == BACKING_MAX {
            return Err(refused(format!("it has more than {BACKING_MAX} backing files")));
        }
        opened.push(path.clone());
        Ok((file, path))
    }

    /// Opens a qcow2 image with its backing files.
    fn open_qcow2(
        &self,
        file: std::fs::File,
        path: &Path,
        options: qcow2::Options,
        snapshot: Option<&str>,
    ) -> io::Result<qcow2::Disk> {
        let storage = Arc::new(file);
        let names = qcow2::names(&*storage)?;
        let backing = match names.backing {
            Some(name) => {
                let name = PathBuf::from(OsString::from_vec(name));
                let (file, path) = self.open_named(path, &name)?;
                Some(self.open_backing(file, &path, names.format.as_deref())?)
            }
            None => None,
        };
        match snapshot {
            Some(snapshot) => qcow2::Disk::open_snapshot(storage, backing, snapshot, options),
            None => qcow2::Disk::open(storage, backing, options),
        }
    }

    fn open_backing(
        &self,
        file: std::fs::File,
        path: &Path,
        format: Option<&[u8]>,
    ) -> io::Result<Box<dyn qcow2::Source>> {
        match format {
            Some(b"qcow2") => {
                let options = qcow2::Options { l2_cache_len: BACKING_CACHE_LEN, ..qcow2::Options::default() };
                let image = self.open_qcow2(file, path, options, None);
                Ok(Box::new(image.map_err(|error| in_backing(path, error))?))
            }
            Some(b"raw") | None => {
                if format.is_none() {
                    beside::check_unspecified_format(&file, path)?;
                }
                let len = file.metadata()?.len();
                Ok(Box::new(RawSource { file, len }))
            }
            Some(other) => {
                let (path, format) = (path.display(), String::from_utf8_lossy(other));
                let why = format!(
                    "its backing file {path} has the format {}, but only qcow2 and raw are supported",
                    format.escape_default()
                );
                Err(io::Error::new(io::ErrorKind::Unsupported, why))
            }
        }
    }
}

/// Adds the name of the backing file to an error, once.
fn in_backing(path: &Path, error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::PermissionDenied || error.to_string().starts_with("its backing file") {
        return error;
    }
    io::Error::new(error.kind(), format!("its backing file {}: {error}", path.display()))
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

/// imago calls this for the extents of a vmdk, which contain the data.
impl ImplicitOpenGate<Storage> for Gate {
    fn open_format<F: FormatDriverBuilder<Storage>>(
        &mut self,
        builder: F,
    ) -> io::Result<FormatAccess<Storage>> {
        Ok(FormatAccess::new(builder.write(false).open(self.clone())?))
    }

    fn open_storage(&mut self, options: StorageOpenOptions) -> io::Result<Storage> {
        let path = options.get_filename().ok_or_else(|| refused("a file without a name".into()))?.to_owned();
        if options.get_writable() {
            let why =
                format!("its data is in another file, {}, which is not opened for writing", path.display());
            return Err(refused(why));
        }
        let name = self.served.parent().and_then(|folder| path.strip_prefix(folder).ok()).unwrap_or(&path);
        let (_, path) = self.open_named(&self.served, name)?;
        Storage::open(options.filename(path))
    }
}
