//! Settings that were changed online survive a killed server: the next one has them, wherever it is started.

use super::{Ublk, driver, needs};
use crate::guest::disk::Disk;
use crate::guest::{Done, Test, full, test};
use crate::server::{Sandbox, binary, noise};
use crate::tools::{Outcome, run};
use serde_json::Value;
use std::path::Path;
use ublk::{Features, State};

pub(super) const TESTS: &[Test] = &[
    full(
        "ublk/recover_settings",
        "table, layers, scheduler and limits that were set live are the next server's, started elsewhere",
        recovered_settings,
    ),
    test(
        "ublk/recover_file",
        "a file in the place of the first is read at once by who has the device open, and is the next server's",
        recovered_file,
    ),
];

/// Runs `blockyard WORDS` in this folder.
#[track_caller]
fn command_in(sandbox: &Sandbox, folder: &Path, arguments: &[&str]) -> Outcome {
    run(sandbox.command(binary()).current_dir(folder).args(arguments))
}

/// Returns the present settings of a device.
fn settings(sandbox: &Sandbox, case: &Case) -> Vec<(&'static str, String)> {
    let shown: Value = serde_json::from_str(&sandbox.run(&["show", "disk", "--json"]).ok()).expect("JSON");
    let mut all: Vec<_> = ["layers", "limits"].map(|name| (name, shown[name].to_string())).into();
    all.extend(
        ["scheduler", "read_expire", "slow requests"].map(|name| (name, shown["backend"][name].to_string())),
    );
    if case.loads_table {
        all.push(("table", sandbox.run(&["table", "disk"]).ok()));
    }
    all
}

/// A stack, and the file that must have data after the next server has written, with its offset.
struct Case {
    arguments: &'static [&'static str],
    loads_table: bool,
    written: [Option<usize>; 2],
}

fn recovered_settings() -> Done {
    needs(Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE))?;
    // Paths are relative to the folder of their command, that of the device or of its next table.
    for case in [
        Case { arguments: &["--table", "table"], loads_table: true, written: [None, Some(2048 * 512)] },
        Case {
            arguments: &["file:disk.img", "--layer", "delay,write=1ms"],
            loads_table: false,
            written: [Some(0), None],
        },
    ] {
        recovered_case(&case)?;
    }
    Ok(())
}

fn recovered_case(case: &Case) -> Done {
    let sandbox = Sandbox::default();
    let [first, second, elsewhere] = ["first", "second", "elsewhere"].map(|name| {
        let folder = sandbox.path(name);
        std::fs::create_dir(&folder).expect("a folder in the sandbox");
        folder
    });
    for (folder, start) in [("first", 0), ("second", 2048)] {
        sandbox.image(&format!("{folder}/disk.img"), 16 << 20);
        sandbox.text(&format!("{folder}/table"), &format!("0 16384 linear disk.img {start}\n"));
    }
    let mut serve = sandbox.command(binary());
    serve.current_dir(&first).arg("serve").args(case.arguments);
    serve.args(["--name", "disk", "--ublk=recovery=reissue", "--limits", "max_sectors=512"]);
    let server = sandbox.start(&mut serve, 1);
    let disk = Disk::at(server.uri());
    let mut ublk = Ublk { server, disk, driver: driver()?, sandbox };
    if case.loads_table {
        command_in(&ublk.sandbox, &second, &["table", "disk", "--load", "table"]).ok();
        command_in(&ublk.sandbox, &elsewhere, &["resume", "disk"]).ok();
    }
    for arguments in [
        &["limits", "disk", "max_sectors=64", "max_segments=16"][..],
        &["set", "disk", "scheduler=mq-deadline,read_expire=250"],
        &["set", "disk", "slow=600s"],
    ] {
        command_in(&ublk.sandbox, &elsewhere, arguments).ok();
    }
    let set = settings(&ublk.sandbox, case);
    let all: String = set.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
    for what in
        ["split,max_sectors=64,max_segments=16", "mq-deadline,read_expire=250", "[mq-deadline]", "600s"]
    {
        assert!(all.contains(what), "{what} was set:\n{all}");
    }
    assert!(!case.loads_table || all.contains(" 2048\n"), "another table was loaded:\n{all}");
    ublk.server.kill();
    ublk.await_state(State::Quiesced);
    command_in(&ublk.sandbox, &elsewhere, &["recover", "disk"]).ok();
    ublk.await_state(State::Live);
    assert_eq!(settings(&ublk.sandbox, case), set);
    ublk.disk.load(&["--rw=write", "--size=1M"]).ok();
    let written = |folder: &Path| {
        let bytes = std::fs::read(folder.join("disk.img")).expect("it exists");
        bytes.chunks(4096).position(|block| block.iter().any(|byte| *byte != 0)).map(|at| at * 4096)
    };
    assert_eq!([written(&first), written(&second)], case.written, "first blocks that are not zero");
    ublk.command(&["del", "disk"]).ok();
    ublk.await_gone();
    Ok(())
}

fn recovered_file() -> Done {
    needs(Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE))?;
    let sandbox = Sandbox::default();
    let (first, other) =
        (std::fs::read(sandbox.noise("one.img", 1 << 20)).expect("noise"), noise(83, 1 << 20));
    std::fs::write(sandbox.path("two.img"), &other).expect("it is ours");
    let mut serve = sandbox.blockyard(&["serve", "file:one.img,ro", "--name", "disk"]);
    serve.arg("--ublk=recovery=reissue");
    let server = sandbox.start(&mut serve, 1);
    let disk = Disk::at(server.uri());
    let mut ublk = Ublk { server, disk, driver: driver()?, sandbox };
    let read = |ublk: &Ublk| std::fs::read(ublk.disk.path()).expect("it can be read");
    // While it is open the kernel keeps its cache of the device.
    let held = std::fs::File::open(ublk.disk.path()).expect("it exists");
    assert!(read(&ublk) == first);
    ublk.command(&["set", "disk", "file=two.img"]).ok();
    assert!(read(&ublk) == other, "what was cached of the first file is still read");
    ublk.server.kill();
    ublk.await_state(State::Quiesced);
    ublk.command(&["recover", "disk"]).ok();
    ublk.await_state(State::Live);
    drop(held);
    assert!(read(&ublk) == other, "the next server has the first file");
    ublk.command(&["del", "disk"]).ok();
    ublk.await_gone();
    Ok(())
}
