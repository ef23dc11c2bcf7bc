//! The screen as text: what is drawn of a model that is put together by hand.

use super::gather::{Look, Sample};
use super::input::Action;
use super::model::{Errand, Model, Screen};
use super::rows::Sort;
use super::theme::Theme;
use super::{batch, view};
use engine::control::{DeviceInfo, DeviceStats, ExportInfo, Latency, LayerStats, OpStats, QueueInfo};
use engine::path_status::PathStatus;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

const PLAIN: Theme = Theme { colour: false, unicode: true };

/// A device that has done so much: `reads` of 4 KiB a second for `seconds`, one in fifty of them slow.
fn sample(name: &str, seconds: u64, reads: u64) -> Sample {
    let ios = reads * seconds;
    let latency =
        Latency { buckets: vec![(12_288, ios * 49 / 50), (1 << 20, ios / 50)], ..Latency::default() };
    let read = OpStats { ios, bytes: ios * 4096, ticks_ns: ios * 20_000, latency, ..OpStats::default() };
    let layer = |node, depth, name: &str, ticks_ns| LayerStats {
        node,
        depth,
        name: name.into(),
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

fn look(seconds: u64) -> Look {
    let mut multipath = sample("m", seconds, 10);
    multipath.paths = vec![path("nbd:one", true), path("nbd:two", false)];
    Look { samples: vec![sample("disk", seconds, 12_000), multipath], processes: 1, silent: Vec::new() }
}

fn model() -> Model {
    let mut model = Model::new(1000);
    model.take(look(1), "12:00:00 UTC".into());
    model.take(look(2), "12:00:01 UTC".into());
    model
}

fn screen(model: &Model, width: u16, height: u16, theme: Theme) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| _ = view::draw(frame, model, theme)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(line).collect()
}

fn press(model: &mut Model, actions: &[Action]) -> Option<Errand> {
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
    assert!(drawn[23].starts_with("h help  Enter show"), "{}", drawn[23]);
}

#[test]
fn a_device_on_a_small_screen() {
    let mut model = model();
    press(&mut model, &[Action::Sort(Sort::Name), Action::Move(1), Action::Enter]);
    let drawn = screen(&model, 80, 24, PLAIN);
    let expected = [
        "m  64.0M  512 a block  process 4711",
        "delay,read=1ms > ram:64M",
        "10 IOPS  50 % busy  32 under way of 128  errors: 1, 1 of them new",
        "OPERATION        io/s  bytes/s     p50     p90     p99   p99.9     max",
        "read               10    40.0K  12.5us  12.5us  12.5us  12.5us  12.5us",
        "  PATH   GROUP        FAILURES",
        "> up      1 in use           0  nbd:one",
        "  down    1 in use           1  nbd:two",
        "LAYER                       io/s    await    own                       under way",
        "delay                         10   20.0us   75 %  ███████████████              4",
        "  ram                         10   5.00us   25 %  █████                        4",
        "QUEUE  THREAD     RING        UNDER WAY",
        "    0  reactor-0  io_uring  █████                32 of 128",
        "EXPORT    CLIENTS",
        "nbd             2  nbd+unix:///m?socket=/run/m.sock",
        "BACKEND",
        "backend: ram",
        "LIMITS (those that are not 0)",
        "max_sectors                        255",
        "",
        "",
    ];
    assert_eq!(drawn[2..23], expected, "\n{}", drawn.join("\n"));
}

#[test]
fn a_large_screen_shows_more_columns_and_the_device_that_is_picked_out() {
    let drawn = screen(&model(), 200, 60, PLAIN).join("\n");
    for text in
        ["p99.9", "CLIENTS", "delay,read=1ms > ram:64M", "LAYER", "QUEUE  THREAD", "max_sectors", "of 128"]
    {
        assert!(drawn.contains(text), "{text}:\n{drawn}");
    }
}

#[test]
fn any_size_any_letters_and_any_list_can_be_drawn() {
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
                model.take(Look::default(), String::new());
                None
            }
        };
    }
    let samples = (0..100).map(|n| sample(&format!("disk-with-a-long-name-{n:03}"), 1, 100 - n)).collect();
    let many = Look { samples, ..Look::default() };
    model.take(many, String::new());
    press(&mut model, &[Action::Back, Action::Scroll(1 << 20)]);
    let drawn = screen(&model, 80, 24, PLAIN);
    assert!(drawn[22].starts_with("disk-with-a+"), "{}", drawn.join("\n"));
    assert_eq!(model.selected.as_deref(), Some("disk-with-a-long-name-099"));
}

#[test]
fn without_colours_there_are_none_and_with_them_a_path_that_is_down_is_red() {
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
fn a_path_is_failed_only_after_a_yes() {
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
    let Some(Errand::Tell(order)) = model.act(Action::Yes) else { panic!("it is to be told") };
    assert_eq!((&*order.device, &*order.path, order.fail), ("m", "nbd:one", true));
    model.told(&order, Err("no".into()));
    assert_eq!(model.note, "nbd:one of m: no");
    press(&mut model, &[Action::Fail, Action::Yes, Action::Move(1), Action::Fail]);
    assert_eq!(model.note, "nbd:two is down already");
    press(&mut model, &[Action::ReverseOrReinstate]);
    assert!(model.asks.as_ref().is_some_and(|order| !order.fail && order.path == "nbd:two"));
}

#[test]
fn until_one_is_picked_out_it_is_the_first_and_help_is_whole() {
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
    assert_eq!(model.rows[model.selected_at()].info.name, "m", "it was picked out by that");
    press(&mut model, &[Action::Help]);
    let drawn = screen(&model, 80, 24, PLAIN);
    assert!(drawn.iter().any(|line| line.trim_end().ends_with("since the start.")), "{}", drawn.join("\n"));
}

#[test]
fn sorting_keeps_what_is_picked_out_and_goes_both_ways() {
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
fn a_server_that_does_not_answer_and_one_that_goes() {
    let mut model = model();
    press(&mut model, &[Action::Enter]);
    let silent = Look { silent: vec!["/run/control.4711".into()], ..Look::default() };
    model.take(silent, "12:00:02 UTC".into());
    assert!(model.rows.iter().all(|row| row.silent) && model.rows.len() == 2);
    assert!(screen(&model, 80, 24, PLAIN).concat().contains("its process does not answer"));
    assert!(batch::page(&model).contains("does not answer"));
    model.take(look(4), "12:00:03 UTC".into());
    assert!(
        (model.rows[0].rates.reads - 12_000.0).abs() < 1.0,
        "the rate is of the time since the last answer"
    );
    model.take(Look::default(), "12:00:04 UTC".into());
    assert_eq!((model.screen.clone(), &*model.note), (Screen::Devices, "disk is gone"));
    assert!(screen(&model, 80, 24, PLAIN).concat().contains("There are no devices"));
}

#[test]
fn what_a_silent_process_did_last_is_in_no_sum() {
    let mut model = model();
    let mut look = look(3);
    look.samples[0].socket = "/run/control.1".into();
    model.take(look, String::new());
    let mut look = self::look(4);
    look.samples.remove(0);
    look.silent = vec!["/run/control.1".into()];
    model.take(look, String::new());
    assert_eq!(model.rows.len(), 2, "it is shown");
    let drawn = screen(&model, 80, 24, PLAIN);
    assert!(drawn[1].starts_with("10 IOPS  read 40.0K/s  write 0/s  32 in flight"), "{}", drawn[1]);
}

#[test]
fn one_scrolls_back_from_the_end_and_sees_the_path_that_is_picked() {
    let mut model = model();
    let mut many = look(3);
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
        "disk         12.0k 12.0k     0     0     0   46.9M       0 12.5us 12.5us 1.08ms 1.08ms 1.08ms         32    0.2     50     -       1       2  64.0M delay,read=1ms > ram:64M",
        "m               10    10     0     0     0   40.0K       0 12.5us 12.5us 12.5us 12.5us 12.5us         32      0     50   1/2       1       2  64.0M delay,read=1ms > ram:64M",
    ];
    assert_eq!(lines[1..4], expected, "\n{page}");
}
