//! Valid NBD sessions with changed bytes, lengths and messages, sent to the real server. The server must
//! close each session, survive, stay within its memory, and not change a read-only disk.

use super::super::Tally;
use super::super::daemon::Daemon;
use super::super::options::Options;
use super::super::wire::{End, converse};
use super::change;
use crate::raw::{go_data, option_bytes, request};
use crate::server::noise;
use sim::Rng;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Number of sessions between two checks of the server.
const BETWEEN_LOOKS: u64 = 500;
/// Longest wait for the server's end of the connection after the end of a session.
const PATIENCE: Duration = Duration::from_secs(20);
/// Most memory that the process may use, in KiB.
const MEMORY_KIB: u64 = 600 << 10;
/// Length of both disks.
const LEN: u64 = 1 << 20;

/// Sends `count` sessions.
pub fn run(options: &Options) -> Tally {
    let mut tally = Tally::default();
    for figure in ["sessions", "hangs", "wrong", "panics"] {
        tally.count(figure, 0);
    }
    if let Err(why) = all(options, &mut tally) {
        tally.find("broken", format!("sessions: {why}"));
    }
    tally
}

fn all(options: &Options, tally: &mut Tally) -> Result<(), String> {
    let scratch = options.scratch().map_err(|why| why.to_string())?;
    let (dir, socket) = (scratch.path(), scratch.path().join("s"));
    let kept = dir.join("kept");
    std::fs::write(&kept, noise(1, LEN as usize)).map_err(|why| why.to_string())?;
    std::fs::write(dir.join("disk"), noise(2, LEN as usize)).map_err(|why| why.to_string())?;
    let mut text = String::new();
    for (name, ro) in [("disk", ""), ("kept", ",ro")] {
        text += &format!("[device.{name}]\nstack = \"file:{}{ro}\"\n", dir.join(name).display());
        text += &format!("[[export]]\ndevice = \"{name}\"\nnbd = \"unix:{}\"\n", socket.display());
    }
    let topology = dir.join("t.toml");
    std::fs::write(&topology, text).map_err(|why| why.to_string())?;
    let start = || Daemon::start(dir, &["up", &topology.to_string_lossy()], 2).map_err(|refusal| refusal.log);
    let mut daemon = start()?;
    let mut done = 0;
    while done < options.count && !options.is_over() {
        let batch = BETWEEN_LOOKS.min(options.count - done);
        let first = options.seed.wrapping_add(done);
        play(options, &socket, first, batch, tally);
        done += batch;
        tally.count("sessions", batch);
        let replay = format!("sessions --seed={first} --count={batch}");
        if options.canary && done >= options.count {
            std::fs::write(&kept, noise(3, LEN as usize)).map_err(|why| why.to_string())?;
        }
        if let Some(bad) = daemon.complaint() {
            tally.find("panics", format!("{replay}: {bad}"));
            daemon = start()?;
        }
        if daemon.status_field("VmHWM") > MEMORY_KIB {
            tally.find("wrong", format!("{replay}: {} MiB in memory", daemon.status_field("VmHWM") >> 10));
            daemon = start()?;
        }
        if std::fs::read(&kept).map_err(|why| why.to_string())? != noise(1, LEN as usize) {
            tally.find("wrong", format!("{replay}: a disk that may only be read was written"));
            std::fs::write(&kept, noise(1, LEN as usize)).map_err(|why| why.to_string())?;
        }
    }
    tally.count("peak_mib", daemon.status_field("VmHWM") >> 10);
    Ok(())
}

fn play(options: &Options, socket: &Path, first: u64, count: u64, tally: &mut Tally) {
    let (next, found) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..options.workers {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= count {
                        break;
                    }
                    let seed = first.wrapping_add(number);
                    let what = match converse(socket, &mutated(seed), PATIENCE) {
                        Ok((End::Closed, _)) => continue,
                        Ok((End::Silent, _)) => "hangs",
                        Err(_) => "panics",
                    };
                    found.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((what, seed));
                }
            });
        }
    });
    for (what, seed) in found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        tally.find(what, format!("sessions --seed={seed} --count=1"));
    }
}

/// Returns the session of a seed, changed in one to six places.
fn mutated(seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut messages = session(&mut rng);
    for _ in 0..1 + rng.below(6) {
        let at = rng.below(messages.len() as u64) as usize;
        match rng.below(8) {
            0 => drop(messages.remove(at)),
            1 => {
                let copy = messages[at].clone();
                messages.insert(at, copy);
            }
            2 => {
                let other = rng.below(messages.len() as u64) as usize;
                messages.swap(at, other);
            }
            _ => change(&mut messages[at], &mut rng),
        }
        if messages.is_empty() {
            messages.push(Vec::new());
        }
    }
    messages.concat()
}

/// Returns a valid session, message by message.
fn session(rng: &mut Rng) -> Vec<Vec<u8>> {
    let name = *rng.pick(&["disk", "disk", "kept"]);
    let mut messages = vec![rng.pick(&[3u32, 1, 3]).to_be_bytes().to_vec()];
    let (structured, extended) = (rng.chance(600), rng.chance(300));
    if rng.chance(200) {
        messages.push(option_bytes(3, &[]));
    }
    if structured {
        messages.push(option_bytes(8, &[]));
    }
    if extended {
        messages.push(option_bytes(11, &[]));
    }
    let mut context = (name.len() as u32).to_be_bytes().to_vec();
    context.extend(name.as_bytes());
    if rng.chance(300) {
        messages.push(option_bytes(9, &[&context[..], &0u32.to_be_bytes()].concat()));
    }
    if rng.chance(500) {
        let query = [&1u32.to_be_bytes()[..], &15u32.to_be_bytes(), b"base:allocation"].concat();
        messages.push(option_bytes(10, &[&context[..], &query].concat()));
    }
    if rng.chance(200) {
        messages.push(option_bytes(6, &go_data(name)));
    }
    if rng.chance(100) {
        messages.push(option_bytes(5, &[]));
    }
    let mut go = go_data(name);
    if rng.chance(400) {
        go.truncate(go.len() - 2);
        go.extend([0, 2, 0, 3, 0, 1]);
    }
    messages.push(if rng.chance(100) { option_bytes(1, name.as_bytes()) } else { option_bytes(7, &go) });
    for cookie in 0..1 + rng.below(10) {
        messages.push(one_request(cookie, extended, rng));
    }
    messages.push(header(extended, 0, 2, 99, 0, 0));
    messages
}

fn one_request(cookie: u64, extended: bool, rng: &mut Rng) -> Vec<u8> {
    let len = *rng.pick(&[1u32, 512, 4096, 5000]);
    let offset = rng.below(LEN - 8192);
    match rng.below(8) {
        0 | 1 => header(extended, 0, 0, cookie, offset, len),
        2 | 3 => {
            // With extended headers a write has a flag for its payload.
            let flags = u16::from(rng.chance(200)) | if extended { 32 } else { 0 };
            [header(extended, flags, 1, cookie, offset, len), vec![cookie as u8; len as usize]].concat()
        }
        4 => header(extended, 0, 3, cookie, 0, 0),
        5 => header(extended, 0, 4, cookie, offset, len),
        6 => header(extended, 2, 6, cookie, offset, len),
        _ => header(extended, 0, 7, cookie, offset, len),
    }
}

fn header(extended: bool, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    if !extended {
        return request(flags, command, cookie, offset, len);
    }
    let mut bytes = 0x21e4_1c71_u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(u64::from(len).to_be_bytes());
    bytes
}
