//! ublk: `/dev/ublkbN` of our own server.
//!
//! A test that checks the same as one of the kernel's selftests (`tools/testing/selftests/ublk`) or blktests
//! (`ublk/001`…) has its name, and may check more. docs/testing.md has the table.

mod cuts;
mod data;
mod death;
mod laboratory;
mod life;
mod moves;
mod page;
mod settings;
mod stripe;
mod zoned;

use super::disk::{Disk, FOLDER, module};
use super::{Skip, Test};
use crate::server::{Sandbox, Server};
use crate::tools::{Outcome, until};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use ublk::{DeviceInfo, Driver, Features, KernelControl, State};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        cuts::TESTS,
        data::TESTS,
        stripe::TESTS,
        laboratory::TESTS,
        life::TESTS,
        death::TESTS,
        moves::TESTS,
        page::TESTS,
        settings::TESTS,
        zoned::TESTS,
    ]
    .concat()
}

/// Limit for the driver's change of state.
const PATIENCE: Duration = Duration::from_secs(60);

/// The driver.
fn driver() -> Result<Driver, Skip> {
    module(&["ublk_drv"])?;
    match KernelControl::open() {
        Ok(control) => Ok(Driver::new(Arc::new(control))),
        Err(error) => Err(Skip(error.to_string())),
    }
}

/// Removes a device that a test has left. Errors are ignored: the next test reports remains.
pub fn remove(number: u32) {
    if let Ok(driver) = driver() {
        let _ = driver.stop(number);
        let _ = driver.delete(number);
    }
}

/// Returns the driver's features; drivers that do not report any are of Linux 6.1 to 6.4.
fn offered(driver: &Driver) -> Features {
    let oldest = Features::NEED_GET_DATA.with(Features::USER_RECOVERY).with(Features::USER_RECOVERY_REISSUE);
    driver.features().expect("the driver answers").unwrap_or(oldest)
}

/// Skips if the driver lacks one of these features.
fn needs(features: Features) -> Result<(), Skip> {
    let lacking = features.without(offered(&driver()?));
    if lacking.is_empty() {
        Ok(())
    } else {
        Err(Skip(format!("this kernel's ublk lacks {}", lacking.names().join(", "))))
    }
}

/// A device with its server, in a sandbox.
struct Ublk {
    // Dropped first: a sandbox kills its remaining processes.
    server: Server,
    disk: Disk,
    driver: Driver,
    sandbox: Sandbox,
}

impl Ublk {
    /// Serves a stack with `--ublk=OPTIONS`; `{image}` in it is a file of `len` bytes.
    #[track_caller]
    fn start(len: u64, stack: &str, options: &str, more: &[&str]) -> Result<Ublk, Skip> {
        Ublk::start_in(Sandbox::default(), len, stack, options, more)
    }

    #[track_caller]
    fn start_in(sandbox: Sandbox, len: u64, stack: &str, options: &str, more: &[&str]) -> Result<Ublk, Skip> {
        let driver = driver()?;
        if len > 0 {
            File::create(image()).and_then(|file| file.set_len(len)).expect("room for an image");
        }
        let server = serve(&sandbox, stack, options, more);
        let disk = Disk::at(server.uri());
        Ok(Ublk { server, disk, driver, sandbox })
    }

    /// Serves a file of this length with `--ublk=OPTIONS`.
    #[track_caller]
    fn file(len: u64, options: &str) -> Result<Ublk, Skip> {
        Ublk::start(len, "file:{image}", options, &[])
    }

    /// Returns the message of a server that refuses these options.
    #[track_caller]
    fn refused(options: &str) -> Result<String, Skip> {
        driver()?;
        let sandbox = Sandbox::default();
        Ok(sandbox.run(&["serve", "null:64M", &format!("--ublk={options}")]).failed_with(1))
    }

    /// Returns the N of `/dev/ublkbN`.
    fn number(&self) -> u32 {
        self.disk.name().trim_start_matches("ublkb").parse().expect("a number")
    }

    fn info(&self) -> DeviceInfo {
        self.driver.info(self.number()).expect("the driver knows it")
    }

    fn state(&self) -> Option<State> {
        self.info().state()
    }

    /// Waits for a state.
    #[track_caller]
    fn await_state(&self, state: State) {
        let reached = until(PATIENCE, || (self.state() == Some(state)).then_some(()));
        assert!(reached.is_some(), "the device is {:?} and does not become {state:?}", self.state());
    }

    /// Ends the server with SIGTERM, as an operator does, and checks that the device is removed.
    #[track_caller]
    fn end(mut self) {
        self.server.terminate();
        self.await_gone();
    }

    /// Waits until the device is removed completely.
    #[track_caller]
    fn await_gone(&self) {
        let number = self.number();
        let gone = until(PATIENCE, || (!self.driver.devices().contains(&number)).then_some(()));
        assert!(gone.is_some(), "{} is still there", self.disk.path());
    }

    /// Runs `blockyard WORDS` in the sandbox.
    #[track_caller]
    fn command(&self, arguments: &[&str]) -> Outcome {
        self.sandbox.run(arguments)
    }
}

/// Returns the path of the running test's image.
fn image() -> PathBuf {
    Path::new(FOLDER).join("disk.img")
}

/// Starts a server and waits until its device exists.
#[track_caller]
fn serve(sandbox: &Sandbox, stack: &str, options: &str, more: &[&str]) -> Server {
    let stack = stack.replace("{image}", &image().to_string_lossy());
    let export = if options.is_empty() { "--ublk".to_owned() } else { format!("--ublk={options}") };
    let words = [&["serve", &stack, "--name", "disk", &export], more].concat();
    sandbox.start(&mut sandbox.blockyard(&words), 1)
}
