//! The export against a model of the driver; the real one is met in a guest.

use super::model::Model;
use super::*;
use crate::device::DeviceConfig;
use crate::host::HostConfig;
use ring::RingConfig;

fn host() -> Arc<Host> {
    Host::start(&HostConfig { reactors: 2, ring: RingConfig::default(), nbd: Default::default() }).unwrap()
}

fn device(host: &Arc<Host>, name: &str, stack: &str) -> Arc<Device> {
    let config = DeviceConfig {
        name: name.parse().unwrap(),
        stack: stack.parse().unwrap(),
        layers: Vec::new(),
        limits: String::new(),
        depth: 32,
        slow: None,
        io_timeout: None,
    };
    host.add_device(&config).unwrap()
}

async fn export(
    host: &Arc<Host>,
    model: &Arc<Model>,
    device: &Arc<Device>,
    spec: &str,
) -> Result<String, String> {
    let spec = spec.parse().unwrap();
    host.export_nbd_device_of(model.clone(), device, &spec).await.map_err(|error| error.to_string())
}

/// Wait for what other threads do; a test that waits in vain fails by its assertions.
async fn until(mut holds: impl FnMut() -> bool) {
    for _ in 0..12_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What the kernel asks is asked beside the control plane's thread.
async fn ask(model: &Arc<Model>, connection: usize, kind: u16, offset: u64, data: &[u8]) -> (u32, Vec<u8>) {
    let (model, data) = (model.clone(), data.to_vec());
    blocking(move || model.ask(0, connection, kind, offset, &data)).await
}

const READ: u16 = 0;
const WRITE: u16 = 1;

#[tokio::test]
async fn every_connection_reaches_the_device() {
    let (host, model) = (host(), Arc::new(Model::new(2)));
    let disk = device(&host, "disk", "ram:1M");
    assert_eq!(export(&host, &model, &disk, "").await, Ok("/dev/nbd0".to_owned()));
    let told = model.lock()[&0].told.clone().unwrap();
    assert_eq!((told.size, told.block_size, told.backend.as_str()), (1 << 20, 512, "blockyard:disk/2"));
    assert_eq!((told.timeout, told.dead_timeout, told.destroy), (30, 30, false));
    // HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES, CAN_MULTI_CONN.
    assert_eq!(told.flags & 0x16d, 0x16d, "{:#x}", told.flags);
    assert_eq!(model.alive(0), 2, "one for each reactor");
    assert_eq!(ask(&model, 0, WRITE, 4096, &[7; 512]).await.0, 0);
    assert_eq!(ask(&model, 1, READ, 4096, &[0; 512]).await, (0, vec![7; 512]));
    let shown = &host.exports(&disk)[0];
    assert_eq!(
        (shown.kind.as_str(), shown.address.as_str(), shown.connections),
        ("nbd-device", "/dev/nbd0", 2)
    );
    host.remove_device("disk").await.unwrap();
    assert!(model.lock()[&0].told.is_none(), "and it is detached with its device");
    assert_eq!(model.lock()[&0].synced, 1, "after what was written had come");
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn what_is_asked_for_is_told() {
    let (host, model) = (host(), Arc::new(Model::new(2)));
    let disk = device(&host, "disk", "ram:1M");
    let spec = "5,connections=3,timeout=9s,dead_conn_timeout=0,block=4096";
    assert_eq!(export(&host, &model, &disk, spec).await, Ok("/dev/nbd5".to_owned()));
    let told = model.lock()[&5].told.clone().unwrap();
    assert_eq!((told.timeout, told.dead_timeout, told.block_size), (9, 0, 4096));
    assert!(told.destroy, "there was no nbd5 before");
    assert_eq!(model.alive(5), 3);
    host.shut_down().await.unwrap();
    assert!(!model.lock().contains_key(&5));
}

#[tokio::test]
async fn the_next_server_takes_over_what_a_dead_one_left() {
    let model = Arc::new(Model::new(2));
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(1 << 20).unwrap();
    let stack = format!("file:{}", image.display());
    let first = host();
    export(&first, &model, &device(&first, "disk", &stack), "1,connections=3").await.unwrap();
    // A mounted device is left when its server ends in good order; one that dies leaves it as well.
    model.lock().get_mut(&1).unwrap().held = true;
    first.shut_down().await.unwrap();
    until(|| model.alive(1) == 0).await;
    assert!(model.lock()[&1].told.is_some());

    let second = host();
    file.set_len(2 << 20).unwrap();
    let disk = device(&second, "disk", &stack);
    assert_eq!(
        export(&second, &model, &disk, "").await,
        Ok("/dev/nbd1".to_owned()),
        "without being told which"
    );
    assert_eq!(model.alive(1), 3, "as many as there were");
    assert_eq!(model.lock()[&1].told.as_ref().map(|told| told.size), Some(2 << 20));
    let asking = model.clone();
    assert_eq!(blocking(move || asking.ask(1, 2, READ, (2 << 20) - 512, &[1; 512])).await, (0, vec![0; 512]));
    second.shut_down().await.unwrap();
}

#[tokio::test]
async fn memory_is_not_served_in_place_of_what_died_while_it_is_mounted() {
    let model = Arc::new(Model::new(2));
    let first = host();
    export(&first, &model, &device(&first, "disk", "ram:1M"), "1").await.unwrap();
    model.lock().get_mut(&1).unwrap().held = true;
    first.shut_down().await.unwrap();
    until(|| model.alive(1) == 0).await;

    let second = host();
    let disk = device(&second, "disk", "ram:1M");
    let why = export(&second, &model, &disk, "").await.unwrap_err();
    assert!(why.contains("/dev/nbd1 is mounted") && why.contains("unmount it first"), "{why}");
    assert!(model.lock()[&1].told.is_some(), "and it is left as it was");
    model.lock().get_mut(&1).unwrap().held = false;
    assert_eq!(export(&second, &model, &disk, "1").await, Ok("/dev/nbd1".to_owned()), "anew");
    assert_eq!(model.alive(1), 2);
    second.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_live_server_is_not_robbed() {
    let model = Arc::new(Model::new(2));
    let (first, second) = (host(), host());
    export(&first, &model, &device(&first, "disk", "ram:1M"), "0").await.unwrap();
    let disk = device(&second, "disk", "ram:1M");
    let why = export(&second, &model, &disk, "0").await.unwrap_err();
    assert!(why.contains("another server of a device of this name, which is alive"), "{why}");
    assert_eq!(export(&second, &model, &disk, "").await, Ok("/dev/nbd1".to_owned()), "it gets another");
    assert_eq!(model.alive(0), 2);
    first.shut_down().await.unwrap();
    second.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_strangers_device_is_busy() {
    let model = Arc::new(Model::new(1));
    let (first, second) = (host(), host());
    export(&first, &model, &device(&first, "disk", "ram:1M"), "0").await.unwrap();
    let why = export(&second, &model, &device(&second, "other", "ram:1M"), "0").await.unwrap_err();
    assert!(why.contains("/dev/nbd0 is attached already as \"blockyard:disk/2\""), "{why}");
    first.shut_down().await.unwrap();
    second.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_connection_that_the_kernel_gives_up_is_mended() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "ram:1M");
    export(&host, &model, &disk, "0,connections=2").await.unwrap();
    for connection in [1, 0, 1] {
        model.give_up(0, connection);
        until(|| model.alive(0) == 2 && host.exports(&disk)[0].connections == 2).await;
        assert_eq!(model.alive(0), 2);
        assert_eq!(ask(&model, connection, READ, 0, &[1; 512]).await, (0, vec![0; 512]));
    }
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn connections_that_the_kernel_gives_up_at_once_are_mended_less_and_less_often() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "ram:1M");
    export(&host, &model, &disk, "0,connections=2").await.unwrap();
    let (start, mut mended) = (std::time::Instant::now(), 0);
    while start.elapsed() < Duration::from_secs(2) {
        if model.alive(0) == 2 {
            model.give_up(0, 0);
            mended += 1;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // At once, then after 10 ms, 20 ms and so on, or half of that: ten times in two seconds at most, and once for luck.
    assert!((3..=11).contains(&mended), "mended {mended} times");
    until(|| model.alive(0) == 2).await;
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn what_somebody_else_detached_stays_detached() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "ram:1M");
    export(&host, &model, &disk, "0").await.unwrap();
    model.disconnect(0).unwrap();
    until(|| host.exports(&disk)[0].connections == 0).await;
    assert_eq!(host.exports(&disk)[0].connections, 0);
    assert!(model.lock()[&0].told.is_none());
    host.remove_device("disk").await.unwrap();
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_mounted_device_is_not_deleted_and_still_served() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "ram:1M");
    export(&host, &model, &disk, "0").await.unwrap();
    model.lock().get_mut(&0).unwrap().held = true;
    let why = host.remove_device("disk").await.unwrap_err().to_string();
    assert!(why.contains("/dev/nbd0 is mounted"), "{why}");
    assert_eq!(ask(&model, 0, READ, 0, &[1; 512]).await.0, 0);
    model.give_up(0, 0);
    until(|| model.alive(0) == 2).await;
    assert_eq!(model.alive(0), 2, "and still mended");
    model.lock().get_mut(&0).unwrap().held = false;
    host.remove_device("disk").await.unwrap();
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn the_kernel_is_told_a_new_size() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "ram:1M");
    export(&host, &model, &disk, "0").await.unwrap();
    host.tell_size(&disk, Bytes(1 << 20), Bytes(3 << 20)).await.unwrap();
    assert_eq!(model.lock()[&0].told.as_ref().map(|told| told.size), Some(3 << 20));
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_zoned_device_is_refused() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "null:1G,zoned");
    let why = export(&host, &model, &disk, "").await.unwrap_err();
    assert!(why.contains("zoned device"), "{why}");
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn every_refusal_says_what_to_do() {
    let (host, model) = (host(), Arc::new(Model::new(0)));
    let disk = device(&host, "disk", "ram:1M");
    for (errno, spec, why) in [
        (Errno::NOENT, "", "modprobe nbd"),
        (Errno::PERM, "", "CAP_SYS_ADMIN"),
        (Errno::BUSY, "3", "/dev/nbd3 is attached already (choose another number"),
        (Errno::INVAL, "40000", "choose a smaller one"),
        (Errno::NOSPC, "", "all nbd devices are in use"),
        (Errno::INVAL, "3", "the kernel did not attach /dev/nbd3: Invalid argument"),
    ] {
        *model.fails.lock().unwrap() = Some(errno);
        let said = export(&host, &model, &disk, spec).await.unwrap_err();
        assert!(said.contains(why), "{said}");
        assert!(host.exports(&disk).is_empty(), "nothing is left behind");
    }
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn what_a_dead_server_left_is_removed_by_name() {
    let model = Arc::new(Model::new(1));
    assert!(matches!(remove_orphan_of(&*model, "disk"), Ok(None)));
    let first = host();
    export(&first, &model, &device(&first, "disk", "ram:1M"), "0").await.unwrap();
    assert!(matches!(remove_orphan_of(&*model, "disk"), Ok(None)), "its server is alive");
    assert_eq!(model.alive(0), 2);
    model.lock().get_mut(&0).unwrap().held = true;
    first.shut_down().await.unwrap();
    assert!(matches!(remove_orphan_of(&*model, "disk"), Err(NbdDeviceError::Held(0))));
    model.lock().get_mut(&0).unwrap().held = false;
    assert!(matches!(remove_orphan_of(&*model, "other"), Ok(None)));
    assert!(matches!(remove_orphan_of(&*model, "disk"), Ok(Some(0))));
    assert!(model.lock()[&0].told.is_none());
}
