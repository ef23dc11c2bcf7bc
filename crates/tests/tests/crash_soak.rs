//! Longer proofs of the crash laboratory, run by `./x soak crash` as root: file systems, databases, and our
//! own stores on a device whose power fails. The figures of the last run are in docs/benchmarks/crash.md.

use blockyard_tests::server::{Sandbox, binary, missing_root};
use blockyard_tests::tools::{missing, run_within, skip};
use std::path::Path;
use std::time::Duration;

/// The longest time that one proof takes.
const PATIENCE: Duration = Duration::from_secs(400);

fn journal() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/journal/journal.py");
    path.canonicalize().expect("the example").display().to_string()
}

/// Writes the scripts of a proof.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::default();
    sandbox.text("files.sh", FILES);
    sandbox.text("sqlite.sh", SQLITE);
    sandbox.text("integrity.sh", INTEGRITY);
    sandbox.text("durable.sh", DURABLE);
    sandbox.text("use_lmdb.py", LMDB);
    sandbox.text("store.sh", STORE);
    sandbox
}

/// Explores; returns the summary.
fn explore(sandbox: &Sandbox, arguments: &[&str], workload: &str, check: &str) -> serde_json::Value {
    let seconds = std::env::var("BLOCKYARD_SOAK_SECONDS").unwrap_or_else(|_| "60".to_owned());
    let mut command = sandbox.blockyard(&["crash"]);
    command.args(arguments).args(["--workload", workload, "--check", check, "--time", &seconds, "--json"]);
    command.current_dir(sandbox.path(".")).env("BIN", binary()).env("JOURNAL", journal());
    let outcome = run_within(&mut command, PATIENCE);
    let summary: serde_json::Value =
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|why| panic!("{why}: {outcome}"));
    println!(
        "{} | {workload} | {check} | {} writes, {} flushes | {} states | {} checked | {} findings | {}",
        arguments.join(" "),
        summary["writes"],
        summary["flushes"],
        summary["generated"],
        summary["checked"],
        summary["findings"].as_array().map_or(0, Vec::len),
        summary["ended"],
    );
    summary
}

#[track_caller]
fn survives(sandbox: &Sandbox, arguments: &[&str], workload: &str, check: &str) {
    let summary = explore(sandbox, arguments, workload, check);
    assert_eq!(summary["findings"], serde_json::json!([]), "{summary:#}");
    assert!(summary["checked"].as_u64() > Some(10), "{summary:#}");
}

#[track_caller]
fn is_found(sandbox: &Sandbox, arguments: &[&str], workload: &str, check: &str, output: &str) {
    let summary = explore(sandbox, &[arguments, &["--findings", "1"]].concat(), workload, check);
    let found = summary["findings"][0]["output"].as_str();
    assert!(found.is_some_and(|found| found.contains(output)), "{summary:#}");
}

/// Replaces, creates and removes files with and without fsync.
const FILES: &str = "\
cd $MNT
for i in 1 2 3 4 5 6; do
    seq 1 400 > new; mv new file; mkdir dir$i; echo $i > dir$i/a; [ $i -lt 3 ] || rm -r dir$((i - 2))
    sync; echo $i >&3
done
";

const SQLITE: &str = "\
sqlite3 $MNT/db \"pragma journal_mode=$2; create table t(a integer primary key, b text); insert into t values(0,'x');\"
sync
for i in 1 2 3 4 5 6; do
    sqlite3 $MNT/db \"pragma synchronous=$1; begin; insert into t values($i, hex(randomblob(6000)));
        update t set b=hex(randomblob(3000)) where a=$i-1; commit;\" && echo $i >&3
done
";

const INTEGRITY: &str = "\
[ -f $MNT/db ] || { [ -z \"$CRASH_MARK\" ]; exit; }
found=$(sqlite3 $MNT/db 'pragma integrity_check') || exit 1
[ \"$found\" = ok ] || { echo \"$found\"; exit 1; }
";

const DURABLE: &str = "\
sh ./integrity.sh || exit 1
[ -z \"$CRASH_MARK\" ] || [ $(sqlite3 $MNT/db 'select max(a) from t') -ge $CRASH_MARK ] || { echo missing; exit 1; }
";

const LMDB: &str = "\
import lmdb, os, sys
synced = sys.argv[2:] != ['nosync']
env = lmdb.open(os.environ['MNT'] + '/db', map_size=8 << 20, sync=synced, metasync=synced)
if sys.argv[1] == 'write':
    os.sync()
    for number in range(1, 9):
        with env.begin(write=True) as txn:
            txn.put(b'n', b'%d' % number)
            for key in range(20):
                txn.put(b'%d-%d' % (number, key), bytes([number]) * 900)
        os.write(3, b'%d\\n' % number)
else:
    acknowledged = int(os.environ['CRASH_MARK'] or 0)
    with env.begin() as txn:
        number = int(txn.get(b'n') or 0)
        if number < acknowledged:
            sys.exit('%d was acknowledged, but the last is %d' % (acknowledged, number))
        for of in range(1, number + 1):
            for key in range(20):
                if txn.get(b'%d-%d' % (of, key)) != bytes([of]) * 900:
                    sys.exit('%d-%d is damaged' % (of, key))
";

/// Serves a stack over the device as a file, and runs the journal on it.
const STORE: &str = "\
mode=$1; shift
dir=$(mktemp -d); export BLOCKYARD_RUN=$dir/run
if [ \"$1\" = --table ]; then echo \"$2\" > $dir/table; set -- --table $dir/table; fi
$BIN serve \"$@\" --name s$$ --fuse $dir/f > $dir/ready 2> $dir/error &
server=$!
until [ -s $dir/ready ]; do sleep 0.02; kill -0 $server || { cat $dir/error; exit 9; }; done
/usr/bin/python3 -S $JOURNAL $mode $dir/f; status=$?
kill -TERM $server; wait $server
rm -r $dir; exit $status
";

fn lacks(tools: &[&str]) -> bool {
    missing_root() || missing(tools)
}

#[test]
#[ignore = "takes minutes: ./x soak crash"]
fn ext2_is_inconsistent_and_journalling_file_systems_are_not() {
    if lacks(&["mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "xfs_repair", "btrfs"]) {
        return;
    }
    let sandbox = sandbox();
    let files = "sh ./files.sh";
    // Without --mount the checks are of the device: fsck.
    is_found(
        &sandbox,
        &["--fs", "ext2", "--size", "32M"],
        files,
        "fsck.ext2 -fn $DEV",
        "Filesystem still has errors",
    );
    let ext4 = "e2fsck -E journal_only -fy $DEV; fsck.ext4 -fn $DEV";
    survives(&sandbox, &["--fs", "ext4", "--size", "64M"], files, ext4);
    survives(
        &sandbox,
        &["--fs", "ext4", "--size", "64M"],
        files,
        "test -z \"$CRASH_MARK\" || cmp -s $MNT/file $MNT/file",
    );
    // The log is replayed by mounting; the file at the mark is whole.
    let whole = "test -z \"$CRASH_MARK\" || test $(wc -l < $MNT/file) = 400";
    survives(&sandbox, &["--fs", "xfs", "--size", "320M"], files, whole);
    survives(&sandbox, &["--fs", "btrfs", "--size", "128M"], files, whole);
    survives(&sandbox, &["--fs", "btrfs", "--size", "128M"], files, "btrfs check --readonly $DEV");
}

#[test]
#[ignore = "takes minutes: ./x soak crash"]
fn a_rename_without_fsync_is_lost() {
    if lacks(&["mkfs.ext4", "/usr/bin/python3"]) {
        return;
    }
    let sandbox = sandbox();
    let size = ["--fs", "ext4", "--size", "32M"];
    let journal = format!("/usr/bin/python3 -S {}", journal());
    let (write, check) = (format!("{journal} replace $MNT"), format!("{journal} compare $MNT"));
    is_found(&sandbox, &size, &format!("{write} --bug rename-without-fsync"), &check, "was acknowledged");
    survives(&sandbox, &size, &write, &check);
    // Written, renamed and never synced: ext2 keeps a name for a file without its data.
    let unsafe_write = "for i in 1 2; do seq 1 9000 > $MNT/new; mv $MNT/new $MNT/file; done";
    let check = "! test -e $MNT/file || test $(wc -l < $MNT/file) = 9000 || { echo short; exit 1; }";
    is_found(&sandbox, &["--fs", "ext2", "--size", "32M"], unsafe_write, check, "short");
}

#[test]
#[ignore = "takes minutes: ./x soak crash"]
fn sqlite_needs_synchronous() {
    if lacks(&["mkfs.ext4", "sqlite3"]) {
        return;
    }
    let sandbox = sandbox();
    let size = ["--fs", "ext4", "--size", "64M"];
    is_found(&sandbox, &size, "sh ./sqlite.sh OFF delete", "sh ./durable.sh", "missing");
    survives(&sandbox, &size, "sh ./sqlite.sh FULL delete", "sh ./integrity.sh");
    survives(&sandbox, &size, "sh ./sqlite.sh FULL wal", "sh ./durable.sh");
    survives(&sandbox, &size, "sh ./sqlite.sh EXTRA delete", "sh ./durable.sh");
    // As its documentation says, FULL does not sync the directory after the journal was removed.
    is_found(&sandbox, &size, "sh ./sqlite.sh FULL delete", "sh ./durable.sh", "missing");
}

#[test]
#[ignore = "takes minutes: ./x soak crash"]
fn lmdb_needs_sync() {
    if lacks(&["mkfs.ext4", "/usr/bin/python3"]) {
        return;
    }
    let has = std::process::Command::new("/usr/bin/python3").args(["-c", "import lmdb"]).output();
    if !has.is_ok_and(|output| output.status.success()) {
        return skip("python3-lmdb is missing");
    }
    let sandbox = sandbox();
    let size = ["--fs", "ext4", "--size", "64M"];
    let (write, check) = ("/usr/bin/python3 ./use_lmdb.py write", "/usr/bin/python3 ./use_lmdb.py verify");
    // The damage that is found first varies: a lost transaction, a corrupt page, or a bus error.
    is_found(&sandbox, &size, &format!("{write} nosync # $MNT"), &format!("{check} nosync # $MNT"), "");
    survives(&sandbox, &size, &format!("{write} # $MNT"), &format!("{check} # $MNT"));
}

#[test]
#[ignore = "takes minutes: ./x soak crash"]
fn redb_needs_durability() {
    let sandbox = sandbox();
    let program = env!("CARGO_BIN_EXE_use_redb");
    let (write, check) = (format!("{program} write $DEV"), format!("{program} verify $DEV"));
    let size = ["--size", "8M"];
    is_found(&sandbox, &size, &format!("{write} none"), &check, "was acknowledged");
    is_found(&sandbox, &size, &format!("{write} nosync"), &check, "");
    survives(&sandbox, &size, &write, &check);
}

#[test]
#[ignore = "takes minutes: ./x soak crash"]
fn another_kernel_records_and_recovers() {
    let sandbox = sandbox();
    let mut command =
        sandbox.blockyard(&["crash", "--guest", "6.1", "--fs", "ext4", "--size", "16M", "--json"]);
    command.args(["--workload", "uname -r > $MNT/a; echo written >&3", "--states", "8", "--findings", "1"]);
    command.args(["--check", "uname -r; test -z \"$CRASH_MARK\" || test -s $MNT/a", "--save"]);
    // The harness is in the checkout.
    command.arg(sandbox.path("crash")).current_dir(env!("CARGO_MANIFEST_DIR"));
    let outcome = run_within(&mut command, PATIENCE);
    let summary: serde_json::Value =
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|why| panic!("{why}: {outcome}"));
    let output = summary["findings"][0]["output"].as_str();
    assert!(output.is_some_and(|output| output.starts_with("6.1.")), "{summary:#}");
    let run = sandbox.path("crash").join(summary["run"].as_str().expect("a name"));
    assert!(run.join("log").exists() && run.join("1/reproduce.sh").exists(), "{}", run.display());
}

#[test]
#[ignore = "takes minutes: ./x soak crash"]
fn our_own_stores_survive() {
    if lacks(&["/usr/bin/python3", "qemu-img"]) {
        return;
    }
    let sandbox = sandbox();
    let prove = |arguments: &[&str], stack: &str| {
        let arguments = [arguments, &["--mount", "none"]].concat();
        let run = |mode: &str| format!("sh ./store.sh {mode} {stack}");
        survives(&sandbox, &arguments, &run("write"), &run("verify"));
    };
    let path = |name: &str| sandbox.path(name).display().to_string();
    let mut create = sandbox.command("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", &path("disk.qcow2"), "1M"]);
    run_within(&mut create, PATIENCE).ok();
    let grow = |name: &str| {
        let file = std::fs::File::options().write(true).open(sandbox.path(name)).expect("an image");
        file.set_len(4 << 20).expect("a longer image");
    };
    grow("disk.qcow2");
    let qcow2 = format!("file:{}", path("disk.qcow2"));
    prove(&["--on", &qcow2], "file:$DEV,format=qcow2");
    sandbox.image("golden.img", 1 << 20);
    let golden = path("golden.img");
    let layer = format!("cow,file={},create", path("overlay.img"));
    sandbox.serve(&format!("file:{golden}"), &["--layer", &layer]).terminate();
    grow("overlay.img");
    prove(
        &["--on", &format!("file:{}", path("overlay.img"))],
        &format!("file:{golden} --layer cow,file=$DEV"),
    );
    prove(&["--size", "4M"], &format!("--table \"0 2048 snapshot {golden} $DEV P 16\""));
    prove(&["--size", "4M"], "--table \"0 2048 mirror disk 2 $DEV 128 2 $DEV 2048 $DEV 4096\"");
}
