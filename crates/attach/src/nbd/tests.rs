//! An NBD export of one host as the backend of another host's device.

use super::Servers;
use engine::change::Change;
use engine::device::{Device, DeviceConfig};
use engine::host::{Host, HostConfig};
use engine::tables::TableCall;
use ring::RingConfig;
use spec::{StackSpec, TlsSpec};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

/// Time limit of each wait, generous for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

fn host() -> Arc<Host> {
    Host::start(&HostConfig { reactors: 2, ring: RingConfig::default(), nbd: Default::default() }).unwrap()
}

fn device(host: &Arc<Host>, name: &str, stack: StackSpec) -> Arc<Device> {
    let config = DeviceConfig {
        name: name.parse().unwrap(),
        stack,
        layers: Vec::new(),
        limits: String::new(),
        depth: 8,
        slow: None,
        io_timeout: None,
    };
    host.add_device(&config).unwrap()
}

async fn load(host: &Arc<Host>, text: &str) {
    let load = TableCall::Load { text: text.to_owned(), base: Path::new("/").to_owned() };
    host.table("disk", load).await.unwrap();
}

/// Returns the size in sectors, and whether an inactive table is loaded.
async fn state(host: &Arc<Host>) -> (u64, bool) {
    let info = host.table("disk", TableCall::Info).await.unwrap().info;
    (info.size >> 9, info.inactive)
}

/// When one reactor has prepared a stack with a connection to a server and the other reactor fails, the
/// connection must be closed with the stack: its events would otherwise reach the node of that number in the
/// stack that stays.
#[tokio::test]
async fn a_stack_that_one_reactor_cannot_build_leaves_no_connection_open() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("far.sock");
    let (far, near) = (host(), host());
    let server = device(&far, "far", "ram:1M".parse().unwrap());
    let address = format!("unix:{}", socket.display()).parse().unwrap();
    Servers::new(&far).export(&server, &address, "far", &TlsSpec::default()).unwrap();
    let disk = device(&near, "disk", StackSpec::Table("0 4096 zero".parse().unwrap()));
    for reactor in near.reactors() {
        reactor.attach(disk.clone(), Box::new(|_, _, _| {}));
        reactor.refresh(disk.clone()).await.unwrap();
    }
    assert_eq!(disk.queues().len(), 2);
    let remote = format!("nbd:nbd+unix:///far?socket={}", socket.display());
    // The second reactor is kept busy, so the first one prepares its stack earlier, with the connection that
    // was opened when the table was loaded. Of the two queues, the second reactor's is refused (`init_hctx`).
    let is_over = Arc::new(AtomicBool::new(false));
    let other = device(&near, "other", "zero:1M".parse().unwrap());
    let (host, over) = (near.clone(), is_over.clone());
    let busy = std::thread::spawn(move || {
        while !over.load(SeqCst) {
            let pause = Duration::from_millis(30);
            host.reactors()[1].attach(other.clone(), Box::new(move |_, _, _| std::thread::sleep(pause)));
            std::thread::sleep(Duration::from_millis(31));
        }
    });
    for _ in 0..4 {
        let null = "null:1M,init_hctx=2:100:0:-1";
        let lines = format!("0 1024 zero\n1024 1024 linear {remote} 0\n2048 2048 linear {null} 0");
        load(&near, &lines).await;
        let refused = near.change("disk", Change::Resume).await.unwrap_err();
        assert!(refused.to_string().contains("Bad address"), "{refused}");
        assert_eq!(state(&near).await, (4096, true));
        near.table("disk", TableCall::Clear).await.unwrap();
    }
    is_over.store(true, SeqCst);
    busy.join().unwrap();
    let all_closed = async {
        while server.connections() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let closed = tokio::time::timeout(TIMEOUT / 6, all_closed).await;
    assert!(closed.is_ok(), "{} connections were left behind", server.connections());
    far.remove_device("far").await.unwrap();
    for reactor in near.reactors() {
        let answer = tokio::time::timeout(TIMEOUT, reactor.refresh(disk.clone())).await;
        assert!(matches!(answer, Ok(Ok(()))), "it answers");
    }
    near.remove_device("disk").await.unwrap();
    near.shut_down().await.unwrap();
    far.shut_down().await.unwrap();
}
