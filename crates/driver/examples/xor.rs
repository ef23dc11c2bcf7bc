//! A layer that XORs data with a key, over a file: `cargo run --example xor FILE [unix:PATH [ublk]]`.
use blockyard_driver::{Driver, Error, Server};
use std::{fs::File, io, os::unix::fs::FileExt};

struct Xor<D>(D, u8);
impl<D: Driver> Driver for Xor<D> {
    fn size(&self) -> u64 {
        self.0.size()
    }
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, data)?;
        data.iter_mut().for_each(|byte| *byte ^= self.1);
        Ok(())
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, &data.iter().map(|byte| byte ^ self.1).collect::<Vec<_>>())
    }
}

struct Disk(File);
impl Driver for Disk {
    fn size(&self) -> u64 {
        self.0.metadata().map_or(0, |data| data.len() & !511)
    }
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(data, offset)
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)?;
        self.0.sync_data()
    }
}

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().chain(["unix:/tmp/xor.sock".into()]).collect();
    let disk = Disk(File::options().read(true).write(true).open(&arguments[1]).expect("the file opens"));
    let server = Server::new("xor", Xor(disk, 0x5a)).nbd(&arguments[2]);
    if arguments.iter().any(|word| word == "ublk") { server.ublk("").run() } else { server.run() }
}
