//! The nbd-device export with the model of the driver. The kernel's own driver is tested in a guest.

use super::model::Model;
use super::*;
use engine::device::DeviceConfig;
use engine::host::HostConfig;
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
    export_with(host, model.clone(), device, &spec).await.map_err(|error| error.to_string())
}

/// Waits for other threads. The caller's assertions report a wait that was in vain.
async fn until(mut holds: impl FnMut() -> bool) {
    for _ in 0..12_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Sends the kernel's requests on the blocking pool, as the control plane's thread serves them.
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
    let connect = model.lock()[&0].connected.clone().unwrap();
    assert_eq!(
        (connect.size, connect.block_size, connect.backend.as_str()),
        (1 << 20, 512, "blockyard:disk/2")
    );
    assert_eq!((connect.timeout, connect.dead_timeout, connect.destroy), (30, 30, false));
    // HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES, CAN_MULTI_CONN.
    assert_eq!(connect.flags & 0x16d, 0x16d, "{:#x}", connect.flags);
    assert_eq!(model.alive(0), 2, "one for each reactor");
    assert_eq!(ask(&model, 0, WRITE, 4096, &[7; 512]).await.0, 0);
    assert_eq!(ask(&model, 1, READ, 4096, &[0; 512]).await, (0, vec![7; 512]));
    let shown = &host.exports(&disk)[0];
    assert_eq!(
        (shown.kind.as_str(), shown.address.as_str(), shown.connections),
        ("nbd-device", "/dev/nbd0", 2)
    );
    host.remove_device("disk").await.unwrap();
    assert!(model.lock()[&0].connected.is_none(), "and it is detached with its device");
    assert_eq!(model.lock()[&0].synced, 1, "after it was synced");
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn options_reach_the_kernel() {
    let (host, model) = (host(), Arc::new(Model::new(2)));
    let disk = device(&host, "disk", "ram:1M");
    let spec = "5,connections=3,timeout=9s,dead_conn_timeout=0,block=4096";
    assert_eq!(export(&host, &model, &disk, spec).await, Ok("/dev/nbd5".to_owned()));
    let connect = model.lock()[&5].connected.clone().unwrap();
    assert_eq!((connect.timeout, connect.dead_timeout, connect.block_size), (9, 0, 4096));
    assert!(connect.destroy, "there was no nbd5 before");
    assert_eq!(model.alive(5), 3);
    host.shut_down().await.unwrap();
    assert!(!model.lock().contains_key(&5));
}

#[tokio::test]
async fn a_server_takes_over_a_dead_servers_device() {
    let model = Arc::new(Model::new(2));
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("disk.img");
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(1 << 20).unwrap();
    let stack = format!("file:{}", image.display());
    let first = host();
    export(&first, &model, &device(&first, "disk", &stack), "1,connections=3").await.unwrap();
    // A mounted device is kept when its server shuts down, as when the server dies.
    model.lock().get_mut(&1).unwrap().mounted = true;
    first.shut_down().await.unwrap();
    until(|| model.alive(1) == 0).await;
    assert!(model.lock()[&1].connected.is_some());

    let second = host();
    file.set_len(2 << 20).unwrap();
    let disk = device(&second, "disk", &stack);
    assert_eq!(export(&second, &model, &disk, "").await, Ok("/dev/nbd1".to_owned()), "without a number");
    assert_eq!(model.alive(1), 3, "as many as there were");
    assert_eq!(model.lock()[&1].connected.as_ref().map(|connect| connect.size), Some(2 << 20));
    let asking = model.clone();
    assert_eq!(blocking(move || asking.ask(1, 2, READ, (2 << 20) - 512, &[1; 512])).await, (0, vec![0; 512]));
    second.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_volatile_device_is_not_taken_over_while_mounted() {
    let model = Arc::new(Model::new(2));
    let first = host();
    export(&first, &model, &device(&first, "disk", "ram:1M"), "1").await.unwrap();
    model.lock().get_mut(&1).unwrap().mounted = true;
    first.shut_down().await.unwrap();
    until(|| model.alive(1) == 0).await;

    let second = host();
    let disk = device(&second, "disk", "ram:1M");
    let why = export(&second, &model, &disk, "").await.unwrap_err();
    assert!(why.contains("/dev/nbd1 is mounted") && why.contains("unmount it first"), "{why}");
    assert!(model.lock()[&1].connected.is_some(), "the device is unchanged");
    model.lock().get_mut(&1).unwrap().mounted = false;
    assert_eq!(export(&second, &model, &disk, "1").await, Ok("/dev/nbd1".to_owned()), "anew");
    assert_eq!(model.alive(1), 2);
    second.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_live_servers_device_is_refused() {
    let model = Arc::new(Model::new(2));
    let (first, second) = (host(), host());
    export(&first, &model, &device(&first, "disk", "ram:1M"), "0").await.unwrap();
    let disk = device(&second, "disk", "ram:1M");
    let why = export(&second, &model, &disk, "0").await.unwrap_err();
    assert!(why.contains("belongs to a live server of a device of this name"), "{why}");
    assert_eq!(export(&second, &model, &disk, "").await, Ok("/dev/nbd1".to_owned()), "it gets another");
    assert_eq!(model.alive(0), 2);
    first.shut_down().await.unwrap();
    second.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_device_of_another_name_is_busy() {
    let model = Arc::new(Model::new(1));
    let (first, second) = (host(), host());
    export(&first, &model, &device(&first, "disk", "ram:1M"), "0").await.unwrap();
    let why = export(&second, &model, &device(&second, "other", "ram:1M"), "0").await.unwrap_err();
    assert!(why.contains("/dev/nbd0 is attached already as \"blockyard:disk/2\""), "{why}");
    first.shut_down().await.unwrap();
    second.shut_down().await.unwrap();
}

#[tokio::test]
async fn connections_that_the_kernel_drops_are_replaced() {
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
async fn connections_that_fail_early_are_replaced_with_growing_pauses() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "ram:1M");
    export(&host, &model, &disk, "0,connections=2").await.unwrap();
    let (start, mut replaced) = (std::time::Instant::now(), 0);
    while start.elapsed() < Duration::from_secs(2) {
        if model.alive(0) == 2 {
            model.give_up(0, 0);
            replaced += 1;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Pauses of 0, 10 ms, 20 ms and so on, less up to half: ten replacements in two seconds at most, plus
    // one.
    assert!((3..=11).contains(&replaced), "replaced {replaced} times");
    until(|| model.alive(0) == 2).await;
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_device_that_another_process_detached_stays_detached() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "ram:1M");
    export(&host, &model, &disk, "0").await.unwrap();
    model.disconnect(0).unwrap();
    until(|| host.exports(&disk)[0].connections == 0).await;
    assert_eq!(host.exports(&disk)[0].connections, 0);
    assert!(model.lock()[&0].connected.is_none());
    host.remove_device("disk").await.unwrap();
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_mounted_device_is_neither_removed_nor_abandoned() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "ram:1M");
    export(&host, &model, &disk, "0").await.unwrap();
    model.lock().get_mut(&0).unwrap().mounted = true;
    let why = host.remove_device("disk").await.unwrap_err().to_string();
    assert!(why.contains("/dev/nbd0 is mounted"), "{why}");
    assert_eq!(ask(&model, 0, READ, 0, &[1; 512]).await.0, 0);
    model.give_up(0, 0);
    until(|| model.alive(0) == 2).await;
    assert_eq!(model.alive(0), 2, "connections are still replaced");
    model.lock().get_mut(&0).unwrap().mounted = false;
    host.remove_device("disk").await.unwrap();
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn a_new_size_is_reported_to_the_kernel() {
    let (host, model) = (host(), Arc::new(Model::new(1)));
    let disk = device(&host, "disk", "ram:1M");
    export(&host, &model, &disk, "0").await.unwrap();
    host.report_size(&disk, Bytes(1 << 20), Bytes(3 << 20)).await.unwrap();
    assert_eq!(model.lock()[&0].connected.as_ref().map(|connect| connect.size), Some(3 << 20));
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
async fn every_error_has_a_hint() {
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
        let error = export(&host, &model, &disk, spec).await.unwrap_err();
        assert!(error.contains(why), "{error}");
        assert!(host.exports(&disk).is_empty(), "nothing is left behind");
    }
    host.shut_down().await.unwrap();
}

#[tokio::test]
async fn an_orphaned_device_is_removed_by_name() {
    let model = Arc::new(Model::new(1));
    assert!(matches!(remove_orphan_of(&*model, "disk"), Ok(None)));
    let first = host();
    export(&first, &model, &device(&first, "disk", "ram:1M"), "0").await.unwrap();
    assert!(matches!(remove_orphan_of(&*model, "disk"), Ok(None)), "its server is alive");
    assert_eq!(model.alive(0), 2);
    model.lock().get_mut(&0).unwrap().mounted = true;
    first.shut_down().await.unwrap();
    assert!(matches!(remove_orphan_of(&*model, "disk"), Err(NbdDeviceError::InUse(0))));
    model.lock().get_mut(&0).unwrap().mounted = false;
    assert!(matches!(remove_orphan_of(&*model, "other"), Ok(None)));
    assert!(matches!(remove_orphan_of(&*model, "disk"), Ok(Some(0))));
    assert!(model.lock()[&0].connected.is_none());
}
