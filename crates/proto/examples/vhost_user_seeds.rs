//! Writes the seeds of the fuzz corpus `vhost_user`: `cargo run -p blockyard-proto --example vhost_user_seeds`.
//!
//! The seeds are the messages of a front-end that starts a device, migrates it, and reconnects to it.

use std::path::Path;

use blockyard_proto::vhost_user::wire::{VRING_LOG, feature, protocol};
use blockyard_proto::vhost_user::{
    Config, ConfigKind, InflightArea, LogArea, MemoryRegion, Request, VringAddress, VringFile, VringState,
};

fn main() -> std::io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/vhost_user");
    std::fs::create_dir_all(&folder)?;
    let logged = VringAddress { flags: VRING_LOG, log: 1 << 20, ..address() };
    let features = FEATURES | feature::LOG_ALL;
    let migration = vec![
        Request::SetLogBase(LogArea { len: 64 << 10, offset: 0 }),
        Request::SetLogFd,
        Request::SetFeatures(features),
        Request::SetVringAddr(logged),
        Request::GetVringBase(VringState { index: 0, num: 0 }),
    ];
    let inflight = InflightArea { len: 8192, offset: 0, queues: 1, queue_size: 128 };
    let reconnection = vec![
        Request::SetInflightFd(inflight),
        Request::RemMemReg(region(1)),
        Request::AddMemReg(region(2)),
        Request::SetStatus(15),
        Request::GetStatus,
        Request::ResetDevice,
    ];
    for (name, then) in [("start", vec![]), ("migration", migration), ("reconnection", reconnection)] {
        let all = start().into_iter().chain(then);
        let bytes: Vec<u8> =
            all.flat_map(|request| [vec![request.fds() as u8], request.encode(true)].concat()).collect();
        std::fs::write(folder.join(format!("seed-{name}")), bytes)?;
    }
    Ok(())
}

const FEATURES: u64 = 1 << 32 | 1 << 28 | feature::PROTOCOL_FEATURES;

fn region(number: u64) -> MemoryRegion {
    let start = number << 30;
    MemoryRegion { guest_address: start, len: 1 << 28, user_address: start | 1 << 46, mmap_offset: 0 }
}

fn address() -> VringAddress {
    VringAddress {
        descriptors: 1 << 46,
        used: 1 << 46 | 8192,
        available: 1 << 46 | 4096,
        ..VringAddress::default()
    }
}

fn start() -> Vec<Request<'static>> {
    let file = VringFile { index: 0, has_fd: true };
    vec![
        Request::GetFeatures,
        Request::GetProtocolFeatures,
        Request::SetProtocolFeatures(protocol::ALL),
        Request::GetQueueNum,
        Request::GetMaxMemSlots,
        Request::SetBackendReqFd,
        Request::SetOwner,
        Request::GetConfig(Config { offset: 0, kind: ConfigKind::Writable, content: &[0; 60] }),
        Request::SetFeatures(FEATURES),
        Request::GetInflightFd(InflightArea { queues: 1, queue_size: 128, ..InflightArea::default() }),
        Request::SetMemTable(vec![region(0), region(1)]),
        Request::SetVringNum(VringState { index: 0, num: 128 }),
        Request::SetVringBase(VringState { index: 0, num: 0 }),
        Request::SetVringAddr(address()),
        Request::SetVringCall(file),
        Request::SetVringErr(VringFile { has_fd: false, ..file }),
        Request::SetVringKick(file),
        Request::SetVringEnable(VringState { index: 0, num: 1 }),
        Request::SetConfig(Config { offset: 32, kind: ConfigKind::Writable, content: &[1] }),
    ]
}
