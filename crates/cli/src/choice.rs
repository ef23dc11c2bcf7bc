//! How a device is shown when nobody said how: ublk where the kernel has it and we may use it, else as root a loop
//! device, else an NBD socket.

use engine::device::Device;
use engine::host::Host;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// What must be there for a loop device over a FUSE file.
const LOOP_NEEDS: [&str; 2] = ["/dev/fuse", "/dev/loop-control"];

/// A way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Choice {
    /// A ublk device.
    Ublk,
    /// A loop device.
    Loop,
    /// An NBD socket in the run directory.
    Nbd,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Choice::Ublk => "ublk",
            Choice::Loop => "a loop device",
            Choice::Nbd => "an NBD socket in the run directory",
        })
    }
}

/// The best way, and why it is. `for_nbd`: options were given that only NBD has.
pub(crate) async fn of(host: &Arc<Host>, device: &Arc<Device>, for_nbd: bool) -> (Choice, String) {
    if for_nbd {
        return (Choice::Nbd, "options for NBD were given, so not ublk".to_owned());
    }
    match std::env::var("BLOCKYARD_EXPORT").as_deref() {
        Ok("ublk") => return (Choice::Ublk, "BLOCKYARD_EXPORT says so".to_owned()),
        Ok("loop") => return (Choice::Loop, "BLOCKYARD_EXPORT says so".to_owned()),
        Ok("nbd") => return (Choice::Nbd, "BLOCKYARD_EXPORT says so".to_owned()),
        _ => {}
    }
    let no_ublk = match host.can_ublk(device).await {
        Ok(()) => return (Choice::Ublk, "this kernel has it".to_owned()),
        Err(why) => why,
    };
    match no_loop() {
        None => (Choice::Loop, format!("there is no ublk: {no_ublk}")),
        Some(why) => (Choice::Nbd, format!("there is no ublk: {no_ublk}; and no loop device: {why}")),
    }
}

/// Why there can be no loop device.
fn no_loop() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("that is for root".to_owned());
    }
    let missing = LOOP_NEEDS.into_iter().find(|path| !Path::new(path).exists())?;
    Some(format!("there is no {missing}"))
}
