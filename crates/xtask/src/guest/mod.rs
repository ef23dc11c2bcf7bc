//! `./x guest`: runs a job on a real kernel, without root and without changes to this machine.
//!
//! A guest is a kernel ([`kernel`]), the programs of this machine ([`userland`]) and a job: a script with the
//! product and other files. It boots in seconds ([`boot`]), runs the job, and returns its output, its exit
//! status and the files that it left in `/out`; problems reported by the kernel fail the run by name
//! ([`console`]).

pub mod apt;
pub mod boot;
pub mod console;
pub mod cpio;
pub mod kernel;
pub mod machine;
pub mod modules;
pub mod process;
pub mod userland;

use boot::Shape;
use cpio::Tree;
use kernel::{Choice, Kernel};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Environment variable with the directory for kernels and the emulator, instead of `target/guest`.
pub const CACHE: &str = "BLOCKYARD_GUEST_CACHE";

/// Default time limit of a job.
const LIMIT: Duration = Duration::from_secs(120);
/// Default time limit of all tests: what CI allows for them.
const LIMIT_SUITE: Duration = Duration::from_secs(800);

const USAGE: &str = "\
usage: ./x guest [OPTIONS] SCRIPT [ARGUMENTS...]
       ./x guest [OPTIONS] -- COMMAND [ARGUMENTS...]
       ./x guest [OPTIONS] --suite [--quick] [PREFIX...]
       ./x guest [OPTIONS] --shell
       ./x guest --machine DIR
       ./x guest --list

Runs a job on a kernel of its own: fetched from this machine's Debian archive, emulated by QEMU, without root.
--suite runs the tests of crates/tests/src/guest, or those whose names begin with a PREFIX; --list lists them.
--quick leaves out the longest ones, and those of features that others test as well.
--machine writes what a virtual machine boots from an exported disk to DIR, for the tests of vhost-user.
The job has blockyard and the usual tools in PATH, itself and the files of --with in /job, and writes results to /out.

  --kernel WHICH     newest (default), older (that of the stable release), the beginning of a version (6.1), or uml
  --with FILE        add this file: a program to PATH with its libraries, anything else to /job (repeatable)
  --out DIR          directory for the job's /out and the logs (target/guest/out)
  --timeout SECONDS  time limit of the job (120; suites 800)
  --cpus N           processors (2)
  --memory MIB       memory (2048)
  --append WORDS     more arguments for the kernel's command line
  --update           look for newer kernels
  --bare             without blockyard, which is otherwise built first unless BLOCKYARD_BIN is set

Exit status: that of the job; 124 time limit exceeded; 125 the kernel reported a problem (panic, oops, hung task, lockdep,
warning, ...), shown with the end of the console; 126 the guest ended without a status; 1 the guest could not be started.

  BLOCKYARD_BIN          the blockyard for jobs
  BLOCKYARD_GUEST_CACHE  directory for kernels and QEMU (target/guest)
  BLOCKYARD_UML_KERNEL   a user-mode kernel, possibly .zst: the default if set; boots in half a second
  BLOCKYARD_QEMU         an emulator to use
";

/// A parsed command line.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Job {
    choice: Choice,
    shape: Shape,
    with: Vec<PathBuf>,
    out: Option<PathBuf>,
    update: bool,
    bare: bool,
    what: What,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum What {
    Script(PathBuf, Vec<String>),
    Command(Vec<String>),
    Suite(Vec<String>),
    Shell,
    List,
}

fn parse(arguments: &[String], usual: Choice) -> Result<Job, String> {
    let is_suite = arguments.iter().any(|word| word == "--suite");
    let limit = if is_suite { LIMIT_SUITE } else { LIMIT };
    let shape = Shape { cpus: 2, memory_mib: 2048, limit, append: String::new(), disk: None, shell: false };
    let what = What::List;
    let mut job = Job { choice: usual, shape, with: Vec::new(), out: None, update: false, bare: false, what };
    let mut arguments = arguments.iter();
    while let Some(word) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--kernel" => job.choice = Choice::parse(value()?)?,
            "--with" => job.with.push(value()?.into()),
            "--out" => job.out = Some(value()?.into()),
            "--timeout" => job.shape.limit = Duration::from_secs(number(word, value()?, 5)?.into()),
            "--cpus" => job.shape.cpus = number(word, value()?, 1)?,
            "--memory" => job.shape.memory_mib = number(word, value()?, 128)?,
            "--append" => job.shape.append = value()?.clone(),
            "--update" => job.update = true,
            "--bare" => job.bare = true,
            "--list" => return Ok(job),
            "--suite" => {
                job.what = What::Suite(arguments.cloned().collect());
                return Ok(job);
            }
            "--shell" => {
                job.shape.shell = true;
                job.what = What::Shell;
                return Ok(job);
            }
            "--" => {
                job.what = What::Command(arguments.cloned().collect());
                let is_empty = job.what == What::Command(Vec::new());
                return if is_empty { Err("-- needs a command".into()) } else { Ok(job) };
            }
            _ if word.starts_with('-') => return Err(format!("no such option: {word}")),
            script => {
                job.what = What::Script(script.into(), arguments.cloned().collect());
                return Ok(job);
            }
        }
    }
    Err("no script".into())
}

fn number(option: &str, word: &str, least: u32) -> Result<u32, String> {
    let number = word.parse().ok().filter(|number| *number >= least);
    number.ok_or_else(|| format!("{option} {word}: a number from {least}"))
}

/// Runs the command line; returns the exit status.
pub fn main(root: &Path, arguments: &[String]) -> u8 {
    if arguments.iter().any(|word| matches!(word.as_str(), "--help" | "-h")) {
        print!("{USAGE}");
        return 0;
    }
    if let [option, folder] = arguments
        && option == "--machine"
    {
        return machine::main(root, Path::new(folder));
    }
    let job = match parse(arguments, Choice::usual()) {
        Ok(job) => job,
        Err(error) => {
            eprintln!("guest: {error}\n\n{USAGE}");
            return 2;
        }
    };
    run(root, &job).unwrap_or_else(|error| {
        eprintln!("guest: {error}");
        1
    })
}

fn run(root: &Path, job: &Job) -> Result<u8, String> {
    let root = at(root, "finding", root.canonicalize())?;
    let cache = cache(&root)?;
    if job.what == What::List {
        return list(&root, &cache);
    }
    let suite = if let What::Suite(_) = job.what { Some(suite(&root)?) } else { None };
    let product = if job.bare { None } else { Some(product(&root)?) };
    let kernel = kernel_of(&job.choice, &cache, job.update)?;
    let folder = job.out.clone().unwrap_or_else(|| cache.join("out"));
    if folder.join("console.log").exists() {
        at(&folder, "emptying", std::fs::remove_dir_all(&folder))?;
    }
    make_folder(&folder)?;
    let folder = at(&folder, "finding", folder.canonicalize())?;
    let tree = pack(job, product.as_deref(), suite.as_deref())?;
    let initrd = folder.join("initrd");
    write_initrd(&initrd, &kernel, &tree)?;
    let report = boot::run(&kernel, &initrd, &job.shape, &folder);
    at(&initrd, "removing", std::fs::remove_file(&initrd))?;
    let report = report?;
    eprint!("{}", report.text());
    let name = match &kernel {
        Kernel::Emulated { version, .. } => version.as_str(),
        Kernel::UserMode { .. } => "user-mode Linux",
    };
    let (status, seconds) = (report.status(), report.took.as_secs_f64());
    eprintln!("guest: {name}: status {status} after {seconds:.1} s; files and logs in {}", folder.display());
    Ok(status)
}

/// The directory of kernels and the emulator.
fn cache(root: &Path) -> Result<PathBuf, String> {
    let cache = std::env::var_os(CACHE).map_or_else(|| root.join("target/guest"), PathBuf::from);
    make_folder(&cache)?;
    at(&cache, "finding", cache.canonicalize())
}

/// Finds or fetches a kernel. Only one process at a time may fetch; closing the file releases the lock.
fn kernel_of(choice: &Choice, cache: &Path, update: bool) -> Result<Kernel, String> {
    let lock = cache.join("lock");
    let file = at(&lock, "making", File::create(&lock))?;
    at(&lock, "locking", file.lock())?;
    kernel::get(choice, cache, update)
}

/// The binary for jobs: the one named by the environment, otherwise a new one without optimisation.
fn product(root: &Path) -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("BLOCKYARD_BIN") {
        return Ok(named.into());
    }
    build(root, &["--package", "blockyard"])?;
    Ok(target(root).join("debug/blockyard"))
}

/// The program with the tests.
fn suite(root: &Path) -> Result<PathBuf, String> {
    // As part of the workspace: with `--package` its dependencies would have other features, and be compiled
    // again.
    build(root, &["--workspace", "--bin", "guest"])?;
    Ok(target(root).join("debug/guest"))
}

fn build(root: &Path, what: &[&str]) -> Result<(), String> {
    let mut build = Command::new("cargo");
    build.args(["build", "--quiet", "--locked"]).args(what).current_dir(root);
    let status = build.status().map_err(|error| format!("starting cargo failed: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo build {} failed", what.join(" "))) }
}

fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// The guest's system with its job.
fn pack(job: &Job, product: Option<&Path>, suite: Option<&Path>) -> Result<Tree, String> {
    let mut tree = userland::pack()?;
    if let Some(product) = product {
        userland::program(&mut tree, "blockyard", product)?;
    }
    if let Some(suite) = suite {
        userland::program(&mut tree, "guest", suite)?;
    }
    for path in &job.with {
        let name = path.file_name().ok_or_else(|| format!("--with {}: not a file", path.display()))?;
        let name = name.to_string_lossy();
        if is_program(path)? {
            userland::program(&mut tree, &name, path)?;
        } else {
            tree.copy(&format!("job/{name}"), path)?;
        }
    }
    let line = match &job.what {
        What::Script(script, arguments) => {
            let bytes = at(script, "reading", std::fs::read(script))?;
            tree.bytes("job/script", 0o755, bytes);
            quoted(std::iter::once("./script").chain(arguments.iter().map(String::as_str)))
        }
        What::Command(words) => quoted(words.iter().map(String::as_str)),
        What::Suite(words) => quoted(std::iter::once("guest").chain(words.iter().map(String::as_str))),
        What::Shell | What::List => "sh -i".into(),
    };
    tree.bytes(
        "job/run",
        0o755,
        format!("#!/bin/sh\nexport BLOCKYARD_BIN=/usr/bin/blockyard\nexec {line}\n"),
    );
    Ok(tree)
}

fn is_program(path: &Path) -> Result<bool, String> {
    let bytes = at(path, "reading", std::fs::read(path))?;
    Ok(bytes.starts_with(b"\x7fELF"))
}

/// Quotes words for a shell.
fn quoted<'a>(words: impl Iterator<Item = &'a str>) -> String {
    words.map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect::<Vec<_>>().join(" ")
}

/// Writes the initramfs: the archive of modules, followed by the archive of everything else.
pub(crate) fn write_initrd(path: &Path, kernel: &Kernel, tree: &Tree) -> Result<(), String> {
    let mut file = std::io::BufWriter::new(at(path, "making", File::create(path))?);
    if let Kernel::Emulated { modules, .. } = kernel {
        let mut modules_file = at(modules, "opening", File::open(modules))?;
        at(path, "writing", std::io::copy(&mut modules_file, &mut file))?;
    }
    at(path, "writing", tree.write(&mut file))?;
    at(path, "writing", file.flush())
}

/// Prints the kernels in the cache, and the tests.
fn list(root: &Path, cache: &Path) -> Result<u8, String> {
    for word in ["newest", "older"] {
        let known = std::fs::read_to_string(cache.join(format!("chosen-{word}")));
        println!("{word:8} {}", known.as_deref().unwrap_or("not fetched yet"));
    }
    for entry in std::fs::read_dir(cache.join("kernels")).into_iter().flatten().flatten() {
        println!("kept     {}", entry.file_name().to_string_lossy());
    }
    println!(
        "uml      {}",
        std::env::var(kernel::USER_MODE).unwrap_or_else(|_| format!("{} is not set", kernel::USER_MODE))
    );
    print!("\n{}", process::output(Command::new(suite(root)?).arg("--list"))?);
    Ok(0)
}

/// Adds path and operation to an error of the file system.
pub(crate) fn at<T>(path: &Path, doing: &str, result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{doing} {} failed: {error}", path.display()))
}

pub(crate) fn make_folder(path: &Path) -> Result<(), String> {
    at(path, "making", std::fs::create_dir_all(path))
}

pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    at(path, "writing", std::fs::write(path, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Job, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        parse(&words, Choice::Newest)
    }

    #[test]
    fn options_come_before_the_script_and_arguments_after_it() {
        let job = parsed("--kernel older --cpus 4 --timeout 9 --with a --with b run.sh --kernel x")
            .expect("it is valid");
        assert_eq!((job.choice, job.shape.cpus), (Choice::Older, 4));
        assert_eq!(job.shape.limit, Duration::from_secs(9));
        assert_eq!(job.with, [PathBuf::from("a"), PathBuf::from("b")]);
        assert_eq!(job.what, What::Script("run.sh".into(), vec!["--kernel".into(), "x".into()]));
    }

    #[test]
    fn a_command_follows_two_dashes() {
        assert_eq!(
            parsed("-- uname -r").map(|job| job.what),
            Ok(What::Command(vec!["uname".into(), "-r".into()]))
        );
        assert!(parsed("--").is_err());
    }

    #[test]
    fn bad_options_are_refused() {
        for line in
            ["", "--kernel", "--kernel x s", "--cpus 0 s", "--timeout soon s", "--no-such s", "--with a"]
        {
            assert!(parsed(line).is_err(), "{line}");
        }
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        assert_eq!(quoted(["a b", "it's", "$x"].into_iter()), r"'a b' 'it'\''s' '$x'");
    }
}
