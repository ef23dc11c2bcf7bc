//! `blockyard top` in a real terminal, `script`'s, with the screen parsed by a terminal emulator; and as
//! text.

use blockyard_tests::remote::table_as;
use blockyard_tests::server::{Sandbox, binary, signal};
use blockyard_tests::tools::{Outcome, PATIENCE, command, missing, run, until, wait_within};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The binary in a terminal of 24 lines and 80 columns.
struct Terminal<'a> {
    sandbox: &'a Sandbox,
    child: Child,
    keys: ChildStdin,
    screen: Arc<Mutex<vt100::Parser>>,
    /// The whole output.
    raw: Arc<Mutex<Vec<u8>>>,
    /// The thread that reads it.
    reader: Option<std::thread::JoinHandle<()>>,
}

impl<'a> Terminal<'a> {
    fn start(sandbox: &'a Sandbox, words: &str) -> Terminal<'a> {
        // The terminal's settings before and after, and its name.
        let line = format!(
            "stty rows 24 cols 80; tty > tty; stty -g > before; sh -c 'echo $$ > pid; exec {} top {words}'; \
             echo $? > status; stty -g > after",
            binary().display()
        );
        let mut script = sandbox.tool(&["script", "-qfec", &line, "/dev/null"]);
        script.env("TERM", "xterm-256color").env("LC_ALL", "C.UTF-8").env("SHELL", "/bin/sh");
        script.env_remove("NO_COLOR");
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = script.spawn().expect("script runs");
        let mut output = child.stdout.take().expect("it is piped");
        let screen = Arc::new(Mutex::new(vt100::Parser::new(24, 80, 0)));
        let raw = Arc::new(Mutex::new(Vec::new()));
        let (into_screen, into_raw) = (screen.clone(), raw.clone());
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                into_screen.lock().unwrap().process(&bytes[..count]);
                into_raw.lock().unwrap().extend(&bytes[..count]);
            }
        });
        let keys = child.stdin.take().expect("it is piped");
        Terminal { sandbox, child, keys, screen, raw, reader: Some(reader) }
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    /// Waits until this text is on the screen.
    #[track_caller]
    fn shows(&self, what: &str) {
        let shown = until(PATIENCE, || self.text().contains(what).then_some(()));
        assert!(shown.is_some(), "\"{what}\" does not come:\n{}", self.text());
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush()).expect("the terminal is open");
    }

    fn file(&self, name: &str) -> String {
        let path = self.sandbox.path(name);
        let read = || std::fs::read_to_string(&path).ok().filter(|text| text.ends_with('\n'));
        until(PATIENCE, read)
            .unwrap_or_else(|| panic!("{name} is not written:\n{}", self.text()))
            .trim()
            .to_owned()
    }

    fn resize(&mut self, rows: u16, columns: u16) {
        self.screen.lock().unwrap().screen_mut().set_size(rows, columns);
        let tty = self.file("tty");
        let words = ["stty", "-F", &tty, "rows", &rows.to_string(), "cols", &columns.to_string()];
        run(&mut command(&words)).ok();
    }

    /// Returns its exit status; the terminal must be restored.
    #[track_caller]
    fn ended(&mut self) -> String {
        let after = self.file("after");
        assert_eq!(after, self.file("before"), "the terminal is left in another mode");
        wait_within(&mut self.child, PATIENCE).expect("script ends");
        if let Some(reader) = self.reader.take() {
            reader.join().expect("it reads to the end");
        }
        let raw = String::from_utf8_lossy(&self.raw.lock().unwrap()).into_owned();
        let (entered, left) = (raw.rfind("\x1b[?1049h"), raw.rfind("\x1b[?1049l"));
        assert!(entered.is_some() && entered < left, "the other screen is left behind");
        assert!(raw.rfind("\x1b[?25l") < raw.rfind("\x1b[?25h"), "the cursor is hidden");
        self.file("status")
    }
}

impl Drop for Terminal<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn keys_fail_and_reinstate_a_path_while_servers_end_and_start() {
    if missing(&["script", "stty"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let line = "0 2048 multipath 0 0 1 1 round-robin 0 2 0 ram:1M zero:1M";
    let mut server = table_as(&sandbox, "m", line, &["--multipath", "checker=off"]);
    let status = || sandbox.run(&["status", "m"]).ok();
    let mut top = Terminal::start(&sandbox, "-d 0.2");
    top.shows("2/2");
    top.press("\r");
    top.shows("> up      1 enabled");
    top.press("jf");
    top.shows("Fail the path zero:1M of m?");
    top.press("n");
    top.shows("f fail path");
    assert!(status().contains(" zero:1M A "), "a no is a no");
    top.press("fy");
    top.shows("> down");
    assert!(status().contains(" zero:1M F "), "{}", status());
    top.press("r");
    top.shows("Reinstate the path zero:1M of m?");
    top.press("y");
    top.shows("> up");
    assert!(status().contains(" zero:1M A "), "{}", status());
    top.resize(60, 200);
    top.shows("QUEUE  THREAD");
    top.press("\x1b");
    top.shows("CLIENTS");
    top.resize(10, 60);
    top.shows("1 device of 1 process");
    server.terminate();
    top.shows("There are no devices");
    let _other = sandbox.serve("ram:1M", &["--name", "other"]);
    top.shows("other");
    top.press("h");
    top.shows("select a device");
    top.press("x");
    top.shows("other");
    top.press("q");
    assert_eq!(top.ended(), "0");
}

#[test]
fn signals_restore_the_terminal() {
    if missing(&["script", "stty"]) {
        return;
    }
    for (which, status) in [(Signal::TERM, "143"), (Signal::HUP, "129"), (Signal::INT, "130")] {
        let sandbox = Sandbox::default();
        let mut top = Terminal::start(&sandbox, "");
        top.shows("There are no devices");
        signal(top.file("pid").parse().expect("a process"), which);
        assert_eq!(top.ended(), status);
    }
}

/// A stopped process is reported, keeps its figures, and does not prevent quitting.
#[test]
fn a_process_that_does_not_answer_is_reported() {
    if missing(&["script", "stty"]) {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &["--name", "disk"]);
    let mut top = Terminal::start(&sandbox, "-d 0.2");
    top.shows("1 device of 1 process");
    server.freeze();
    top.shows("does not answer");
    server.signal(Signal::CONT);
    top.shows("1 device of 1 process ");
    let answers = until(PATIENCE, || (!top.text().contains("does not answer")).then_some(()));
    assert!(answers.is_some(), "{}", top.text());
    top.press("q");
    assert_eq!(top.ended(), "0");
}

#[test]
fn text_needs_no_terminal_and_a_screen_does() {
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &["--name", "disk"]);
    let socket = server.socket();
    let ended = Arc::new(AtomicBool::new(false));
    let has_ended = ended.clone();
    let load = std::thread::spawn(move || {
        let mut peer = blockyard_tests::peer::Peer::connect(&socket, "disk");
        while !has_ended.load(Ordering::Relaxed) {
            peer.read(4096, 4096).expect("read");
            std::thread::sleep(Duration::from_millis(10));
        }
        peer.disconnect();
    });
    // A process that has not answered within a second is left out of a page: then there is another one.
    let look = || Some(sandbox.run(&["top", "-b", "-n", "2", "-d", "1"]));
    let is_whole =
        |pages: &Outcome| pages.stdout.lines().filter(|line| line.starts_with("disk ")).count() == 2;
    let pages = until(PATIENCE, || look().filter(is_whole)).or_else(look).expect("there is one");
    ended.store(true, Ordering::Relaxed);
    load.join().expect("it reads");
    let pages = pages.ok();
    let disk: Vec<&str> = pages.lines().filter(|line| line.starts_with("disk ")).collect();
    assert_eq!((pages.matches("blockyard top - ").count(), disk.len()), (2, 2), "{pages}");
    let header = pages.lines().find(|line| line.starts_with("DEVICE")).unwrap_or_default();
    assert!(header.contains("IOPS") && header.contains("p99.9") && header.ends_with("STACK"), "{pages}");
    let iops = |line: &str| line.split_whitespace().nth(1).and_then(|word| word.parse::<f64>().ok());
    assert!(disk.iter().any(|line| iops(line).is_some_and(|iops| iops > 0.0)), "{pages}");
    let refused = sandbox.run(&["top", "-b", "-n", "1", "-d", "0.1", "disk", "other"]).failed_with(1);
    assert!(refused.contains("top failed: other: there is no such device"), "{refused}");
    let refused = sandbox.run(&["top"]).failed_with(2);
    assert!(refused.contains("stdout is not a terminal") && refused.contains("top -b"), "{refused}");
    sandbox.run(&["top", "-d", "0"]).failed_with(2);
    sandbox.run(&["top", "-n", "1"]).failed_with(2);
}
