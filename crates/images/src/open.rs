//! Opening an image, and what it names beside itself.
//!
//! An image may come from anyone. What its header names is opened only for reading, only if [`beside`](crate::beside) lets it,
//! and only to a certain depth; a data file beside the image, which would be written, is refused.

use crate::beside::{self, Beside};
use crate::lengths::Lengths;
use crate::pool::Pool;
use crate::{Access, Content, Format, Image, ImageSpec, sparse};
use backends::{Direct, File, FileSpec, OpenError};
use block::Bytes;
use imago::file::File as Storage;
use imago::format::gate::ImplicitOpenGate;
use imago::qcow2::Qcow2;
use imago::vmdk::Vmdk;
use imago::{FormatAccess, FormatDriverBuilder, Storage as _, StorageOpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Images under an image at most.
const BACKING_MAX: usize = 16;

/// Why an image cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Its file.
    #[error(transparent)]
    File(#[from] OpenError),
    /// What is in it.
    #[error("opening {} as {format} failed: {source}{}", path.display(), hint(source))]
    Format {
        /// The image.
        path: PathBuf,
        /// What it was taken for.
        format: Format,
        /// What is wrong.
        source: io::Error,
    },
    /// It holds nothing.
    #[error("{}: it holds less than a sector", _0.display())]
    Empty(PathBuf),
    /// No thread can be started.
    #[error("starting its threads failed: {0}")]
    Threads(#[source] io::Error),
}

fn hint(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::Unsupported => " (convert it with qemu-img, to qcow2 for example)",
        // What to do is in the message.
        io::ErrorKind::PermissionDenied => "",
        io::ErrorKind::NotFound => " (bring the files that it names, or rebase it with qemu-img)",
        _ => " (qemu-img check says more; format=raw serves the file as it is)",
    }
}

impl Image {
    /// Open an image.
    ///
    /// # Errors
    /// See [`ImageError`]; nothing stays open or locked.
    pub fn open(spec: &ImageSpec) -> Result<Arc<Image>, ImageError> {
        // A vmdk can only be read.
        let read_only = spec.read_only || spec.format == Format::Vmdk;
        let file = File::open(&FileSpec {
            direct: Direct::Off,
            read_only,
            share: spec.share,
            ..FileSpec::new(&spec.path)
        })?;
        let wrong = |source| ImageError::Format { path: spec.path.clone(), format: spec.format, source };
        let gate = Gate::new(spec);
        let image = open_format(spec, read_only, &gate).map_err(wrong)?;
        let size = Bytes(image.size()).align_down(512);
        if size == Bytes::ZERO || size.0 > i64::MAX as u64 {
            return Err(ImageError::Empty(spec.path.clone()));
        }
        let backing = gate.opened();
        let paths = std::iter::once(&spec.path).chain(&backing).map(PathBuf::as_path);
        let access = Arc::new(Access {
            lengths: Lengths::of(paths).map_err(wrong)?,
            image: RwLock::new(image),
            failed: AtomicBool::new(false),
            flushing: Mutex::default(),
            read_only,
        });
        let pool = Pool::start(access.clone()).map_err(ImageError::Threads)?;
        Ok(Arc::new(Image { spec: spec.clone(), size, read_only, backing, access, pool, file }))
    }
}

fn open_format(spec: &ImageSpec, read_only: bool, gate: &Gate) -> io::Result<Content> {
    let options = StorageOpenOptions::new().filename(&spec.path).write(!read_only);
    let storage = Storage::open(options)?;
    match spec.format {
        Format::Qcow2 => {
            crate::sound::check_header(&spec.path)?;
            if !read_only {
                crate::sound::check(&spec.path)?;
            }
            let builder = Qcow2::<Storage>::builder(storage).write(!read_only);
            Ok(Content::Imago(FormatAccess::new(builder.open(gate.clone())?)))
        }
        Format::Vmdk => {
            let mut head = [0; 4];
            let read = std::fs::File::open(&spec.path).and_then(|mut file| file.read_exact(&mut head));
            if read.is_ok() && &head == sparse::MAGIC {
                return Ok(Content::Sparse(sparse::Sparse::open(&spec.path)?));
            }
            if read.is_ok() && &head == b"COWD" {
                let why = "it is a sparse vmdk of another kind than can be read";
                return Err(io::Error::new(io::ErrorKind::Unsupported, why));
            }
            let image = Vmdk::<Storage>::builder(storage).write(false).open(gate.clone())?;
            Ok(Content::Imago(FormatAccess::new(image)))
        }
        Format::Raw => Err(io::Error::new(io::ErrorKind::InvalidInput, "a raw image is a file")),
    }
}

/// Decides what an image may open beside itself.
#[derive(Clone)]
struct Gate {
    opened: Arc<Mutex<Vec<PathBuf>>>,
    beside: Arc<Beside>,
    /// The image whose names are followed: the one that is served, or one under it.
    naming: PathBuf,
    format: Format,
}

impl Gate {
    fn new(spec: &ImageSpec) -> Gate {
        Gate {
            opened: Arc::default(),
            beside: Arc::new(Beside::new(&spec.path, spec.backing.clone())),
            naming: spec.path.clone(),
            format: spec.format,
        }
    }

    fn opened(&self) -> Vec<PathBuf> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Opens the file that the image names. `path`: the name as imago resolved it.
    fn open_named(&self, path: &Path) -> io::Result<PathBuf> {
        if self.format != Format::Qcow2 {
            // Its extents hold the data.
            let name = self.naming.parent().and_then(|folder| path.strip_prefix(folder).ok()).unwrap_or(path);
            return self.beside.open(&self.naming, name).map(|(_, path)| path);
        }
        let image = std::fs::File::open(&self.naming)?;
        let named = beside::backing_of(&image)?.ok_or_else(|| refused("a file without a name".into()))?;
        let (file, path) = self.beside.open(&self.naming, &named.name)?;
        if named.format.is_none() {
            beside::check_untold(&file, &path)?;
        }
        Ok(path)
    }
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

impl ImplicitOpenGate<Storage> for Gate {
    fn open_format<F: FormatDriverBuilder<Storage>>(
        &mut self,
        builder: F,
    ) -> io::Result<FormatAccess<Storage>> {
        let naming = builder.get_image_path().ok_or_else(|| refused("an image without a name".into()))?;
        let gate = Gate { naming, ..self.clone() };
        Ok(FormatAccess::new(builder.write(false).open(gate)?))
    }

    fn open_storage(&mut self, options: StorageOpenOptions) -> io::Result<Storage> {
        let path = options.get_filename().ok_or_else(|| refused("a file without a name".into()))?.to_owned();
        if options.get_writable() {
            return Err(refused(format!(
                "its data is in another file, {}, which is not opened (convert it with qemu-img)",
                path.display()
            )));
        }
        let path = self.open_named(&path)?;
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if opened.len() == BACKING_MAX {
            return Err(refused(format!("more than {BACKING_MAX} files stand under it")));
        }
        crate::sound::check_header(&path)?;
        opened.push(path.clone());
        drop(opened);
        Storage::open(options.filename(path))
    }
}
