//! Lost portals and killed servers: the initiator recovers, and nothing that was acknowledged is lost.

use super::{Initiator, PORTAL, Session, needs, serve};
use crate::guest::disk::{Disk, module, tool};
use crate::guest::writer::Writer;
use crate::guest::{Done, Skip, Test, full, soak, test};
use crate::iscsi::{Target, file_stack};
use crate::server::Sandbox;
use crate::tools::{PATIENCE, until};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

pub(super) const TESTS: &[Test] = &[
    full("iscsi/multipath", "dm-multipath over two portals: one is lost under a verifying load", || {
        lost_portals(1)
    }),
    test("iscsi/kill", "the server is killed under load and restarted: nothing acknowledged is lost", || {
        kills(2)
    }),
    soak("iscsi/soak_kill", "three hundred killed servers under load", || kills(300)),
    soak("iscsi/soak_multipath", "thirty lost portals under load", || lost_portals(30)),
];

/// Addresses of the two portals, on the loopback interface. A removed address is a lost network.
const ADDRESSES: [&str; 2] = ["10.99.0.1", "10.99.0.2"];

/// Adds or removes an address of the loopback interface.
fn address(verb: &str, address: &str) {
    tool(&["ip", "address", verb, &format!("{address}/32"), "dev", "lo"]).ok();
}

/// Two addresses, removed when dropped.
struct Addresses;

impl Addresses {
    fn new() -> Addresses {
        ADDRESSES.iter().for_each(|one| address("add", one));
        Addresses
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        for one in ADDRESSES {
            // A test may have removed one of them.
            tool(&["ip", "address", "del", &format!("{one}/32"), "dev", "lo"]);
        }
    }
}

/// A multipath device of dm over some disks, removed when dropped.
struct Multipath(Disk);

impl Multipath {
    fn new(paths: &[&Disk]) -> Multipath {
        let numbers: Vec<String> = paths.iter().map(|path| format!("{} 1", path.attribute("dev"))).collect();
        let table = format!(
            "0 {} multipath 1 queue_if_no_path 0 1 1 queue-length 0 {} 1 {}",
            paths[0].len() / 512,
            paths.len(),
            numbers.join(" ")
        );
        tool(&["dmsetup", "create", "paths", "--noudevsync", "--noudevrules", "--table", &table]).ok();
        tool(&["dmsetup", "mknodes", "paths"]).ok();
        let node = std::fs::canonicalize("/dev/mapper/paths").expect("dmsetup has created it");
        Multipath(Disk::at(node))
    }

    /// Returns the states of the paths: `A` active, `F` failed.
    fn states() -> Vec<String> {
        let status = tool(&["dmsetup", "status", "paths"]).stdout;
        let words = status.split_whitespace();
        words.filter(|word| matches!(*word, "A" | "F")).skip(1).map(str::to_owned).collect()
    }
}

impl Drop for Multipath {
    fn drop(&mut self) {
        // Requests that wait for a path would keep the device open.
        let _ = tool(&["dmsetup", "message", "paths", "0", "fail_if_no_path"]);
        let outcome = tool(&["dmsetup", "remove", "--noudevsync", "--retry", "paths"]);
        if !std::thread::panicking() {
            outcome.ok();
        }
    }
}

/// Reinstates failed paths whose session is logged in, as multipathd does, until dropped. On a busy machine a
/// path may fail although its portal exists: its ping was not answered within a second.
struct Checker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Checker {
    fn start(sessions: &[Session]) -> Checker {
        let stop = Arc::new(AtomicBool::new(false));
        let (ends, paths) =
            (stop.clone(), sessions.iter().map(|one| (one.path.clone(), one.disk.attribute("dev"))));
        let paths: Vec<(PathBuf, String)> = paths.collect();
        let thread = std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                for (state, (session, number)) in Multipath::states().iter().zip(&paths) {
                    if state == "F" && super::state_of(session) == "LOGGED_IN" {
                        tool(&["dmsetup", "message", "paths", "0", &format!("reinstate_path {number}")]);
                    }
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        Checker { stop, thread: Some(thread) }
    }
}

impl Drop for Checker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn lost_portals(times: usize) -> Done {
    needs()?;
    module(&["dm-multipath"])?;
    // Built in, or a module of this name.
    module(&["dm-queue-length"]).map_err(|_| Skip("this kernel has no path selector queue-length".into()))?;
    let sandbox = Sandbox::default();
    let _addresses = Addresses::new();
    let image = sandbox.image("disk.img", 16 << 20);
    let export = "tcp:0.0.0.0:3260";
    let stack = file_stack(&image);
    let words = ["serve", &stack, "--name", "disk", "--iscsi", export];
    let _server = sandbox.start(&mut sandbox.blockyard(&words), 1);
    let initiator = Initiator::start()?;
    let settings = [
        ("node.session.timeo.replacement_timeout", "1"),
        ("node.conn[0].timeo.noop_out_interval", "1"),
        ("node.conn[0].timeo.noop_out_timeout", "4"),
        ("node.session.iscsi.DefaultTime2Wait", "0"),
    ];
    let sessions = ADDRESSES.map(|one| initiator.node(&format!("{one}:3260"), "default", &settings).login());
    let serials = [0, 1].map(|at| tool(&["sg_vpd", "-p", "0x83", sessions[at].disk.path()]).ok());
    assert_eq!(designators(&serials[0]), designators(&serials[1]), "two paths to one unit");
    let paths = Multipath::new(&[&sessions[0].disk, &sessions[1].disk]);
    let checker = Checker::start(&sessions);
    let writer = Writer::start(&paths.0, 4);
    writer.progress(200);
    for time in 0..times {
        let lost = time % 2;
        address("del", ADDRESSES[lost]);
        until(PATIENCE, || (Multipath::states().get(lost)? == "F").then_some(())).expect("the path fails");
        // The other path serves all requests.
        writer.progress(200);
        address("add", ADDRESSES[lost]);
        until(PATIENCE, || (sessions[lost].state() == "LOGGED_IN").then_some(())).expect("it logs in again");
        until(PATIENCE, || (Multipath::states() == ["A", "A"]).then_some(())).expect("both paths are active");
        writer.progress(200);
    }
    let ledger = writer.finish();
    assert_eq!(ledger.failed, 0, "requests failed though one path was left");
    ledger.check(&paths.0);
    drop(checker);
    drop(paths);
    Ok(())
}

/// Returns the lines of page 0x83 that name the unit, without those that name the port.
fn designators(page: &str) -> Vec<&str> {
    page.lines().map(str::trim).filter(|line| line.starts_with("0x6")).collect()
}

fn kills(times: u64) -> Done {
    let sandbox = Sandbox::default();
    let mut target = serve(&sandbox, 16 << 20, "")?;
    let initiator = Initiator::start()?;
    let session = initiator.login();
    let writer = Writer::start(&session.disk, 4);
    let image = sandbox.path("disk.img");
    for _ in 0..times {
        writer.progress(100);
        if let Some(server) = &mut target.server {
            server.kill();
        }
        target = Target::serve_at(&sandbox, 3260, &file_stack(&image), "", &[]);
        assert!(target.url.contains(PORTAL), "{}", target.url);
    }
    writer.progress(100);
    until(PATIENCE, || (session.state() == "LOGGED_IN").then_some(())).expect("it logs in again");
    let ledger = writer.finish();
    assert_eq!(ledger.failed, 0, "requests failed though the server came back");
    ledger.check(&session.disk);
    Ok(())
}
