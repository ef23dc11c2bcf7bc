//! The memory driver: `cargo run --example memory [unix:PATH [ublk]]`.
use blockyard_driver::{Driver, Error, Server};
use std::{io, sync::RwLock};

struct Memory(RwLock<Vec<u8>>);

impl Driver for Memory {
    fn size(&self) -> u64 {
        self.0.read().unwrap().len() as u64
    }
    fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let at = offset as usize;
        data.copy_from_slice(&self.0.read().unwrap()[at..at + data.len()]);
        Ok(())
    }
    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = offset as usize;
        self.0.write().unwrap()[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().unwrap_or("unix:/tmp/memory.sock".into());
    let server = Server::new("memory", Memory(vec![0; 64 << 20].into())).nbd(&socket);
    let server = if arguments.next().is_some() { server.ublk("") } else { server };
    server.run()
}
