//! A workload for `blockyard crash` and its check, with the database redb on a device without a file system:
//! `use_redb write|verify DEVICE [none|nosync]`.
//!
//! Transactions are acknowledged on descriptor 3. `none` commits with redb's `Durability::None`; with
//! `nosync` the storage ignores redb's requests to sync, as a device that lies about flushes would.
#![forbid(unsafe_code)]

use redb::{Database, Durability, ReadableDatabase, StorageBackend, TableDefinition};
use std::error::Error;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

const TABLE: TableDefinition<'_, u32, &[u8]> = TableDefinition::new("values");
const TRANSACTIONS: u32 = 6;
const KEYS: u32 = 8;
const VALUE_LEN: usize = 900;
/// Bytes of the block before the database, which stores the database's length.
const HEAD_LEN: u64 = 4096;

/// A database of any length on a device whose length is fixed.
#[derive(Debug)]
struct Storage {
    device: File,
    syncs: bool,
}

impl Storage {
    /// Fails beyond the end, as redb requires.
    fn check(&self, offset: u64, len: usize) -> io::Result<u64> {
        if offset + len as u64 > self.len()? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(HEAD_LEN + offset)
    }
}

impl StorageBackend for Storage {
    fn len(&self) -> io::Result<u64> {
        let mut len = [0; 8];
        self.device.read_exact_at(&mut len, 0)?;
        Ok(u64::from_le_bytes(len))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.device.read_exact_at(out, self.check(offset, out.len())?)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let old = self.len()?;
        if len > old {
            // A file that grows reads as zeroes past its old end, also after a power cut.
            self.device.write_all_at(&vec![0; (len - old) as usize], HEAD_LEN + old)?;
            self.device.sync_data()?;
        }
        self.device.write_all_at(&len.to_le_bytes(), 0)
    }

    fn sync_data(&self) -> io::Result<()> {
        if self.syncs { self.device.sync_data() } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.device.write_all_at(data, self.check(offset, data.len())?)
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (mode, device, how) = match words[..] {
        [mode, device] => (mode, device, "immediate"),
        [mode, device, how @ ("none" | "nosync")] => (mode, device, how),
        _ => ("", "", ""),
    };
    let done = match mode {
        "write" => write(device, how),
        "verify" => verify(device),
        _ => Err("usage: use_redb write|verify DEVICE [none|nosync]".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn open(device: &str, syncs: bool) -> Result<Database, Box<dyn Error>> {
    let device = File::options().read(true).write(true).open(device)?;
    Ok(Database::builder().create_with_backend(Storage { device, syncs })?)
}

fn write(device: &str, how: &str) -> Result<(), Box<dyn Error>> {
    let database = open(device, how != "nosync")?;
    let marks = File::options().append(true).open("/dev/fd/3")?;
    for number in 1..=TRANSACTIONS {
        let mut transaction = database.begin_write()?;
        transaction.set_durability(if how == "none" { Durability::None } else { Durability::Immediate })?;
        {
            let mut table = transaction.open_table(TABLE)?;
            table.insert(0, &number.to_le_bytes()[..])?;
            for key in 1..=KEYS {
                table.insert(number * KEYS + key, &vec![number as u8; VALUE_LEN][..])?;
            }
        }
        transaction.commit()?;
        io::Write::write_all(&mut &marks, format!("{number}\n").as_bytes())?;
    }
    Ok(())
}

/// Fails if an acknowledged transaction is missing, or an existing one is damaged.
fn verify(device: &str) -> Result<(), Box<dyn Error>> {
    let acknowledged: u32 = std::env::var("CRASH_MARK")?.parse().unwrap_or(0);
    let database = match open(device, true) {
        Ok(database) => database,
        // The power cut interrupted the creation of the database.
        Err(_) if acknowledged == 0 => return Ok(()),
        Err(why) => return Err(format!("the database cannot be opened: {why}").into()),
    };
    let transaction = database.begin_read()?;
    let table = match transaction.open_table(TABLE) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) if acknowledged == 0 => return Ok(()),
        Err(why) => return Err(format!("{acknowledged} was acknowledged: {why}").into()),
    };
    let last = table.get(0)?.ok_or("the number is missing")?;
    let last = u32::from_le_bytes(last.value().try_into()?);
    if last < acknowledged {
        return Err(format!("{acknowledged} was acknowledged, but the last is {last}").into());
    }
    for number in 1..=last {
        for key in 1..=KEYS {
            let value =
                table.get(number * KEYS + key)?.ok_or_else(|| format!("{number}: {key} is missing"))?;
            if value.value() != vec![number as u8; VALUE_LEN] {
                return Err(format!("{number}: {key} is damaged").into());
            }
        }
    }
    Ok(())
}
