//! Changes and removals that are refused half way: whoever refuses, and at whichever step, everything is as it was.

use super::*;
use crate::control::{BoxFuture, ExportInfo};
use crate::device::DeviceConfig;
use crate::host::{Export, HostConfig};
use crate::spec::TlsSpec;
use crate::tables::TableCall;
use ring::RingConfig;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

/// Long enough for a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(60);

/// An export that does nothing and refuses what it is told to refuse.
#[derive(Default)]
struct Fake {
    name: &'static str,
    /// Sizes that it was told, and did not refuse.
    told: Mutex<Vec<u64>>,
    /// The size that it refuses; 0: none.
    refuses_size: AtomicU64,
    in_use: AtomicBool,
    /// It refuses to be closed although it was not in use when it was asked.
    refuses_close: AtomicBool,
    closes: AtomicU32,
    removals: AtomicU32,
}

impl Fake {
    fn answer(refuses: bool) -> BoxFuture<'static, Result<(), HostError>> {
        // Any refusal is as good as another.
        Box::pin(async move { if refuses { Err(HostError::NameTaken) } else { Ok(()) } })
    }

    fn told(&self) -> Vec<u64> {
        std::mem::take(&mut self.told.lock().unwrap())
    }
}

struct Faked(Arc<Fake>);

impl Export for Faked {
    fn info(&self, _: &Device) -> ExportInfo {
        ExportInfo {
            kind: "fake".to_owned(),
            address: self.0.name.to_owned(),
            connections: 0,
            tls: "off".to_owned(),
            details: BTreeMap::new(),
        }
    }

    fn may_close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        Fake::answer(self.0.in_use.load(SeqCst))
    }

    fn close<'a>(&'a self, _: &'a Arc<Device>) -> BoxFuture<'a, Result<(), HostError>> {
        let refuses = self.0.in_use.load(SeqCst) || self.0.refuses_close.load(SeqCst);
        self.0.closes.fetch_add(u32::from(!refuses), SeqCst);
        Fake::answer(refuses)
    }

    fn resized(&self, size: Bytes) -> BoxFuture<'_, Result<(), HostError>> {
        let refuses = self.0.refuses_size.load(SeqCst) == size.0;
        if !refuses {
            self.0.told.lock().unwrap().push(size.0);
        }
        Fake::answer(refuses)
    }

    fn closed(&self) -> BoxFuture<'_, Result<(), HostError>> {
        self.0.removals.fetch_add(1, SeqCst);
        Fake::answer(false)
    }
}

fn host() -> Arc<Host> {
    Host::start(&HostConfig { reactors: 2, ring: RingConfig::default(), nbd: Default::default() }).unwrap()
}

fn device(host: &Arc<Host>, name: &str, stack: StackSpec) -> Result<Arc<Device>, HostError> {
    let (layers, limits) = (Vec::new(), String::new());
    host.add_device(&DeviceConfig {
        name: name.parse().unwrap(),
        stack,
        layers,
        limits,
        depth: 8,
        slow: None,
        io_timeout: None,
    })
}

/// A device named `disk` from that table, with two exports and a queue on each reactor.
async fn table(host: &Arc<Host>, text: &str) -> (Arc<Device>, [Arc<Fake>; 2]) {
    let disk = device(host, "disk", StackSpec::Table(text.parse().unwrap())).unwrap();
    with_exports(host, &disk).await
}

async fn with_exports(host: &Arc<Host>, disk: &Arc<Device>) -> (Arc<Device>, [Arc<Fake>; 2]) {
    let fakes = ["one", "two"].map(|name| Arc::new(Fake { name, ..Fake::default() }));
    for fake in &fakes {
        host.add_export(disk, Arc::new(Faked(fake.clone())));
    }
    for reactor in host.reactors() {
        reactor.attach(disk.clone(), Box::new(|_, _, _| {}));
        assert!(is_alive(reactor, disk).await);
    }
    assert_eq!(disk.lanes().len(), 2);
    (disk.clone(), fakes)
}

/// Whether a reactor answers.
async fn is_alive(reactor: &crate::reactor::Reactor, disk: &Arc<Device>) -> bool {
    matches!(tokio::time::timeout(PATIENCE, reactor.under_way(disk.clone())).await, Ok(Ok(_)))
}

async fn load(host: &Arc<Host>, text: &str) {
    let load = TableCall::Load { text: text.to_owned(), base: Path::new("/").to_owned() };
    host.table("disk", load).await.unwrap();
}

/// Its size in sectors, and whether a table is loaded.
async fn state(host: &Arc<Host>) -> (u64, bool) {
    let info = host.table("disk", TableCall::Info).await.unwrap().info;
    (info.size >> 9, info.inactive)
}

const SMALL: u64 = 1024 << 9;
const LARGE: u64 = 4096 << 9;

#[tokio::test]
async fn a_table_of_a_size_that_an_export_refuses_stays_loaded() {
    let host = host();
    for (from, to) in [(LARGE, SMALL), (SMALL, LARGE)] {
        let (disk, [one, two]) = table(&host, &format!("0 {} zero", from >> 9)).await;
        load(&host, &format!("0 {} zero", to >> 9)).await;
        for suspended in [false, true] {
            if suspended {
                host.change("disk", Change::Suspend { flush: true }).await.unwrap();
            }
            two.refuses_size.store(to, SeqCst);
            host.change("disk", Change::Resume).await.unwrap_err();
            assert_eq!(one.told(), [to, from], "it is told of the size that stays");
            assert_eq!(two.told(), [from]);
            assert_eq!(state(&host).await, (from >> 9, true), "from {from} to {to}");
            assert_eq!(disk.is_suspended(), suspended);
            assert!(!disk.is_changing());
        }
        two.refuses_size.store(0, SeqCst);
        host.change("disk", Change::Resume).await.unwrap();
        assert_eq!((one.told(), two.told()), (vec![to], vec![to]));
        assert_eq!(state(&host).await, (to >> 9, false));
        assert!(!disk.is_suspended());
        host.remove_device("disk").await.unwrap();
    }
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_size_that_an_export_refuses_leaves_the_device_and_its_file_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let image = std::fs::File::create(&path).unwrap();
    let length = || std::fs::metadata(&path).unwrap().len();
    let host = host();
    for (from, to) in [(LARGE, SMALL), (SMALL, LARGE)] {
        image.set_len(from).unwrap();
        let stack = format!("file:{}", path.display()).parse().unwrap();
        let disk = device(&host, "disk", stack).unwrap();
        let (disk, [one, two]) = with_exports(&host, &disk).await;
        let resize = || Change::Resize { size: Some(to), shrink: true };
        two.refuses_size.store(to, SeqCst);
        host.change("disk", resize()).await.unwrap_err();
        assert_eq!(one.told(), [to, from]);
        assert_eq!((disk.size().0, length()), (from, from));
        two.refuses_size.store(0, SeqCst);
        host.change("disk", resize()).await.unwrap();
        assert_eq!((one.told(), disk.size().0, length()), (vec![to], to, to));
        host.remove_device("disk").await.unwrap();
    }
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_removal_that_an_export_refuses_closes_no_other() {
    let host = host();
    let (disk, [one, two]) = table(&host, "0 2048 zero").await;
    host.change("disk", Change::Suspend { flush: true }).await.unwrap();
    two.in_use.store(true, SeqCst);
    host.remove_device("disk").await.unwrap_err();
    assert_eq!(one.closes.load(SeqCst), 0);
    assert_eq!(host.exports(&disk).len(), 2);
    assert!(disk.is_suspended(), "what is held back is held back still");
    assert!(host.device("disk").is_some_and(|now| Arc::ptr_eq(&now, &disk)));
    two.in_use.store(false, SeqCst);
    host.remove_device("disk").await.unwrap();
    assert_eq!((one.removals.load(SeqCst), two.removals.load(SeqCst)), (1, 1));
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn an_export_that_comes_into_use_in_between_keeps_the_device_and_no_dead_export_is_shown() {
    let host = host();
    let (disk, [one, two]) = table(&host, "0 2048 zero").await;
    host.change("disk", Change::Suspend { flush: true }).await.unwrap();
    two.refuses_close.store(true, SeqCst);
    host.remove_device("disk").await.unwrap_err();
    assert_eq!(one.closes.load(SeqCst), 1);
    let shown: Vec<String> = host.exports(&disk).into_iter().map(|export| export.address).collect();
    assert_eq!(shown, ["two"]);
    assert!(disk.is_suspended());
    let taken = device(&host, "disk", "zero:1M".parse().unwrap());
    assert!(matches!(taken.map(drop), Err(HostError::NameTaken)));
    two.refuses_close.store(false, SeqCst);
    host.remove_device("disk").await.unwrap();
    assert_eq!((one.closes.load(SeqCst), two.closes.load(SeqCst)), (1, 1), "each is closed once");
    assert_eq!((one.removals.load(SeqCst), two.removals.load(SeqCst)), (1, 1));
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn of_two_removals_at_once_one_finds_nothing() {
    let host = host();
    let (_, [one, _]) = table(&host, "0 2048 zero").await;
    let (first, second) = tokio::join!(host.remove_device("disk"), host.remove_device("disk"));
    assert!(first.is_ok() != second.is_ok(), "{first:?} {second:?}");
    assert_eq!(one.closes.load(SeqCst), 1);
    host.shut_down().await.unwrap();
}

/// One reactor has prepared a stack with a connection to a server when the other one fails. The connection must go with the
/// stack: what the server sends or closes afterwards would reach the node of that number in the stack that stays.
#[tokio::test]
async fn a_stack_that_one_reactor_cannot_make_leaves_no_connection_on_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("far.sock");
    let (far, near) = (host(), host());
    let server = device(&far, "far", "ram:1M".parse().unwrap()).unwrap();
    let address = format!("unix:{}", socket.display()).parse().unwrap();
    far.export_nbd(&server, &address, "far", &TlsSpec::default()).unwrap();
    let (disk, _) = table(&near, "0 4096 zero").await;
    let remote = format!("nbd:nbd+unix:///far?socket={}", socket.display());
    // The second reactor is busy with something else all the time. So the first one has its part ready some time before, and with
    // it the connection that was made when the table was loaded; and of the two queues it is the second one's that is refused.
    let is_over = Arc::new(AtomicBool::new(false));
    let other = device(&near, "other", "zero:1M".parse().unwrap()).unwrap();
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
    let closed = tokio::time::timeout(PATIENCE / 6, all_closed).await;
    assert!(closed.is_ok(), "{} connections were left behind", server.connections());
    far.remove_device("far").await.unwrap();
    for reactor in near.reactors() {
        assert!(is_alive(reactor, &disk).await);
    }
    near.remove_device("disk").await.unwrap();
    near.shut_down().await.unwrap();
    far.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_change_that_one_reactor_cannot_make_can_be_made_again() {
    let host = host();
    let (disk, [one, _]) = table(&host, "0 4096 zero").await;
    load(&host, "0 2048 linear null:1M,init_hctx=2:100:0:1 0").await;
    host.change("disk", Change::Resume).await.unwrap_err();
    assert_eq!(one.told(), [1 << 20, LARGE], "told of the smaller size, then of the one that stays");
    assert_eq!(state(&host).await, (4096, true));
    host.change("disk", Change::Resume).await.unwrap();
    assert_eq!(state(&host).await, (2048, false));
    assert_eq!(disk.lanes().len(), 2);
    host.remove_device("disk").await.unwrap();
    host.shut_down().await.unwrap();
}

/// Changes of one device that are asked for at the same time are made one after the other.
#[tokio::test]
async fn changes_at_once_are_made_one_after_the_other() {
    let host = host();
    let (disk, _) = table(&host, "0 4096 zero").await;
    let set = |name: &str| host.change("disk", Change::Scheduler(name.to_owned()));
    for _ in 0..4 {
        let slow = host.change("disk", Change::Suspend { flush: false });
        let (one, two, three, four) =
            tokio::join!(set("mq-deadline"), slow, set("none"), host.change("disk", Change::Resume));
        (one.and(two).and(three).and(four)).unwrap();
        assert!(!disk.is_changing() && !disk.is_suspended());
    }
    assert_eq!(disk.nodes().len(), 1, "the last one holds");
    host.remove_device("disk").await.unwrap();
    host.shut_down().await.unwrap();
}
