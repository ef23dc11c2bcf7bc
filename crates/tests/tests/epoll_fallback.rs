//! Where io_uring is forbidden, as in many containers, the server uses epoll with the same results, and
//! reports that.
//!
//! The refusal is real: a seccomp filter answers `io_uring_setup` with EPERM, as container runtimes do.

use std::process::Command;

/// Forbids `io_uring_setup` (425 on every architecture) to itself, then executes the program in its
/// arguments.
const FORBID: &str = r#"
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def code(op, jump_true, jump_false, k):
    return struct.pack("HBBI", op, jump_true, jump_false, k)
EPERM = 1
program = (code(0x20, 0, 0, 0)                      # load the number of the system call
           + code(0x15, 0, 1, 425)                  # if it is io_uring_setup
           + code(0x06, 0, 0, 0x00050000 | EPERM)   # answer EPERM
           + code(0x06, 0, 0, 0x7fff0000))          # else allow it
instructions = ctypes.create_string_buffer(program, len(program))
class Filter(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
filter = Filter(4, ctypes.cast(instructions, ctypes.c_void_p))
if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter)):
    sys.exit("seccomp: " + os.strerror(ctypes.get_errno()))
os.execv(sys.argv[1], sys.argv[1:])
"#;

fn run_forbidden(run: &std::path::Path, arguments: &[&str]) -> (i32, String) {
    let binary = blockyard_tests::server::binary();
    let output = Command::new("/usr/bin/python3")
        .args(["-c", FORBID])
        .arg(binary)
        .args(arguments)
        .env("BLOCKYARD_RUN", run)
        .env_remove("BLOCKYARD_RING")
        .output()
        .expect("python3 runs");
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code().unwrap_or(-1), text)
}

#[test]
fn a_server_without_io_uring_uses_epoll_and_reports_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let run = directory.path().join("run");
    let socket = directory.path().join("s");
    let address = format!("unix:{}", socket.display());
    let (status, printed) = run_forbidden(&run, &["add", "ram:64M", "--name", "held", "--nbd", &address]);
    assert_eq!(status, 0, "{printed}");
    let uri = printed.split_whitespace().last().expect("a URI").to_owned();

    let info = Command::new("nbdinfo").args(["--size", &uri]).output().expect("nbdinfo runs");
    assert_eq!(String::from_utf8_lossy(&info.stdout).trim(), (64 << 20).to_string());
    let pattern = format!("--uri={uri}");
    let fio = [
        "--name=v",
        "--ioengine=nbd",
        "--rw=randwrite",
        "--bs=4k",
        "--iodepth=8",
        "--size=4M",
        "--verify_state_save=0",
    ];
    let verified =
        Command::new("fio").args(fio).args(["--verify=crc32c", &pattern]).output().expect("fio runs");
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));

    let (status, shown) = run_forbidden(&run, &["show", "held"]);
    let (deleted, _) = run_forbidden(&run, &["del", "held"]);
    assert_eq!((status, deleted), (0, 0), "{shown}");
    assert!(shown.contains("epoll, io_uring is forbidden here"), "show does not say why:\n{shown}");
}
