//! A system in memory, for tests: opens anything, records every change, and fails on request.

use crate::config::{Backing, Change, Config, Facts, StorageObject};
use crate::system::{Applied, BlockDevice, Session, System};

/// A system in memory.
#[derive(Default, Debug)]
pub struct Memory {
    /// All changes that were applied, in order.
    pub changes: Vec<Change>,
    /// The error of the next change, if it must fail.
    pub fails: Option<String>,
    /// The sessions that the system reports.
    pub sessions: Vec<Session>,
    /// The paths that count as block devices.
    pub block_devices: Vec<(String, BlockDevice)>,
    counter: u64,
}

impl System for Memory {
    fn can_change(&self) -> bool {
        true
    }

    fn open(&mut self, object: &StorageObject) -> Result<Facts, String> {
        if let Some(why) = self.fails.take() {
            return Err(why);
        }
        let is_memory = matches!(object.backing, Backing::Ramdisk { .. });
        Ok(Facts {
            size: if object.size == 0 { 1 << 20 } else { object.size },
            block_size: 512,
            hw_max_sectors: if is_memory { u32::MAX } else { 16384 },
            hw_queue_depth: 128,
            can_unmap: !matches!(object.backing, Backing::Ramdisk { nullio: true }),
            rotates: !is_memory,
            has_write_cache: true,
            max_unmap_lba_count: 8192,
            unmap_granularity: 1,
        })
    }

    fn apply(&mut self, config: &Config, change: &Change) -> Result<Applied, String> {
        if let Some(why) = self.fails.take() {
            return Err(why);
        }
        let applied = match change {
            Change::AddLun(id, index, _) if config.group(id).is_some_and(|group| group.nexus.is_some()) => {
                Applied { node: Some(format!("/dev/memory{index}")) }
            }
            _ => Applied::default(),
        };
        self.changes.push(change.clone());
        Ok(applied)
    }

    fn sessions(&self) -> Vec<Session> {
        self.sessions.clone()
    }

    fn random(&mut self, bytes: &mut [u8]) {
        self.counter += 1;
        let number = self.counter.to_be_bytes();
        bytes.iter_mut().rev().zip(number.iter().rev()).for_each(|(to, from)| *to = *from);
    }

    fn host_name(&self) -> String {
        "host.example.org".to_owned()
    }

    fn block_device(&self, path: &str) -> Option<BlockDevice> {
        self.block_devices.iter().find(|(known, _)| known == path).map(|(_, device)| *device)
    }
}
