//! Where a trace goes.

use engine::private::{Content, create};
use std::io::{self, BufWriter, Write};
use trace::blktrace::Encoder;
use trace::wire::Frame;
use trace::{chrome, lines};

/// Takes frames, and writes what becomes of them.
pub(super) trait Sink {
    fn frame(&mut self, frame: &Frame) -> io::Result<()>;

    /// Let readers have what there is.
    fn flush(&mut self) -> io::Result<()>;
}

/// `PREFIX.blktrace.N` for each queue, or all of them on stdout.
pub(super) struct Files {
    prefix: Option<String>,
    encoder: Encoder,
    clock_ns: u64,
    /// By queue; one on stdout.
    files: Vec<Box<dyn Write>>,
    buffer: Vec<u8>,
}

impl Files {
    pub(super) fn new(prefix: &str) -> io::Result<Files> {
        let prefix = (prefix != "-").then(|| prefix.to_owned());
        let mut files =
            Files { prefix, encoder: Encoder::new(0), clock_ns: 0, files: Vec::new(), buffer: Vec::new() };
        // Readers say that there is nothing if the first is missing, whatever others there are.
        files.file(0)?;
        files.remove_older()?;
        Ok(files)
    }

    /// Readers take all files of a name for one trace, so what an older one of more queues has left must go.
    fn remove_older(&self) -> io::Result<()> {
        let Some(prefix) = &self.prefix else { return Ok(()) };
        for queue in 1.. {
            match std::fs::remove_file(format!("{prefix}.blktrace.{queue}")) {
                Err(why) if why.kind() == io::ErrorKind::NotFound => break,
                result => result?,
            }
        }
        Ok(())
    }

    /// The file of a queue: queues come in the order of their numbers.
    fn file(&mut self, queue: u32) -> io::Result<&mut dyn Write> {
        let at = if self.prefix.is_some() { queue as usize } else { 0 };
        if at > self.files.len() {
            return Err(io::Error::other(format!("queue {queue} comes out of turn")));
        }
        while self.files.len() <= at {
            let file: Box<dyn Write> = match &self.prefix {
                Some(prefix) => {
                    let path = format!("{prefix}.blktrace.{}", self.files.len());
                    Box::new(BufWriter::with_capacity(1 << 18, create(path.as_ref(), Content::New)?))
                }
                None => Box::new(io::stdout()),
            };
            self.files.push(file);
        }
        Ok(&mut self.files[at])
    }
}

impl Sink for Files {
    fn frame(&mut self, frame: &Frame) -> io::Result<()> {
        let mut bytes = std::mem::take(&mut self.buffer);
        bytes.clear();
        let queue = match frame {
            Frame::Opened(opened) => {
                self.encoder = Encoder::new(opened.number);
                self.clock_ns = opened.clock_ns;
                self.encoder.start(opened.clock_ns, opened.wall, &mut bytes);
                0
            }
            Frame::Lane(queue, lane) => {
                self.encoder.process(*queue, lane.pid, &lane.comm, self.clock_ns, &mut bytes);
                *queue
            }
            Frame::Records(queue, records) => {
                records.iter().for_each(|record| self.encoder.record(*queue, record, &mut bytes));
                *queue
            }
            Frame::Dropped(queue, count) => {
                self.encoder.dropped(*queue, *count, &mut bytes);
                *queue
            }
            Frame::Tick(_) | Frame::Closed => 0,
        };
        let written = self.file(queue)?.write_all(&bytes);
        self.buffer = bytes;
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.files.iter_mut().try_for_each(|file| file.flush())
    }
}

/// A file, or stdout.
fn output(path: Option<&str>) -> io::Result<Box<dyn Write>> {
    Ok(match path {
        None | Some("-") => Box::new(io::stdout()),
        Some(path) => Box::new(BufWriter::new(create(path.as_ref(), Content::New)?)),
    })
}

/// blkparse's lines.
pub(super) struct Text {
    lines: lines::Lines,
    text: String,
    output: Box<dyn Write>,
}

impl Text {
    pub(super) fn new(path: Option<&str>) -> io::Result<Text> {
        Ok(Text { lines: lines::Lines::default(), text: String::new(), output: output(path)? })
    }
}

impl Sink for Text {
    fn frame(&mut self, frame: &Frame) -> io::Result<()> {
        self.text.clear();
        self.lines.frame(frame, &mut self.text);
        self.output.write_all(self.text.as_bytes())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

/// A Chrome trace, `PREFIX.json` or stdout.
pub(super) struct Chrome {
    chrome: chrome::Chrome,
    text: String,
    output: Box<dyn Write>,
}

impl Chrome {
    pub(super) fn new(prefix: Option<&str>) -> io::Result<Chrome> {
        let path = prefix.map(|prefix| match prefix {
            "-" => "-".to_owned(),
            prefix if prefix.ends_with(".json") => prefix.to_owned(),
            prefix => format!("{prefix}.json"),
        });
        Ok(Chrome {
            chrome: chrome::Chrome::default(),
            text: String::new(),
            output: output(path.as_deref())?,
        })
    }
}

impl Sink for Chrome {
    fn frame(&mut self, frame: &Frame) -> io::Result<()> {
        self.text.clear();
        self.chrome.frame(frame, &mut self.text);
        self.output.write_all(self.text.as_bytes())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}
