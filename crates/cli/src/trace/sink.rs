//! Outputs of a trace: blktrace files, blkparse lines, Chrome traces.

use engine::private::{WriteMode, create};
use std::io::{self, BufWriter, Write};
use trace::blktrace::Encoder;
use trace::wire::Frame;
use trace::{chrome, lines};

/// Encodes frames of a trace and writes them.
pub(super) trait Sink {
    fn frame(&mut self, frame: &Frame) -> io::Result<()>;

    /// Writes buffered output.
    fn flush(&mut self) -> io::Result<()>;
}

/// blktrace's binary format: `PREFIX.blktrace.N` for each queue N, or all queues on stdout.
pub(super) struct Files {
    prefix: Option<String>,
    encoder: Encoder,
    clock_ns: u64,
    /// Outputs by queue; only one if the trace goes to stdout.
    files: Vec<Box<dyn Write>>,
    buffer: Vec<u8>,
}

impl Files {
    pub(super) fn new(prefix: &str) -> io::Result<Files> {
        let prefix = (prefix != "-").then(|| prefix.to_owned());
        let mut files =
            Files { prefix, encoder: Encoder::new(0), clock_ns: 0, files: Vec::new(), buffer: Vec::new() };
        // blkparse reports an empty trace if the first file is missing, so it is created even without records.
        files.file(0)?;
        files.remove_older()?;
        Ok(files)
    }

    /// Removes files of an older trace with more queues: blkparse reads all files of a prefix as one trace.
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

    /// Returns the output of a queue, and creates it at the queue's first frame. Queues appear in order of their numbers.
    fn file(&mut self, queue: u32) -> io::Result<&mut dyn Write> {
        let at = if self.prefix.is_some() { queue as usize } else { 0 };
        if at > self.files.len() {
            return Err(io::Error::other(format!("queue {queue} appears out of order")));
        }
        while self.files.len() <= at {
            let file: Box<dyn Write> = match &self.prefix {
                Some(prefix) => {
                    let path = format!("{prefix}.blktrace.{}", self.files.len());
                    Box::new(BufWriter::with_capacity(1 << 18, create(path.as_ref(), WriteMode::Truncate)?))
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
            Frame::Queue(queue, info) => {
                self.encoder.process(*queue, info.pid, &info.comm, self.clock_ns, &mut bytes);
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
            Frame::Session(session) => {
                self.encoder.session(session);
                0
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

/// Creates the file at `path`, or returns stdout if the path is missing or `-`.
fn output(path: Option<&str>) -> io::Result<Box<dyn Write>> {
    Ok(match path {
        None | Some("-") => Box::new(io::stdout()),
        Some(path) => Box::new(BufWriter::new(create(path.as_ref(), WriteMode::Truncate)?)),
    })
}

/// Text in blkparse's format.
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

/// A Chrome trace in `PREFIX.json` or on stdout.
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
