//! Our multipath compared with the kernel's, by dmsetup: status before and after requests, messages, failed
//! paths and switched groups.

use super::disk::tool;
use super::dm::{Loops, prepare};
use super::dmsetup::compare;
use super::{Done, Skip, Test, soak, test};

/// The tests of this module.
pub const TESTS: &[Test] = &[
    test("dm/multipath", "status, table, messages and events of multipath are the kernel's", few),
    soak("dm/multipath_all", "all selectors, queue modes and invalid messages", all),
];

/// Commands with two groups, as in mptest.
const FEW: &[&[&str]] = &[
    &[
        "create",
        "q",
        "--table",
        "0 4096 multipath 4 queue_if_no_path retain_attached_hw_handler queue_mode mq 0 2 1 \
         queue-length 0 1 1 {0} 1 service-time 0 2 2 {1} 1 5 {2} 1 7",
    ],
    &["table", "q"],
    &["status", "q"],
    &["message", "q", "0", "fail_path", "{0}"],
    &["io", "q"],
    &["status", "q"],
    &["message", "q", "0", "switch_group", "1"],
    &["status", "q"],
    &["remove", "q"],
];

/// More commands, for long runs.
const MORE: &[&[&str]] = &[
    &[
        "create",
        "q",
        "--table",
        "0 4096 multipath 1 queue_if_no_path 0 2 1 queue-length 0 1 1 {0} 1 service-time 0 2 2 {1} 1 5 {2} 1 7",
    ],
    &["io", "q"],
    &["status", "q"],
    &["message", "q", "0", "fail_path", "{0}"],
    &["io", "q"],
    &["message", "q", "0", "reinstate_path", "{0}"],
    &["message", "q", "0", "switch_group", "1"],
    &["io", "q"],
    &["message", "q", "0", "disable_group", "1"],
    &["status", "q"],
    &["io", "q"],
    &["status", "q"],
    &["message", "q", "0", "fail_if_no_path"],
    &["table", "q"],
    &["info", "-c", "-o", "name,attr,events,segments", "q"],
    &["remove", "q"],
    &["create", "r", "--table", "0 4096 multipath 0 0 1 1 round-robin 0 2 1 {0} 1 {1} 1"],
    &["table", "r"],
    &["status", "r"],
    &["io", "r"],
    &["status", "r"],
    &["message", "r", "0", "FAIL_PATH", "{0}"],
    &["message", "r", "0", "fail_path", "{0}"],
    &["info", "-c", "-o", "name,events", "r"],
    &["io", "r"],
    &["message", "r", "0", "fail_path", "{1}"],
    &["status", "r"],
    &["io", "r"],
    &["status", "r"],
    &["message", "r", "0", "reinstate_path", "{0}"],
    &["message", "r", "0", "reinstate_path", "{0}"],
    &["message", "r", "0", "reinstate_path", "{1}"],
    &["io", "r"],
    &["status", "r"],
    &["info", "-c", "-o", "name,events", "r"],
    &["message", "r", "0", "disable_group", "1"],
    &["message", "r", "0", "disable_group", "1"],
    &["status", "r"],
    &["io", "r"],
    &["status", "r"],
    &["message", "r", "0", "enable_group", "1"],
    &["info", "-c", "-o", "name,events", "r"],
    &["message", "r", "0", "disable_group", "0"],
    &["message", "r", "0", "disable_group", "2"],
    &["message", "r", "0", "disable_group", "1x"],
    &["message", "r", "0", "disable_group"],
    &["message", "r", "0", "switch_group", "0"],
    &["message", "r", "0", "bogus", "1"],
    &["message", "r", "0", "bogus"],
    &["message", "r", "0", "a", "b", "c"],
    &["message", "r", "0", "fail_path", "{2}"],
    &["message", "r", "0", "fail_path", "/nosuch"],
    &["message", "r", "0", "Queue_If_No_Path"],
    &["table", "r"],
    // Our suspension flushes, and a request selects the group.
    &["io", "r"],
    &["suspend", "r"],
    &["table", "r"],
    &["message", "r", "0", "fail_if_no_path"],
    &["status", "r"],
    &["resume", "r"],
    &["table", "r"],
    &["suspend", "--noflush", "r"],
    &["table", "r"],
    &["resume", "r"],
    &["reload", "r", "--table", "0 4096 error"],
    &["suspend", "--noflush", "--nolockfs", "r"],
    &["resume", "r"],
    &["table", "r"],
    &["io", "r"],
    &["remove", "r"],
    &[
        "create",
        "b",
        "--table",
        "0 4096 multipath 7 queue_mode bio pg_init_retries 5 pg_init_delay_msecs 0 queue_if_no_path 0 2 2 \
         queue-length 0 1 0 {0} service-time 0 1 1 {1} 1",
    ],
    &["table", "b"],
    &["status", "b"],
    &["io", "b"],
    &["status", "b"],
    &["message", "b", "0", "switch_group", "1"],
    &["status", "b"],
    &["io", "b"],
    &["status", "b"],
    &["remove", "b"],
    &["create", "h", "--table", "0 4096 multipath 0 1 alua 1 1 round-robin 0 1 0 {0}"],
    &["table", "h"],
    &["status", "h"],
    &["remove", "h"],
    &["create", "n", "--table", "0 4096 multipath 0 0 0 0"],
    &["table", "n"],
    &["status", "n"],
    &["io", "n"],
    &["status", "n"],
    &["remove", "n"],
    &["create", "two", "--table", "0 8 multipath 0 0 0 0\n8 8 zero"],
    &["create", "i", "--table", "0 4096 multipath 0 0 1 7 round-robin 0 1 0 {0}"],
    &["status", "i"],
    &["remove", "i"],
];

/// Commands for a selector that not all kernels have.
const HISTORICAL: &[&[&str]] = &[
    &[
        "create",
        "hst",
        "--table",
        "0 4096 multipath 0 0 2 1 historical-service-time 0 1 1 {0} 1 historical-service-time 2 512 3 1 0 {1}",
    ],
    &["table", "hst"],
    &["status", "hst"],
    &["remove", "hst"],
];

fn few() -> Done {
    let loops = prepare()?;
    if !loops.has("multipath") {
        return Err(Skip("this kernel has no target multipath".into()));
    }
    for selector in ["queue-length", "service-time"] {
        if !has_selector(&loops, selector) {
            return Err(Skip(format!("this kernel has no path selector {selector}")));
        }
    }
    drop(loops);
    compare(FEW.to_vec())
}

/// Returns whether this kernel has a path selector, for which it may have to load a module.
fn has_selector(loops: &Loops, name: &str) -> bool {
    let table = loops.table(&format!("0 4096 multipath 0 0 1 1 {name} 0 1 0 {{0}}"));
    let words = ["dmsetup", "create", "probe", "--noudevsync", "--noudevrules", "--table", &table];
    let is_made = tool(&words).status.success();
    if is_made {
        tool(&["dmsetup", "remove", "--noudevsync", "--retry", "probe"]).ok();
    }
    is_made
}

fn all() -> Done {
    few()?;
    let loops = prepare()?;
    let has = |name| has_selector(&loops, name);
    let (round_robin, historical) = (has("round-robin"), has("historical-service-time"));
    drop(loops);
    if !round_robin {
        return Err(Skip("this kernel has no path selector round-robin".into()));
    }
    compare(MORE.to_vec())?;
    if !historical {
        return Err(Skip("all else is as it should be; no path selector historical-service-time".into()));
    }
    compare(HISTORICAL.to_vec())
}
