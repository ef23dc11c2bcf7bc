use super::*;
use block::Op;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Two devices; `busy` cannot be removed.
struct Table(Mutex<Vec<DeviceInfo>>);

fn info(name: &str) -> DeviceInfo {
    DeviceInfo {
        name: name.into(),
        stack: "file:/srv/disk.img,ro".into(),
        layers: vec!["split,max_sectors=255".into()],
        size: 1 << 30,
        logical_block_size: 512,
        read_only: true,
        limits: [("max_sectors".to_owned(), 255)].into(),
        exports: vec![ExportInfo {
            kind: "nbd".into(),
            address: "nbd://localhost:10809/disk".into(),
            connections: 3,
            counts: Default::default(),
            sessions: Default::default(),
            tls: "off".into(),
            details: [("why".to_owned(), "asked for".to_owned())].into(),
        }],
        backend: [("direct".to_owned(), "off".to_owned())].into(),
        queues: vec![QueueInfo {
            reactor: 0,
            engine: "epoll".into(),
            why: Some("io_uring is forbidden here".into()),
            depth: 128,
            in_flight: 2,
        }],
        pid: 7,
        uptime_ms: 1500,
    }
}

fn counted() -> Counted {
    let mut queue = queue::Snapshot { errors: 1, in_flight: 2, busy_ns: 500_000_000, ..Default::default() };
    let read = &mut queue.ops[Op::Read as usize];
    (read.ios, read.bytes, read.ticks_ns) = (10, 40960, 3_000_000);
    read.sizes[3] = 10;
    (queue.nodes[1].ios, queue.nodes[1].ticks_ns) = (7, 1_000_000);
    Counted {
        timeouts: 2,
        uptime: Duration::from_secs(2),
        queues: vec![queue.clone(), queue],
        busy_ns: 750_000_000,
        nodes: vec![(0, "split"), (1, "ram")],
        labels: vec![String::new(), "1G".into()],
        limit_hits: vec![("memory", 3)],
    }
}

impl HostView for Table {
    fn devices(&self) -> Vec<DeviceInfo> {
        self.0.lock().unwrap().clone()
    }

    fn counted(&self, name: &str) -> Option<Counted> {
        self.device(name).map(|_| counted())
    }

    fn change<'a>(&'a self, name: &'a str, change: Change) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move {
            let mut devices = self.0.lock().unwrap();
            let device = devices.iter_mut().find(|device| device.name == name);
            let device = device.ok_or(ControlError::NotFound)?;
            match change {
                Change::Resize { size: Some(size), .. } => device.size = size,
                other => return Err(ControlError::Failed(format!("{other:?} (not here)"))),
            }
            Ok(())
        })
    }

    fn trace(self: Arc<Self>, name: &str, options: TraceOptions) -> Result<Receiver<Vec<u8>>, ControlError> {
        self.device(name).ok_or(ControlError::NotFound)?;
        if name == "busy" {
            return Err(ControlError::Busy("it is being traced already".into()));
        }
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        for part in ["it ", "goes ", &options.filter.actions] {
            sender.try_send(part.as_bytes().to_vec()).unwrap();
        }
        Ok(receiver)
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), ControlError>> {
        Box::pin(async move {
            if name == "busy" {
                return Err(ControlError::Busy("it is being deleted".into()));
            }
            let mut devices = self.0.lock().unwrap();
            let before = devices.len();
            devices.retain(|device| device.name != name);
            if devices.len() < before { Ok(()) } else { Err(ControlError::NotFound) }
        })
    }
}

/// Serves the devices while `client` runs, then stops as a process does.
fn with_server<F: Future<Output = ()>>(client: impl FnOnce(ControlClient) -> F) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let listener = UnixListener::bind(&path).unwrap();
    let view = Arc::new(Table(Mutex::new(vec![info("disk"), info("busy")])));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let server = tokio::spawn(serve(listener, view, async { drop(stopped.await) }));
        client(ControlClient::new(&path)).await;
        drop(stop);
        server.await.unwrap().unwrap();
    });
}

#[test]
fn a_change_arrives_unaltered() {
    with_server(|client| async move {
        client.change("disk", &Change::Resize { size: Some(4096), shrink: true }).await.unwrap();
        assert_eq!(client.device("disk").await.unwrap().size, 4096);
        for change in [
            Change::Direct(crate::spec::Direct::On),
            Change::File("/a b".into()),
            Change::Suspend { flush: true },
            Change::Resume,
        ] {
            let why = client.change("disk", &change).await.unwrap_err().to_string();
            assert_eq!(why, format!("{change:?} (not here)"));
        }
        let missing = client.change("absent", &Change::Resume).await.unwrap_err();
        assert!(matches!(missing, ClientError::Refused(ControlError::NotFound)));
    });
}

#[test]
fn devices_are_described() {
    with_server(|client| async move {
        assert_eq!(client.version().await.unwrap().pid, std::process::id());
        assert_eq!(client.devices().await.unwrap(), [info("disk"), info("busy")]);
        assert_eq!(client.device("disk").await.unwrap(), info("disk"));
    });
}

#[test]
fn counters_of_all_queues_are_added_up() {
    with_server(|client| async move {
        let stats = client.stats("disk").await.unwrap();
        assert_eq!((stats.uptime_ns, stats.errors, stats.in_flight), (2_000_000_000, 2, 4));
        assert_eq!((stats.stat[0], stats.stat[2], stats.stat[3]), (20, 160, 6));
        assert_eq!(stats.operations["read"].bytes, 81920);
        assert_eq!((stats.queues.len(), stats.queues[0][0]), (2, 10));
    });
}

#[test]
fn a_device_is_deleted_once() {
    with_server(|client| async move {
        client.delete("disk").await.unwrap();
        let again = client.delete("disk").await.unwrap_err();
        assert!(matches!(again, ClientError::Refused(ControlError::NotFound)), "{again}");
        assert_eq!(client.devices().await.unwrap(), [info("busy")]);
    });
}

#[test]
fn errors_arrive_with_their_message() {
    with_server(|client| async move {
        let busy = client.delete("busy").await.unwrap_err();
        assert_eq!(busy.to_string(), "it is being deleted");
        let missing = client.stats("missing").await.unwrap_err();
        assert!(missing.to_string().starts_with("there is no such device"), "{missing}");
    });
}

#[test]
fn a_trace_is_streamed_to_its_end() {
    with_server(|client| async move {
        let options = TraceOptions {
            filter: ::trace::FilterText { actions: "Q".into(), ..Default::default() },
            ..Default::default()
        };
        let mut stream = client.trace("disk", &options).await.unwrap();
        let mut received = Vec::new();
        while let Some(chunk) = stream.next().await.unwrap() {
            received.extend_from_slice(&chunk);
        }
        assert_eq!(received, b"it goes Q");
        let Err(busy) = client.trace("busy", &options).await else { panic!("it is traced twice") };
        assert_eq!(busy.to_string(), "it is being traced already");
        assert!(client.trace("missing", &options).await.is_err());
    });
}

#[test]
fn a_failed_connection_differs_from_a_refusal() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = ControlClient::new("/nonexistent/control");
    let error = runtime.block_on(client.devices()).unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
}

/// Sends one request by hand, as curl would.
async fn raw(path: &Path, request: &str) -> String {
    raw_with(path, request, "").await
}

/// Sends one request with another header line.
async fn raw_with(path: &Path, request: &str, header: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::UnixStream::connect(path).await.unwrap();
    let request = format!("{request} HTTP/1.1\r\n{header}Host: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[test]
fn any_http_client_can_send_requests() {
    with_server(|client| async move {
        let socket = client.socket();
        let answer = raw(socket, "GET /devices/disk").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("content-type: application/json") && answer.contains("\"size\":1073741824"));
        let answer = raw(socket, "GET /nowhere").await;
        assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("{\"error\":\"no such path"));
        assert!(raw(socket, "POST /devices").await.starts_with("HTTP/1.1 405"));
        assert!(raw(socket, "DELETE /devices/disk").await.starts_with("HTTP/1.1 204"));
    });
}

#[test]
fn metrics_have_types_and_labels() {
    with_server(|client| async move {
        let header = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";
        let answer = raw_with(client.socket(), "GET /metrics", header).await;
        assert!(answer.contains("content-type: application/openmetrics-text; version=1.0.0"), "{answer}");
        for line in [
            "# TYPE blockyard_requests counter",
            "blockyard_requests_total{device=\"disk\",op=\"read\"} 20",
            "blockyard_request_bytes_total{device=\"disk\",op=\"read\"} 81920",
            "blockyard_request_errors_total{device=\"disk\"} 2",
            "blockyard_requests_in_flight{device=\"disk\"} 4.0",
            "blockyard_busy_seconds_total{device=\"disk\"} 0.75",
            "blockyard_nbd_limit_hits_total{device=\"disk\",limit=\"memory\"} 3",
            "blockyard_device_size_bytes{device=\"disk\"} 1073741824.0",
            "blockyard_connections{device=\"busy\"} 3.0",
            "# TYPE blockyard_request_duration_seconds histogram",
            "# TYPE blockyard_request_size_bytes histogram",
            "blockyard_request_size_bytes_bucket{le=\"4096.0\",device=\"disk\",op=\"read\"} 20",
            "blockyard_layer_requests_total{device=\"disk\",node=\"1\",layer=\"ram\"} 14.0",
            "blockyard_layer_seconds_total{device=\"disk\",node=\"1\",layer=\"ram\"} 0.002",
            "node_disk_reads_completed_total{device=\"disk\"} 20.0",
            "node_disk_read_bytes_total{device=\"disk\"} 81920.0",
            "node_disk_io_now{device=\"disk\"} 4.0",
            "blockyard_request_duration_seconds_sum{device=\"disk\",op=\"read\"} 0.006",
            "# EOF",
        ] {
            assert!(answer.lines().any(|got| got == line), "{line}\n{answer}");
        }
        assert!(!answer.contains("op=\"flush\""), "operations that never happened are left out");
        // A client that does not accept OpenMetrics gets the older format: the same except for the names of
        // counters.
        let older = raw(client.socket(), "GET /metrics").await;
        assert!(older.contains("content-type: text/plain; version=0.0.4"), "{older}");
        let body = |text: &str| text.split_once("\r\n\r\n").expect("it has a body").1.to_owned();
        let counters = |line: &str| line.starts_with("# ") && line.contains("blockyard_requests");
        let received: Vec<String> =
            body(&older).lines().filter(|line| counters(line)).map(str::to_owned).collect();
        assert_eq!(received.len(), 4, "{received:?}");
        assert!(
            received[2].starts_with("# HELP blockyard_requests_total Requests completed"),
            "{received:?}"
        );
        assert_eq!(received[3], "# TYPE blockyard_requests_total counter");
        let samples = |text: &str| body(text).lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(samples(&older), samples(&answer));
        assert!(!older.contains("# EOF"));
    });
}

/// A series that `/metrics` lacks would be an empty panel, without an error.
#[test]
fn every_series_of_the_grafana_dashboard_is_in_the_metrics() {
    let dashboard = include_str!("../../../../docs/grafana/blockyard.json");
    let dashboard: serde_json::Value = serde_json::from_str(dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let mut queries: Vec<String> =
        targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    assert!(queries.len() >= panels.len() && !panels.is_empty());
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    queries.extend(variables.iter().filter_map(|v| Some(v["query"]["query"].as_str()?.to_owned())));
    with_server(|client| async move {
        let header = "Accept: application/openmetrics-text;version=1.0.0\r\n";
        let answer = raw_with(client.socket(), "GET /metrics", header).await;
        let mut series = Vec::new();
        for line in answer.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let (name, kind) = line.split_once(' ').unwrap();
            let ends: &[&str] = match kind {
                "counter" => &["_total"],
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            series.extend(ends.iter().map(|end| format!("{name}{end}")));
        }
        let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        for query in &queries {
            let words = query.split(|letter| !is_word(letter));
            let names: Vec<&str> = words.filter(|word| word.starts_with("blockyard_")).collect();
            assert!(!names.is_empty(), "{query}");
            for name in names {
                assert!(series.iter().any(|known| known == name), "{name} of {query}: {series:?}");
            }
        }
    });
}

#[test]
fn a_process_that_ends_before_it_answers_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control");
    let listener = UnixListener::bind(&path).unwrap();
    let ending = std::thread::spawn(move || {
        // The whole request is read: unread data would show as a broken connection.
        let (mut asked, _) = listener.accept().unwrap();
        let mut read = Vec::new();
        while !read.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            std::io::Read::read_exact(&mut asked, &mut byte).unwrap();
            read.push(byte[0]);
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(ControlClient::new(&path).devices()).unwrap_err();
    ending.join().unwrap();
    assert!(
        error.to_string().ends_with("its process ended before it answered (see blockyard list)"),
        "{error}"
    );
}
