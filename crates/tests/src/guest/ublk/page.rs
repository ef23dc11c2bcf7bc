//! The page of a dead process is restored with its devices, at its address and with its token.

use super::death::{Recovery, needs_recovery};
use super::{PATIENCE, driver, remove};
use crate::guest::disk::tool;
use crate::guest::{Done, Test, test};
use crate::server::Sandbox;
use crate::tools::until;
use std::io::{Read, Write};
use std::net::TcpStream;
use ublk::{Driver, State};

pub(super) const TESTS: &[Test] = &[test(
    "ublk/recover_page",
    "a page comes back with the device that it showed, at its address and with its token",
    page_comes_back,
)];

fn page_comes_back() -> Done {
    needs_recovery(Recovery::Reissue)?;
    let driver = driver()?;
    // A guest's loopback interface may be down; this enables it.
    tool(&["ip", "link", "set", "lo", "up"]);
    let sandbox = Sandbox::default();
    let device = |name: &str| {
        format!(
            "[device.{name}]\nstack = \"null:16M\"\n[[export]]\ndevice = \"{name}\"\nublk = \"recovery=reissue\"\n"
        )
    };
    let topology = sandbox.text("lab.toml", &(device("a") + &device("b")));
    let words = ["up", &topology.to_string_lossy(), "--web", "127.0.0.1:0"];
    let mut server = sandbox.start(&mut sandbox.blockyard(&words), 3);
    let numbers = [0, 1].map(|at| number(server.uri_of(at)));
    let page = server.uri_of(2).to_owned();
    shows(&page, &["a", "b"]);
    server.kill();
    numbers.iter().for_each(|&number| reaches(&driver, number, State::Quiesced));
    // The first gets the address; the other finds it used, and has the same token.
    let reported = sandbox.run(&["recover", "a"]).ok();
    assert!(reported.lines().any(|line| line == format!("* web {page}")), "{reported}");
    let reported = sandbox.run(&["recover", "b"]).ok();
    let other =
        reported.lines().find_map(|line| line.strip_prefix("* web ")).expect("it has one, too").to_owned();
    assert_eq!(page.split_once("token=").map(|half| half.1), other.split_once("token=").map(|half| half.1));
    shows(&page, &["a"]);
    shows(&other, &["b"]);
    let reported = sandbox.run(&["upgrade", "b"]).ok();
    assert!(reported.lines().any(|line| line == format!("* web {other}")), "{reported}");
    shows(&other, &["b"]);
    ["a", "b"].iter().for_each(|name| drop(sandbox.run(&["del", name]).ok()));
    numbers.iter().for_each(|&number| remove(number));
    Ok(())
}

/// Returns the N of `/dev/ublkbN`.
fn number(path: &str) -> u32 {
    path.strip_prefix("/dev/ublkb").and_then(|number| number.parse().ok()).expect("a number")
}

#[track_caller]
fn reaches(driver: &Driver, number: u32, state: State) {
    let there = || driver.info(number).ok()?.state().filter(|now| *now == state);
    assert!(until(PATIENCE, there).is_some(), "{number} does not become {state:?}");
}

/// Waits until a page shows exactly these devices.
#[track_caller]
fn shows(page: &str, names: &[&str]) {
    let (address, token) = page
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once("/?token="))
        .unwrap_or_else(|| panic!("{page}: an address with a token"));
    let mut last = String::new();
    let shown = until(PATIENCE, || {
        let mut stream = TcpStream::connect(address).ok()?;
        let ask = format!(
            "GET /devices HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(ask.as_bytes()).ok()?;
        last.clear();
        stream.read_to_string(&mut last).ok()?;
        let has = |name: &str| last.contains(&format!("\"name\":\"{name}\""));
        ["a", "b"].iter().all(|name| has(name) == names.contains(name)).then_some(())
    });
    assert!(shown.is_some(), "{page} does not show {names:?}: {last}");
}
