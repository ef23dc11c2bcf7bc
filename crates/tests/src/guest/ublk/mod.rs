//! ublk: `/dev/ublkbN` of our own server.
//!
//! Names are those of the kernel's selftests (`tools/testing/selftests/ublk`) and of blktests (`ublk/001`…) where a test
//! has the purpose of one of theirs; what it checks may be more. docs/testing.md has the table.

mod cuts;
mod data;
mod death;
mod life;
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

/// The rows of this module.
pub fn tests() -> Vec<Test> {
    [
        cuts::TESTS,
        data::TESTS,
        stripe::TESTS,
        life::TESTS,
        death::TESTS,
        page::TESTS,
        settings::TESTS,
        zoned::TESTS,
    ]
    .concat()
}

/// How long the driver may take for a change of state.
const PATIENCE: Duration = Duration::from_secs(60);

/// The driver.
fn driver() -> Result<Driver, Skip> {
    module(&["ublk_drv"])?;
    match KernelControl::open() {
        Ok(control) => Ok(Driver::new(Arc::new(control))),
        Err(error) => Err(Skip(error.to_string())),
    }
}

/// Removes a device that a test has left. As far as it goes: what is still there, the next test says.
pub fn remove(number: u32) {
    if let Ok(driver) = driver() {
        let _ = driver.stop(number);
        let _ = driver.delete(number);
    }
}

/// What the driver offers; those too old to say are Linux 6.1 to 6.4.
fn offered(driver: &Driver) -> Features {
    let oldest = Features::NEED_GET_DATA.with(Features::USER_RECOVERY).with(Features::USER_RECOVERY_REISSUE);
    driver.features().expect("the driver answers").unwrap_or(oldest)
}

/// Skips where the driver lacks one of these.
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
    // The first to be dropped: a sandbox kills what still runs in it.
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

    /// The same over a file of this length.
    #[track_caller]
    fn file(len: u64, options: &str) -> Result<Ublk, Skip> {
        Ublk::start(len, "file:{image}", options, &[])
    }

    /// What a server says that refuses these options.
    #[track_caller]
    fn refused(options: &str) -> Result<String, Skip> {
        driver()?;
        let sandbox = Sandbox::default();
        Ok(sandbox.run(&["serve", "null:64M", &format!("--ublk={options}")]).failed_with(1))
    }

    /// The N of `/dev/ublkbN`.
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

    /// Ends the server as an operator does, and sees to it that the device is gone.
    #[track_caller]
    fn end(mut self) {
        self.server.terminate();
        self.await_gone();
    }

    /// Waits until nothing is left of the device.
    #[track_caller]
    fn await_gone(&self) {
        let number = self.number();
        let gone = until(PATIENCE, || (!self.driver.devices().contains(&number)).then_some(()));
        assert!(gone.is_some(), "{} is still there", self.disk.path());
    }

    /// `blockyard WORDS` in the sandbox.
    #[track_caller]
    fn command(&self, words: &[&str]) -> Outcome {
        self.sandbox.run(words)
    }
}

/// The image of the test that runs.
fn image() -> PathBuf {
    Path::new(FOLDER).join("disk.img")
}

/// Starts a server and waits until its device is there.
#[track_caller]
fn serve(sandbox: &Sandbox, stack: &str, options: &str, more: &[&str]) -> Server {
    let stack = stack.replace("{image}", &image().to_string_lossy());
    let export = if options.is_empty() { "--ublk".to_owned() } else { format!("--ublk={options}") };
    let words = [&["serve", &stack, "--name", "disk", &export], more].concat();
    sandbox.start(&mut sandbox.blockyard(&words), 1)
}
