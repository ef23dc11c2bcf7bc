//! The screen as text, for models that are built by hand.

use super::gather::{Sample, Snapshot};
use super::input::{Action, Typed};
use super::model::{Model, Screen, TopRequest};
use super::rows::Sort;
use super::theme::Theme;
use super::{batch, view};
use engine::control::{DeviceInfo, DeviceStats, ExportInfo, Latency, LayerStats, OpStats, QueueInfo};
use engine::tables::path_status::PathStatus;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

const PLAIN: Theme = Theme { colour: false, unicode: true };

/// Returns a device with `reads` of 4 KiB per second for `seconds`, one in fifty of them slow.
fn sample(name: &str, seconds: u64, reads: u64) -> Sample {
    let ios = reads * seconds;
    let latency =
        Latency { buckets: vec![(12_288, ios * 49 / 50), (1 << 20, ios / 50)], ..Latency::default() };
    let read = OpStats { ios, bytes: ios * 4096, ticks_ns: ios * 20_000, latency, ..OpStats::default() };
    let layer = |node, depth, name: &str, ticks_ns| LayerStats {
        node,
        depth,
        name: name.into(),
        label: String::new(),
        backend: depth > 0,
        ios,
        ticks_ns: ticks_ns * ios,
        in_flight: 4,
    };
    Sample {
        info: DeviceInfo {
            name: name.into(),
            stack: "ram:64M".into(),
            layers: vec!["delay,read=1ms".into()],
            size: 64 << 20,
            logical_block_size: 512,
            read_only: false,
            limits: [("max_sectors".to_owned(), 255), ("io_opt".to_owned(), 0)].into(),
            exports: vec![ExportInfo {
                kind: "nbd".into(),
                address: format!("nbd+unix:///{name}?socket=/run/{name}.sock"),
                connections: 2,
                counts: Default::default(),
                sessions: Default::default(),
                tls: "off".into(),
                details: Default::default(),
            }],
            backend: [("backend".to_owned(), "ram".to_owned())].into(),
            queues: vec![QueueInfo {
                reactor: 0,
                engine: "io_uring".into(),
                why: None,
                depth: 128,
                in_flight: 32,
            }],
            pid: 4711,
            uptime_ms: seconds * 1000,
        },
        stats: DeviceStats {
            name: name.into(),
            uptime_ns: seconds * 1_000_000_000,
            stat: [0; 17],
            errors: seconds / 2,
            in_flight: 32,
            busy_ns: seconds * 500_000_000,
            operations: [("read".to_owned(), read), ("write".to_owned(), OpStats::default())].into(),
            queues: Vec::new(),
            layers: vec![layer(0, 0, "delay", 20_000), layer(1, 1, "ram", 5_000)],
        },
        paths: Vec::new(),
        socket: "/run/control.4711".into(),
    }
}

fn path(name: &str, works: bool) -> PathStatus {
    PathStatus { sector: 0, group: 1, group_state: 'A', name: name.into(), works, fails: u64::from(!works) }
}

fn snapshot(seconds: u64) -> Snapshot {
    let mut multipath = sample("m", seconds, 10);
    multipath.paths = vec![path("nbd:one", true), path("nbd:two", false)];
    Snapshot { samples: vec![sample("disk", seconds, 12_000), multipath], processes: 1, silent: Vec::new() }
}

fn model() -> Model {
    let mut model = Model::new(1000);
    model.take(snapshot(1), "12:00:00 UTC".into());
    model.take(snapshot(2), "12:00:01 UTC".into());
    model
}

fn screen(model: &Model, width: u16, height: u16, theme: Theme) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| _ = view::draw(frame, model, theme)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(line).collect()
}

fn press(model: &mut Model, actions: &[Action]) -> Option<TopRequest> {
    actions.iter().fold(None, |_, action| model.act(*action))
}

#[test]
fn devices_on_a_small_screen() {
    let drawn = screen(&model(), 80, 24, PLAIN);
    let expected = [
        "blockyard top  2 devices of 1 process                    every 1 s  12:00:01 UTC",
        "12.0k IOPS  read 46.9M/s  write 0/s  64 in flight",
        "DEVICE       IOPS▼  READ/s WRITE/s    p50    p99      QUEUE  BUSY% PATHS  ERRORS",
        "disk         12.0k   46.9M       0 12.5us 1.08ms █▎      32     50     -       1",
        "m               10   40.0K       0 12.5us 12.5us █▎      32     50   1/2       1",
    ];
    assert_eq!(drawn[..5], expected, "\n{}", drawn.join("\n"));
    assert_eq!(drawn[22], "sort  i IOPS  b bytes  l latency  d queue  u busy  e errors  n name  r reverse");
    assert!(drawn[23].starts_with("h help  Enter show  / filter"), "{}", drawn[23]);
    // The details of the selected device, with past intervals, are below the list.
    assert_eq!(drawn[6], "disk  64.0M  512 a block  process 4711");
    assert!(drawn[9].starts_with("IOPS  ") && drawn[9].ends_with("█    12.0k"), "{}", drawn[9]);
}

#[test]
fn a_device_shows_the_sessions_of_its_initiators() {
    use engine::control::{ClientConnection, ClientSession};
    let mut snapshot = snapshot(1);
    let connection = ClientConnection {
        cid: 0,
        peer: "192.0.2.7:40000".into(),
        portal: "192.0.2.1:3260".into(),
        local: "192.0.2.1:3260".into(),
    };
    let session = ClientSession {
        number: 3,
        initiator: "iqn.1993-08.org.debian:01:abc".into(),
        user: "alice".into(),
        digests: "header".into(),
        connections: vec![connection],
        has_reservation: true,
        counts: [("commands".to_owned(), 12_345), ("bytes-read".to_owned(), 4096), ("errors".to_owned(), 2)]
            .into(),
        ..ClientSession::default()
    };
    // Two portals report the same session.
    let export = &mut snapshot.samples[0].info.exports[0];
    (export.kind, export.sessions) = ("iscsi".into(), vec![session.clone(), session]);
    export.details = [("session 3".to_owned(), "a long line".to_owned())].into();
    let mut model = Model::new(1000);
    model.take(snapshot, "12:00:00 UTC".into());
    press(&mut model, &[Action::Enter]);
    let drawn = screen(&model, 110, 60, PLAIN);
    let at = drawn.iter().position(|line| line.starts_with("SESSION  CONN")).expect("the sessions' title");
    let expected = [
        "      3     1     0     12.3k 4.00K         0  iqn.1993-08.org.debian:01:abc",
        "         digests header, user alice, holds the reservation, errors 2, 192.0.2.7:40000 at 192.0.2.1:3260",
    ];
    assert_eq!(drawn[at + 1..at + 3], expected, "\n{}", drawn.join("\n"));
    assert!(!drawn[at + 3].contains("debian") && !drawn.join("").contains("a long line"));
}

#[test]
fn the_selected_device_is_reversed_from_edge_to_edge_but_for_its_bar() {
    use ratatui::style::Modifier;
    let mut model = model();
    press(&mut model, &[Action::Move(1)]);
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    terminal.draw(|frame| _ = view::draw(frame, &model, PLAIN)).unwrap();
    let buffer = terminal.backend().buffer();
    let reversed = |y: u16| (0..80).filter(|x| buffer[(*x, y)].modifier.contains(Modifier::REVERSED)).count();
    assert_eq!((reversed(3), reversed(4), reversed(5)), (0, 80 - 5, 0));
}

#[test]
fn a_filter_leaves_the_devices_that_contain_it_and_esc_removes_it() {
    let mut model = model();
    press(&mut model, &[Action::Filter]);
    for letter in "DISK".chars() {
        model.edit_filter(Typed::Letter(letter));
    }
    let drawn = screen(&model, 80, 24, PLAIN);
    assert!(drawn[23].starts_with("filter: DISK_"), "{}", drawn[23]);
    assert!(drawn[0].contains(", 1 with \"DISK\""), "{}", drawn[0]);
    assert_eq!(model.edit_filter(Typed::Done), None);
    assert!(!model.typing && model.listed().len() == 1);
    press(&mut model, &[Action::Move(5)]);
    assert_eq!(model.selected_row().map(|row| &*row.info.name), Some("disk"));
    press(&mut model, &[Action::Back]);
    assert_eq!(model.listed().len(), 2);
    press(&mut model, &[Action::Filter]);
    model.edit_filter(Typed::Letter('x'));
    assert!(screen(&model, 80, 24, PLAIN).concat().contains("No device matches the filter"));
    model.edit_filter(Typed::Erase);
    assert_eq!(model.listed().len(), 2);
    model.edit_filter(Typed::Cancel);
    assert!(!model.typing);
    assert_eq!(model.edit_filter(Typed::Quit), Some(TopRequest::Quit));
}

#[test]
fn keys_of_paths_are_offered_only_where_there_are_paths() {
    let mut model = model();
    for (device, offered) in [("disk", false), ("m", true)] {
        model.screen = Screen::Device(device.into());
        let drawn = screen(&model, 80, 24, PLAIN);
        assert_eq!(drawn[23].contains("f fail path  r reinstate"), offered, "{}", drawn[23]);
    }
    model.screen = Screen::Device("disk".into());
    press(&mut model, &[Action::Fail]);
    assert_eq!(model.note, "this device has no paths (multipath tables have them)");
}

#[test]
fn backends_are_shown_with_their_paths() {
    let mut model = model();
    let mut taken = snapshot(3);
    taken.samples[1].stats.layers[1].label = "nbd://storage-b:10809/db".into();
    model.take(taken, String::new());
    model.screen = Screen::Device("m".into());
    let drawn = screen(&model, 80, 24, PLAIN);
    assert!(
        drawn.iter().any(|line| line.starts_with("  ram nbd://storage-b:10809/db  ")),
        "{}",
        drawn.join("\n")
    );
}

#[test]
fn a_device_on_a_small_screen() {
    let mut model = model();
    press(&mut model, &[Action::Sort(Sort::Name), Action::Move(1), Action::Enter]);
    let drawn = screen(&model, 80, 28, PLAIN);
    let expected = [
        "m  64.0M  512 a block  process 4711",
        "ram:64M + delay,read=1ms",
        "10 IOPS  50 % busy  32 in flight of 128  errors: 1, 1 of them new",
        "IOPS                                                                  █       10",
        "read                                                                  █  40.0K/s",
        "write                                                                 ▁      0/s",
        "p99                                                                   █   12.5us",
        "OPERATION        io/s  bytes/s     p50     p90     p99   p99.9     max",
        "read               10    40.0K  12.5us  12.5us  12.5us  12.5us  12.5us",
        "  PATH   GROUP        FAILURES",
        "> up      1 in use           0  nbd:one",
        "  down    1 in use           1  nbd:two",
        "LAYER                                io/s    await    own              in flight",
        "delay                                  10   20.0us   75 %  ███████▌            4",
        "  ram                                  10   5.00us   25 %  ██▌                 4",
        "QUEUE  THREAD     RING        IN FLIGHT",
        "    0  reactor-0  io_uring  █████                32 of 128",
        "EXPORT    CLIENTS",
        "nbd             2  nbd+unix:///m?socket=/run/m.sock",
        "BACKEND",
        "backend: ram",
        "LIMITS (not 0)",
        "max_sectors                        255",
        "",
        "",
    ];
    assert_eq!(drawn[2..27], expected, "\n{}", drawn.join("\n"));
}

#[test]
fn a_large_screen_has_more_columns_and_the_selected_device() {
    let drawn = screen(&model(), 200, 60, PLAIN).join("\n");
    for text in
        ["p99.9", "CLIENTS", "ram:64M + delay,read=1ms", "LAYER", "QUEUE  THREAD", "max_sectors", "of 128"]
    {
        assert!(drawn.contains(text), "{text}:\n{drawn}");
    }
}

#[test]
fn every_size_and_list_can_be_drawn_in_ascii() {
    let mut model = model();
    let ascii = Theme { colour: false, unicode: false };
    for screens in 0..4 {
        for (width, height) in [(1, 1), (2, 3), (20, 4), (39, 10), (80, 24), (132, 40), (161, 41), (500, 120)]
        {
            let drawn = screen(&model, width, height, ascii).concat();
            assert!(drawn.is_ascii(), "{drawn}");
        }
        match screens {
            0 => press(&mut model, &[Action::Enter, Action::Scroll(100)]),
            1 => press(&mut model, &[Action::Help]),
            _ => {
                model.take(Snapshot::default(), String::new());
                None
            }
        };
    }
    let samples = (0..100).map(|n| sample(&format!("disk-with-a-long-name-{n:03}"), 1, 100 - n)).collect();
    let many = Snapshot { samples, ..Snapshot::default() };
    model.take(many, String::new());
    press(&mut model, &[Action::Back, Action::Scroll(1 << 20)]);
    let drawn = screen(&model, 80, 24, PLAIN);
    assert!(drawn[21].starts_with("disk-with-a+"), "{}", drawn.join("\n"));
    assert_eq!(model.selected.as_deref(), Some("disk-with-a-long-name-099"));
}

#[test]
fn a_failed_path_is_red_unless_colours_are_off() {
    use ratatui::style::Color;
    let mut model = model();
    model.screen = Screen::Device("m".into());
    for colour in [false, true] {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        let theme = Theme { colour, unicode: true };
        terminal.draw(|frame| _ = view::draw(frame, &model, theme)).unwrap();
        let cells = terminal.backend().buffer().content();
        let reds = cells.iter().filter(|cell| cell.fg == Color::Red).count();
        let plain = cells.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset);
        assert_eq!((reds > 0, plain), (colour, !colour));
    }
}

#[test]
fn a_path_is_failed_only_after_confirmation() {
    let mut model = model();
    assert_eq!(press(&mut model, &[Action::Fail]), None, "not in the list");
    press(&mut model, &[Action::Sort(Sort::Name), Action::Move(1), Action::Enter]);
    assert_eq!(
        press(&mut model, &[Action::Fail, Action::Move(1), Action::Yes]),
        None,
        "a key in between is a no"
    );
    model.path = 0;
    let drawn = {
        press(&mut model, &[Action::Fail]);
        screen(&model, 80, 24, PLAIN)
    };
    assert_eq!(drawn[23], "Fail the path nbd:one of m? y, or any other key for no");
    let Some(TopRequest::Change(order)) = model.act(Action::Yes) else { panic!("a change") };
    assert_eq!((&*order.device, &*order.path, order.fail), ("m", "nbd:one", true));
    model.changed(&order, Err("no".into()));
    assert_eq!(model.note, "nbd:one of m: no");
    press(&mut model, &[Action::Fail, Action::Yes, Action::Move(1), Action::Fail]);
    assert_eq!(model.note, "nbd:two is down already");
    press(&mut model, &[Action::ReverseOrReinstate]);
    assert!(model.asks.as_ref().is_some_and(|order| !order.fail && order.path == "nbd:two"));
}

#[test]
fn the_first_device_is_selected_until_the_user_selects_one_and_help_fits() {
    let mut model = model();
    for (sort, first) in [(Sort::Name, "disk"), (Sort::Name, "m")] {
        press(&mut model, &[Action::Sort(sort)]);
        if first == "m" {
            press(&mut model, &[Action::ReverseOrReinstate]);
        }
        assert_eq!(model.rows[model.selected_at()].info.name, first);
    }
    press(&mut model, &[Action::Enter]);
    assert_eq!(model.screen, Screen::Device("m".into()));
    press(&mut model, &[Action::Back, Action::ReverseOrReinstate]);
    assert_eq!(model.rows[model.selected_at()].info.name, "m", "Enter selected it");
    press(&mut model, &[Action::Help]);
    let drawn = screen(&model, 80, 24, PLAIN);
    assert!(drawn.iter().any(|line| line.trim_end().ends_with("since the start.")), "{}", drawn.join("\n"));
}

#[test]
fn sorting_keeps_the_selection_and_is_reversible() {
    let mut model = model();
    let names = |model: &Model| model.rows.iter().map(|row| row.info.name.clone()).collect::<Vec<_>>();
    press(&mut model, &[Action::Move(1)]);
    assert_eq!(model.selected.as_deref(), Some("m"));
    for (sort, expected) in
        [(Sort::Iops, ["disk", "m"]), (Sort::Name, ["disk", "m"]), (Sort::Errors, ["disk", "m"])]
    {
        press(&mut model, &[Action::Sort(sort)]);
        assert_eq!(names(&model), expected, "{sort:?}");
    }
    press(&mut model, &[Action::Sort(Sort::Bandwidth), Action::ReverseOrReinstate]);
    assert_eq!(names(&model), ["m", "disk"]);
    assert_eq!(model.selected.as_deref(), Some("m"));
}

#[test]
fn devices_of_a_silent_server_stay_and_those_of_a_server_that_exits_go() {
    let mut model = model();
    press(&mut model, &[Action::Enter]);
    let silent = Snapshot { silent: vec!["/run/control.4711".into()], ..Snapshot::default() };
    model.take(silent, "12:00:02 UTC".into());
    assert!(model.rows.iter().all(|row| row.silent) && model.rows.len() == 2);
    assert!(screen(&model, 80, 24, PLAIN).concat().contains("its process does not answer"));
    assert!(batch::page(&model).contains("does not answer"));
    model.take(snapshot(4), "12:00:03 UTC".into());
    assert!(
        (model.rows[0].rates.reads - 12_000.0).abs() < 1.0,
        "the rate is of the time since the last answer"
    );
    model.take(Snapshot::default(), "12:00:04 UTC".into());
    assert_eq!((model.screen.clone(), &*model.note), (Screen::Devices, "disk was removed"));
    assert!(screen(&model, 80, 24, PLAIN).concat().contains("There are no devices"));
}

#[test]
fn sums_exclude_silent_processes() {
    let mut model = model();
    let mut taken = snapshot(3);
    taken.samples[0].socket = "/run/control.1".into();
    model.take(taken, String::new());
    let mut taken = snapshot(4);
    taken.samples.remove(0);
    taken.silent = vec!["/run/control.1".into()];
    model.take(taken, String::new());
    assert_eq!(model.rows.len(), 2, "it is still shown");
    let drawn = screen(&model, 80, 24, PLAIN);
    assert!(drawn[1].starts_with("10 IOPS  read 40.0K/s  write 0/s  32 in flight"), "{}", drawn[1]);
}

#[test]
fn scrolling_stops_at_the_end_and_follows_the_selected_path() {
    let mut model = model();
    let mut many = snapshot(3);
    many.samples[1].paths = (0..40).map(|n| path(&format!("nbd:{n:02}"), true)).collect();
    model.take(many, String::new());
    press(&mut model, &[Action::Sort(Sort::Name), Action::Move(1), Action::Enter]);
    let draw = |model: &mut Model| {
        let (mut scroll, mut terminal) = (0, Terminal::new(TestBackend::new(80, 24)).unwrap());
        terminal.draw(|frame| scroll = view::draw(frame, model, PLAIN)).unwrap();
        model.drawn(scroll);
        screen(model, 80, 24, PLAIN)
    };
    press(&mut model, &[Action::Scroll(1 << 20)]);
    let end = draw(&mut model);
    assert!(end[22].starts_with("max_sectors"), "{}", end.join("\n"));
    press(&mut model, &[Action::Scroll(-1)]);
    assert_eq!(draw(&mut model)[3..23], end[2..22], "one line up");
    press(&mut model, &[Action::Move(30)]);
    assert!(draw(&mut model).iter().any(|line| line.starts_with("> up") && line.ends_with("nbd:30")));
    press(&mut model, &[Action::Move(-30)]);
    assert!(draw(&mut model)[2].ends_with("nbd:00"), "as few lines as show it");
    press(&mut model, &[Action::Scroll(20)]);
    let drawn = draw(&mut model).concat();
    assert!(!drawn.contains("> up"), "pages go where they are sent: {drawn}");
}

#[test]
fn a_page_of_text_has_every_column() {
    let page = batch::page(&model());
    let lines: Vec<&str> = page.lines().collect();
    assert_eq!(lines[0], "blockyard top - 12:00:01 UTC, 2 devices, 1 processes, 0 not answering");
    let expected = [
        "DEVICE        IOPS   r/s   w/s   d/s   f/s  READ/s WRITE/s    p50    p90    p99  p99.9    max      QUEUE aqu-sz  BUSY% PATHS  ERRORS CLIENTS   SIZE STACK",
        "disk         12.0k 12.0k     0     0     0   46.9M       0 12.5us 12.5us 1.08ms 1.08ms 1.08ms         32    0.2     50     -       1       2  64.0M ram:64M + delay,read=1ms",
        "m               10    10     0     0     0   40.0K       0 12.5us 12.5us 12.5us 12.5us 12.5us         32      0     50   1/2       1       2  64.0M ram:64M + delay,read=1ms",
    ];
    assert_eq!(lines[1..4], expected, "\n{page}");
}
