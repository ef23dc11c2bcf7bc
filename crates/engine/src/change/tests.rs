//! Changes and removals that are refused half way: at any step, everything stays as it was.

use super::*;
use crate::device::DeviceConfig;
use crate::host::{Export, HostConfig, HostErrorKind};
use crate::info::{BoxFuture, ExportInfo};
use crate::tables::TableCall;
use ring::RingConfig;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

/// Long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// An export that does nothing and refuses on request.
#[derive(Default)]
struct Fake {
    name: &'static str,
    /// Sizes that were reported and not refused.
    reported: Mutex<Vec<u64>>,
    /// The size that it refuses; 0: none.
    refuses_size: AtomicU64,
    in_use: AtomicBool,
    /// Whether it refuses to be closed although it was not in use when it was asked.
    refuses_close: AtomicBool,
    closes: AtomicU32,
    removals: AtomicU32,
}

impl Fake {
    fn answer(refuses: bool) -> BoxFuture<'static, Result<(), HostError>> {
        // The kind of error does not matter.
        Box::pin(async move { if refuses { Err(HostError::name_taken()) } else { Ok(()) } })
    }

    fn reported(&self) -> Vec<u64> {
        std::mem::take(&mut self.reported.lock().unwrap())
    }
}

struct FakeExport(Arc<Fake>);

impl Export for FakeExport {
    fn info(&self, _: &Device) -> ExportInfo {
        ExportInfo {
            kind: "fake".to_owned(),
            address: self.0.name.to_owned(),
            connections: 0,
            counts: Default::default(),
            sessions: Default::default(),
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
            self.0.reported.lock().unwrap().push(size.0);
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

/// Creates a device named `disk` from that table, with two exports and a queue on each reactor.
async fn table(host: &Arc<Host>, text: &str) -> (Arc<Device>, [Arc<Fake>; 2]) {
    let disk = device(host, "disk", StackSpec::Table(text.parse().unwrap())).unwrap();
    with_exports(host, &disk).await
}

async fn with_exports(host: &Arc<Host>, disk: &Arc<Device>) -> (Arc<Device>, [Arc<Fake>; 2]) {
    let fakes = ["one", "two"].map(|name| Arc::new(Fake { name, ..Fake::default() }));
    for fake in &fakes {
        host.add_export(disk, Arc::new(FakeExport(fake.clone())));
    }
    for reactor in host.reactors() {
        reactor.attach(disk.clone(), Box::new(|_, _, _| {}));
        assert!(is_alive(reactor, disk).await);
    }
    assert_eq!(disk.queues().len(), 2);
    (disk.clone(), fakes)
}

/// Returns whether a reactor answers.
async fn is_alive(reactor: &crate::reactor::Reactor, disk: &Arc<Device>) -> bool {
    matches!(tokio::time::timeout(TIMEOUT, reactor.in_flight(disk.clone())).await, Ok(Ok(_)))
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

const SMALL: u64 = 1024 << 9;
const LARGE: u64 = 4096 << 9;

#[tokio::test]
async fn a_table_whose_size_an_export_refuses_stays_loaded() {
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
            assert_eq!(one.reported(), [to, from], "the size that stays is reported");
            assert_eq!(two.reported(), [from]);
            assert_eq!(state(&host).await, (from >> 9, true), "from {from} to {to}");
            assert_eq!(disk.is_suspended(), suspended);
            assert!(!disk.is_changing());
        }
        two.refuses_size.store(0, SeqCst);
        host.change("disk", Change::Resume).await.unwrap();
        assert_eq!((one.reported(), two.reported()), (vec![to], vec![to]));
        assert_eq!(state(&host).await, (to >> 9, false));
        assert!(!disk.is_suspended());
        host.remove_device("disk").await.unwrap();
    }
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_size_that_an_export_refuses_leaves_device_and_file_unchanged() {
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
        assert_eq!(one.reported(), [to, from]);
        assert_eq!((disk.size().0, length()), (from, from));
        two.refuses_size.store(0, SeqCst);
        host.change("disk", resize()).await.unwrap();
        assert_eq!((one.reported(), disk.size().0, length()), (vec![to], to, to));
        host.remove_device("disk").await.unwrap();
    }
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_removal_that_an_export_refuses_closes_no_other_export() {
    let host = host();
    let (disk, [one, two]) = table(&host, "0 2048 zero").await;
    host.change("disk", Change::Suspend { flush: true }).await.unwrap();
    two.in_use.store(true, SeqCst);
    host.remove_device("disk").await.unwrap_err();
    assert_eq!(one.closes.load(SeqCst), 0);
    assert_eq!(host.exports(&disk).len(), 2);
    assert!(disk.is_suspended(), "held requests stay held");
    assert!(host.device("disk").is_some_and(|now| Arc::ptr_eq(&now, &disk)));
    two.in_use.store(false, SeqCst);
    host.remove_device("disk").await.unwrap();
    assert_eq!((one.removals.load(SeqCst), two.removals.load(SeqCst)), (1, 1));
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_late_refusal_keeps_the_device_and_hides_closed_exports() {
    let host = host();
    let (disk, [one, two]) = table(&host, "0 2048 zero").await;
    host.change("disk", Change::Suspend { flush: true }).await.unwrap();
    two.refuses_close.store(true, SeqCst);
    host.remove_device("disk").await.unwrap_err();
    assert_eq!(one.closes.load(SeqCst), 1);
    let shown: Vec<String> = host.exports(&disk).into_iter().map(|export| export.address).collect();
    assert_eq!(shown, ["two"]);
    assert!(disk.is_suspended());
    let taken = device(&host, "disk", "zero:1M".parse().unwrap()).map(drop).unwrap_err();
    assert_eq!(taken.kind(), HostErrorKind::NameTaken);
    two.refuses_close.store(false, SeqCst);
    host.remove_device("disk").await.unwrap();
    assert_eq!((one.closes.load(SeqCst), two.closes.load(SeqCst)), (1, 1), "each is closed once");
    assert_eq!((one.removals.load(SeqCst), two.removals.load(SeqCst)), (1, 1));
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn of_two_concurrent_removals_one_fails() {
    let host = host();
    let (_, [one, _]) = table(&host, "0 2048 zero").await;
    let (first, second) = tokio::join!(host.remove_device("disk"), host.remove_device("disk"));
    assert!(first.is_ok() != second.is_ok(), "{first:?} {second:?}");
    assert_eq!(one.closes.load(SeqCst), 1);
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_change_that_failed_on_one_reactor_can_be_repeated() {
    let host = host();
    let (disk, [one, _]) = table(&host, "0 4096 zero").await;
    load(&host, "0 2048 linear null:1M,init_hctx=2:100:0:1 0").await;
    host.change("disk", Change::Resume).await.unwrap_err();
    assert_eq!(one.reported(), [1 << 20, LARGE], "the smaller size, then the one that stays");
    assert_eq!(state(&host).await, (4096, true));
    host.change("disk", Change::Resume).await.unwrap();
    assert_eq!(state(&host).await, (2048, false));
    assert_eq!(disk.queues().len(), 2);
    host.remove_device("disk").await.unwrap();
    host.shut_down().await.unwrap();
}

/// Concurrent changes of one device are applied one after the other.
#[tokio::test]
async fn concurrent_changes_are_serialized() {
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
