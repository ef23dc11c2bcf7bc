//! Valid files, changed at random: images, overlays, stores of snapshots, logs, partition tables, topologies,
//! tables and records of the run directory. Each must be refused with an error, or served; served devices are
//! read and written. No server may die, hang, exceed its memory or expose a file that the image may not name.

use super::super::daemon::{Daemon, Refusal, has_panicked, tail};
use super::super::options::Options;
use super::super::rounds::spread;
use super::super::{Tally, guarded};
use super::change;
use crate::peer::Peer;
use crate::server::noise;
use proto::nbd::CommandFlags;
use proto::nbd::client::HandshakeOptions;
use sim::Rng;
use std::path::Path;
use std::process::Command;

/// Most memory that the process may use, in KiB.
const MEMORY_KIB: u64 = 400 << 10;
/// Content of the file that no image may name.
const SECRET: &[u8; 32] = b"SECRETsecretSECRETsecretSECRET!!";
/// Length of the disks.
const LEN: usize = 1 << 20;

/// A file to change, and how it is served.
struct Sample {
    name: &'static str,
    file: &'static str,
    content: Vec<u8>,
    /// Further files in its folder.
    beside: Vec<(&'static str, Vec<u8>)>,
    /// Arguments before `--nbd`.
    arguments: Vec<&'static str>,
    /// Only this many bytes from the beginning are changed: they hold the metadata.
    head: usize,
}

/// Tries `count` files.
pub fn run(options: &Options) -> Tally {
    let samples = match samples(options) {
        Ok(samples) => samples,
        Err(why) => {
            let mut tally = Tally::default();
            tally.find("broken", format!("images: {why}"));
            return tally;
        }
    };
    let figures = ["images", "served", "refused", "hangs", "wrong", "panics"];
    spread(options, options.workers, options.count, &figures, |number, tally| {
        let seed = options.seed.wrapping_add(number);
        let sample = &samples[(seed % samples.len() as u64) as usize];
        let replay = format!("images --seed={seed} --count=1 ({})", sample.name);
        if let Err(why) = guarded(|| one(options, sample, seed, &replay, tally)) {
            tally.find("broken", format!("{replay}: {why}"));
        }
    })
}

fn one(options: &Options, sample: &Sample, seed: u64, replay: &str, tally: &mut Tally) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut content = sample.content.clone();
    let mut head: Vec<u8> = content.drain(..sample.head.min(content.len())).collect();
    for _ in 0..1 + rng.below(5) {
        change(&mut head, &mut rng);
    }
    if rng.chance(100) {
        name_the_secret(&mut head, &mut rng);
    }
    head.append(&mut content);
    let scratch = options.scratch().map_err(|why| why.to_string())?;
    let dir = scratch.path().join("d");
    let io = |why: std::io::Error| why.to_string();
    std::fs::create_dir_all(&dir).map_err(io)?;
    std::fs::write(scratch.path().join("secret"), SECRET.repeat(LEN / SECRET.len())).map_err(io)?;
    for (name, bytes) in &sample.beside {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap_or(&dir)).map_err(io)?;
        std::fs::write(path, bytes).map_err(io)?;
    }
    let file = dir.join(sample.file);
    std::fs::create_dir_all(file.parent().unwrap_or(&dir)).map_err(io)?;
    std::fs::write(file, &head).map_err(io)?;
    if options.canary {
        // The canary: simulates a server that opened a file outside the image's folder.
        std::fs::write(dir.join("base"), SECRET.repeat(LEN / SECRET.len())).map_err(io)?;
    }
    let socket = scratch.path().join("s");
    let export = format!("unix:{}", socket.display());
    let mut arguments = sample.arguments.clone();
    if arguments[0] == "serve" {
        arguments.extend(["--name", "x1", "--nbd", &export]);
    }
    tally.count("images", 1);
    if arguments[0] != "serve" {
        let refusal = match Daemon::start(&dir, &arguments, usize::MAX) {
            Err(refusal) => refusal,
            Ok(_) => return Err("more lines than there can be".to_owned()),
        };
        judge_refusal(&refusal, replay, tally);
        return Ok(());
    }
    match Daemon::start(&dir, &arguments, 1) {
        Err(refusal) => judge_refusal(&refusal, replay, tally),
        Ok(mut daemon) => {
            tally.count("served", 1);
            if let Err(why) = guarded(|| exercise(&socket, &mut rng)) {
                tally.find("wrong", format!("{replay}: {why}"));
            }
            if let Some(bad) = daemon.complaint() {
                tally.find("panics", format!("{replay}: {bad}"));
            }
            let peak = daemon.status_field("VmHWM");
            if peak > MEMORY_KIB {
                tally.find("wrong", format!("{replay}: {} MiB in memory", peak >> 10));
            }
            daemon.kill();
        }
    }
    Ok(())
}

fn judge_refusal(refusal: &Refusal, replay: &str, tally: &mut Tally) {
    tally.count("refused", 1);
    if refusal.status.is_none() {
        tally.find("hangs", format!("{replay}: {}", tail(&refusal.log)));
    } else if has_panicked(&refusal.log) || !refusal.is_orderly() {
        tally.find("panics", format!("{replay}: {:?} {}", refusal.status, tail(&refusal.log)));
    }
}

/// Reads and writes; errors are ignored, but the returned data is checked.
fn exercise(socket: &Path, rng: &mut Rng) -> Result<(), String> {
    let Ok(mut peer) = Peer::with(socket, HandshakeOptions::new("x1")) else { return Ok(()) };
    let size = peer.session.size;
    for _ in 0..12 {
        let len = size.min(65536);
        if len == 0 {
            break;
        }
        let offset = rng.below((size - len).min(LEN as u64 * 2) + 1) / 512 * 512;
        if let Ok(bytes) = peer.read(offset, len)
            && bytes.windows(SECRET.len()).any(|window| window == SECRET)
        {
            return Err("it shows a file outside its folder".to_owned());
        }
        if rng.chance(300) && !peer.session.flags.contains(proto::nbd::TransmissionFlags::READ_ONLY) {
            let _ = peer.write(offset, &vec![1; len.min(4096) as usize], CommandFlags::empty());
            let _ = peer.flush();
        }
    }
    Ok(())
}

/// Writes the secret file's name to a place for names.
fn name_the_secret(head: &mut [u8], rng: &mut Rng) {
    const NAMES: [&[u8]; 3] = [b"../secret", b"./../secret", b"base/../../secret"];
    let name = *rng.pick(&NAMES);
    let known: [&[u8]; 2] = [b"base", b"flat.img"];
    for old in known {
        if let Some(at) = head.windows(old.len()).position(|window| window == old)
            && at + name.len() < head.len()
        {
            head[at..at + name.len()].copy_from_slice(name);
        }
    }
}

/// Returns one sample of each kind, created by the installed tools.
fn samples(options: &Options) -> Result<Vec<Sample>, String> {
    let scratch = options.scratch().map_err(|why| why.to_string())?;
    let dir = scratch.path();
    let io = |why: std::io::Error| why.to_string();
    let base = noise(5, LEN);
    std::fs::write(dir.join("base"), &base).map_err(io)?;
    let mut samples = Vec::new();
    if crate::tools::find("qemu-img").is_some() {
        images(dir, &base, &mut samples)?;
    }
    ours(dir, &base, &mut samples)?;
    texts(&base, &mut samples);
    Ok(samples)
}

fn qemu(dir: &Path, arguments: &[&str]) -> Result<(), String> {
    let status = Command::new("qemu-img").args(arguments).current_dir(dir).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        other => Err(format!("qemu-img {arguments:?}: {other:?}")),
    }
}

fn images(dir: &Path, base: &[u8], samples: &mut Vec<Sample>) -> Result<(), String> {
    let read = |name: &str| std::fs::read(dir.join(name)).map_err(|why| format!("{name}: {why}"));
    qemu(dir, &["convert", "-q", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4k", "base", "a.qcow2"])?;
    qemu(dir, &["convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "base", "z.qcow2"])?;
    qemu(dir, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base", "b.qcow2"])?;
    let qcow2 = ["serve", "file:x.qcow2,format=qcow2"];
    for (name, file, head) in [
        ("qcow2", "a.qcow2", 24 << 10),
        ("qcow2 compressed", "z.qcow2", 4096),
        ("qcow2 backed", "b.qcow2", 640),
    ] {
        samples.push(Sample {
            name,
            file: "x.qcow2",
            content: read(file)?,
            beside: vec![("base", base.to_vec())],
            arguments: qcow2.to_vec(),
            head,
        });
    }
    qemu(dir, &["convert", "-q", "-f", "raw", "-O", "vmdk", "base", "s.vmdk"])?;
    qemu(
        dir,
        &["convert", "-q", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized", "base", "c.vmdk"],
    )?;
    for (name, file, head) in [("vmdk sparse", "s.vmdk", 3000), ("vmdk compressed", "c.vmdk", 3000)] {
        let arguments = vec!["serve", "file:x.vmdk,format=vmdk,ro"];
        samples.push(Sample {
            name,
            file: "x.vmdk",
            content: read(file)?,
            beside: Vec::new(),
            arguments,
            head,
        });
    }
    let flat = format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\n\
         # Extent description\nRW {} FLAT \"flat.img\" 0\n\nddb.adapterType = \"ide\"\n",
        LEN / 512
    );
    samples.push(Sample {
        name: "vmdk flat",
        file: "x.vmdk",
        content: flat.into_bytes(),
        beside: vec![("flat.img", base.to_vec())],
        arguments: vec!["serve", "file:x.vmdk,format=vmdk,ro"],
        head: 512,
    });
    Ok(())
}

/// Lets the binary create a file: serves it once, writes to it, and ends the server.
fn created(dir: &Path, arguments: &[&str], file: &str) -> Result<Vec<u8>, String> {
    let socket = dir.join("m");
    let export = format!("unix:{}", socket.display());
    let arguments = [arguments, &["--name", "x1", "--nbd", &export]].concat();
    let mut daemon = Daemon::start(dir, &arguments, 1).map_err(|refusal| refusal.log)?;
    let mut peer = Peer::with(&socket, HandshakeOptions::new("x1")).map_err(|why| why.to_string())?;
    for number in 0..10 {
        peer.write(number * 70_000 / 512 * 512, &noise(number, 4096), CommandFlags::FUA)
            .map_err(|why| why.to_string())?;
    }
    drop(peer);
    daemon.terminate();
    std::fs::read(dir.join(file)).map_err(|why| format!("{file}: {why}"))
}

fn ours(dir: &Path, base: &[u8], samples: &mut Vec<Sample>) -> Result<(), String> {
    let beside = || vec![("base", base.to_vec())];
    let words = ["serve", "file:base", "--layer", "cow,file=x.cow,create"];
    let content = created(dir, &words, "x.cow")?;
    let arguments = vec!["serve", "file:base", "--layer", "cow,file=x.cow"];
    samples.push(Sample { name: "overlay", file: "x.cow", content, beside: beside(), arguments, head: 8192 });
    std::fs::write(dir.join("store"), vec![0; 4 << 20]).map_err(|why| why.to_string())?;
    let table = dir.join("snap.table");
    std::fs::write(&table, "0 2048 snapshot base store P 16\n").map_err(|why| why.to_string())?;
    let content = created(dir, &["serve", "--table", &table.to_string_lossy()], "store")?;
    samples.push(Sample {
        name: "snapshot store",
        file: "store",
        content,
        beside: vec![("base", base.to_vec()), ("t", b"0 2048 snapshot base store P 16\n".to_vec())],
        arguments: vec!["serve", "--table", "t"],
        head: 20 << 10,
    });
    let words = ["serve", "file:base", "--layer", "log,file=w.log,size=2M,create"];
    let content = created(dir, &words, "w.log")?;
    samples.push(Sample {
        name: "log of writes",
        file: "w.log",
        content: content.clone(),
        beside: beside(),
        arguments: vec!["serve", "file:base", "--layer", "log,file=w.log"],
        head: 4096,
    });
    samples.push(Sample {
        name: "log that is replayed",
        file: "w.log",
        content,
        beside: beside(),
        arguments: vec!["replay-log", "--log", "w.log", "--replay", "base"],
        head: 8192,
    });
    std::fs::write(dir.join("mlog"), vec![0; 65536]).map_err(|why| why.to_string())?;
    std::fs::write(dir.join("twin"), base).map_err(|why| why.to_string())?;
    let mirror = "0 2048 mirror disk 2 mlog 64 2 base 0 twin 0\n";
    std::fs::write(dir.join("pair.table"), mirror).map_err(|why| why.to_string())?;
    let content = created(dir, &["serve", "--table", "pair.table"], "mlog")?;
    samples.push(Sample {
        name: "mirror log",
        file: "mlog",
        content,
        beside: vec![("base", base.to_vec()), ("twin", base.to_vec()), ("t", mirror.as_bytes().to_vec())],
        arguments: vec!["serve", "--table", "t"],
        head: 2048,
    });
    Ok(())
}

fn texts(base: &[u8], samples: &mut Vec<Sample>) {
    let table = "0 1024 linear base 0\n1024 512 striped 2 64 base 0 base 512\n1536 512 zero\n";
    samples.push(Sample {
        name: "table",
        file: "t",
        content: table.as_bytes().to_vec(),
        beside: vec![("base", base.to_vec())],
        arguments: vec!["serve", "--table", "t"],
        head: 4096,
    });
    let topology = "queues = 1\n[device.a]\nstack = \"file:base\"\nlayers = [\"split,max_sectors=255\"]\n\
                    [device.b]\ntable = \"0 64 linear a 0\"\n[[export]]\ndevice = \"b\"\nnbd = \"unix:s\"\n\
                    [[export]]\ndevice = \"a\"\nnbd = \"unix:s\"\n";
    samples.push(Sample {
        name: "topology",
        file: "t.toml",
        content: topology.as_bytes().to_vec(),
        beside: vec![("base", base.to_vec())],
        arguments: vec!["check", "t.toml"],
        head: 4096,
    });
    for (name, file, content) in [
        (
            "record of a device",
            "run/disk.json",
            &b"{\"name\":\"disk\",\"pid\":1,\"stack\":\"file:base\"}"[..],
        ),
        ("link to a control socket", "run/disk.control", b"control.1"),
    ] {
        samples.push(Sample {
            name,
            file,
            content: content.to_vec(),
            beside: vec![("base", base.to_vec())],
            arguments: vec!["list"],
            head: 256,
        });
    }
    let mut disk = base.to_vec();
    disk[..LEN / 2].fill(0);
    partitioned(&mut disk);
    samples.push(Sample {
        name: "partition table",
        file: "disk",
        content: disk,
        beside: Vec::new(),
        arguments: vec!["serve", "file:disk,format=raw,part=1"],
        head: 1024,
    });
}

/// An MBR with two partitions.
fn partitioned(disk: &mut [u8]) {
    for (number, (first, len)) in [(64u32, 512u32), (1024, 512)].into_iter().enumerate() {
        let entry = &mut disk[446 + number * 16..][..16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..16].copy_from_slice(&len.to_le_bytes());
    }
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
}
