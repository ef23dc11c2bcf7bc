//! What targets have to do without being asked by a request: a mirror copies what is not in sync, for example.
//!
//! Runs on the control plane, a few times a second while there is a target with a chore and not at all while there is none.
//! The work is done on a thread of its own, through nodes of its own on the shared parts of the target's devices, as a
//! check of a path is; what it must not meet, the target's queues and the chore settle between them.
//!
//! *Invariant:* one thread at a time for each target.

use crate::host::Host;
use crate::looking::while_any;
use crate::tree::{Scratch, Tree};
use block::Bytes;
use layers::dm::chore::{Chore, Disks};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long a thread goes on before it looks whether its table is still in use.
const TURN: Duration = Duration::from_millis(500);

/// A chore that was seen, and whether somebody does it.
struct Known {
    chore: Weak<dyn Chore>,
    busy: Arc<AtomicBool>,
}

/// Do the chores of all targets of a host until the future is dropped.
pub async fn watch(host: Arc<Host>) {
    let mut known: Vec<Known> = Vec::new();
    while_any(&host.chores_came, || {
        known.retain(|known| known.chore.strong_count() > 0);
        let mut any = false;
        for device in host.devices() {
            let Some(loaded) = device.form().table.clone() else { continue };
            for target in &loaded.targets {
                let Some(chore) = target.target.chore() else { continue };
                any = true;
                for notice in target.target.notices() {
                    tracing::warn!(device = %device.name(), "{}: {notice}", target.kind);
                }
                let is_this = |known: &&Known| std::ptr::addr_eq(known.chore.as_ptr(), Arc::as_ptr(&chore));
                let busy = match known.iter().find(is_this) {
                    Some(known) => known.busy.clone(),
                    None => {
                        let busy = Arc::<AtomicBool>::default();
                        known.push(Known { chore: Arc::downgrade(&chore), busy: busy.clone() });
                        busy
                    }
                };
                if chore.is_due(ring::clock()) && !busy.swap(true, SeqCst) {
                    start(chore, target.devices.clone(), busy);
                }
            }
        }
        any
    })
    .await;
}

fn start(chore: Arc<dyn Chore>, devices: Vec<Tree>, busy: Arc<AtomicBool>) {
    let idle = busy.clone();
    let work = move || {
        let mut below = Below::new(devices);
        let until = Instant::now() + TURN;
        while chore.is_due(ring::clock()) && Instant::now() < until {
            chore.step(ring::clock(), &mut below);
        }
        busy.store(false, SeqCst);
    };
    // A thread that cannot be made now can be made the next time.
    if std::thread::Builder::new().name("target-chore".to_owned()).spawn(work).is_err() {
        idle.store(false, SeqCst);
    }
}

/// The devices of a target, opened as they are needed.
pub(crate) struct Below {
    disks: Vec<(Tree, Option<Scratch>)>,
}

impl Below {
    pub(crate) fn new(devices: Vec<Tree>) -> Below {
        Below { disks: devices.into_iter().map(|tree| (tree, None)).collect() }
    }

    fn disk(&mut self, device: usize) -> io::Result<&mut Scratch> {
        let (tree, scratch) = &mut self.disks[device];
        if scratch.is_none() {
            *scratch = Some(Scratch::new(tree).map_err(io::Error::other)?);
        }
        scratch.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disks for Below {
    fn read(&mut self, device: usize, at: Bytes, into: &mut [u8]) -> io::Result<()> {
        self.disk(device)?.read(at.0, into)
    }

    fn write(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.disk(device)?.write(at.0, from)
    }

    fn flush(&mut self, device: usize) -> io::Result<()> {
        self.disk(device)?.flush()
    }

    fn record(&mut self, device: usize, at: Bytes, from: &[u8]) -> io::Result<()> {
        self.disk(device)?.record(at.0, from)
    }
}
