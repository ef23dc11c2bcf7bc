//! Examples of every command, for its help and the manual page. Tests parse them.

type Examples = &'static [(&'static str, &'static str)];

/// The examples of a command: a line, and what it does.
pub(crate) fn of(command: &str) -> Examples {
    ALL.iter().find(|(name, _)| *name == command).map_or(&[], |(_, examples)| examples)
}

pub(crate) const ALL: &[(&str, Examples)] = &[
    (
        "serve",
        &[
            (
                "blockyard serve file:disk.img --nbd unix:/tmp/disk.sock",
                "an image for NBD clients, until Ctrl-C",
            ),
            (
                "blockyard serve ram:1G --nbd tcp::10809 --layer delay,read=5ms",
                "memory with slow reads, on every address",
            ),
            ("sudo blockyard serve file:vm.qcow2,format=qcow2 --ublk", "a qcow2 image as /dev/ublkbN"),
        ],
    ),
    (
        "add",
        &[
            (
                "sudo blockyard add file:disk.img",
                "the best block device that the kernel offers: ublk, else loop",
            ),
            (
                "blockyard add file:base.img --layer cow,file=my.cow,create",
                "an overlay; base.img stays as it is",
            ),
            (
                "blockyard add file:new.img,size=10G,create --fuse /mnt/new.raw",
                "a new image, shown as one file",
            ),
        ],
    ),
    (
        "up",
        &[
            (
                "blockyard up lab.toml",
                "all devices of a topology, until Ctrl-C (see blockyard help topology)",
            ),
            ("blockyard up lab.toml --web 127.0.0.1:7070", "also serve a web page that shows them live"),
            ("blockyard up --reload lab.toml", "apply the file to the process that serves it"),
        ],
    ),
    (
        "apply",
        &[
            ("blockyard apply lab.toml --dry-run", "what would be added, removed and changed, a line each"),
            ("blockyard apply lab.toml", "apply it without interrupting other devices"),
            ("blockyard check lab.toml && blockyard apply lab.toml", "only if the file is valid"),
        ],
    ),
    (
        "save",
        &[
            ("blockyard save", "all devices as a topology, on stdout"),
            ("blockyard save disk scratch -o lab.toml", "two devices, into a file"),
            ("blockyard save -o lab.toml && blockyard check lab.toml", "a file that up can start again"),
        ],
    ),
    (
        "exec-test",
        &[
            ("blockyard exec-test ./driver.py", "each demand of docs/exec.md; what it writes, it restores"),
            ("blockyard exec-test ./driver.py --json", "the results as JSON"),
            ("blockyard exec-test ./driver.py,ro", "as a read-only device starts it"),
        ],
    ),
    (
        "check",
        &[
            (
                "blockyard check lab.toml",
                "every problem of a topology, with its line; nothing is opened for writing",
            ),
            ("blockyard check lab.toml --json", "the problems as JSON"),
            ("blockyard check lab.toml && blockyard up lab.toml", "serve it only when it is sound"),
        ],
    ),
    (
        "list",
        &[
            ("blockyard list", "the devices of all processes of this user"),
            ("sudo blockyard list", "root's devices"),
            ("blockyard list --json | jq '.[].name'", "their names, for scripts"),
        ],
    ),
    (
        "show",
        &[
            ("blockyard show disk", "stack, size, exports, limits, queues"),
            ("blockyard show disk --json", "as JSON"),
            ("blockyard show disk --json | jq -r '.exports[].address'", "the addresses of its exports"),
        ],
    ),
    (
        "del",
        &[
            ("blockyard del disk", "finish its requests, flush, close"),
            ("blockyard del disk scratch", "several devices"),
            ("blockyard del --all", "every device of every process of this user"),
        ],
    ),
    (
        "recover",
        &[
            (
                "sudo blockyard recover disk",
                "a ublk device whose server died is served again, in the background",
            ),
            ("sudo blockyard recover --list", "the devices that wait for a server"),
            ("sudo blockyard recover disk --supervise", "restart its server if it dies again"),
            ("sudo blockyard recover disk --foreground", "until Ctrl-C"),
        ],
    ),
    (
        "upgrade",
        &[
            ("sudo blockyard upgrade disk", "this program serves it from now on; file systems stay mounted"),
            (
                "sudo ./blockyard-new upgrade disk # run by the new blockyard",
                "the program that is run takes over",
            ),
            ("sudo blockyard upgrade disk && blockyard show disk", "and show the process that serves it"),
        ],
    ),
    (
        "move",
        &[
            (
                "blockyard move disk file:/new/disk.img,size=20G,create",
                "move its contents to another file, while it is served",
            ),
            (
                "blockyard move disk nbd:nbd://host/disk --rate 50M",
                "move them to another host, with a limited rate",
            ),
            ("blockyard move disk --cancel", "cancel; the device keeps its previous contents"),
        ],
    ),
    (
        "resize",
        &[
            ("blockyard resize disk 20G", "grow its file and the device"),
            ("blockyard resize disk", "adopt the file's current size"),
            ("blockyard resize disk 5G --shrink", "shrink; data past the new end is lost"),
        ],
    ),
    (
        "commit",
        &[
            ("blockyard commit vm7", "merge its overlay into the device below, while it is served"),
            ("blockyard commit file:base.img --layer cow,file=vm7.cow", "while it is not served"),
            ("blockyard commit vm7 && blockyard show vm7", "and show that the overlay is empty"),
        ],
    ),
    (
        "set",
        &[
            ("blockyard set disk direct=on", "bypass the page cache from now on"),
            ("blockyard set disk scheduler=mq-deadline", "order and merge its requests"),
            ("blockyard set disk throttle.iops=2000", "set an option of a layer"),
        ],
    ),
    (
        "inflight",
        &[
            ("blockyard inflight disk", "the requests in flight: where each is held, for how long"),
            ("blockyard inflight disk --json", "as JSON"),
            ("blockyard set disk slow=20ms # then: blockyard inflight disk", "log slow requests as they end"),
        ],
    ),
    (
        "limits",
        &[
            ("blockyard limits disk", "every queue limit, and what is reported to hosts"),
            ("blockyard limits disk max_sectors=255 max_segments=128", "set limits while it is served"),
            ("blockyard limits disk --reset", "remove them: the limits of the device below apply"),
        ],
    ),
    (
        "suspend",
        &[
            ("blockyard suspend disk", "finish requests in flight, flush, hold back new ones"),
            ("blockyard suspend disk --noflush", "hold back requests at once, without a flush"),
            (
                "blockyard suspend disk && cp disk.img copy.img",
                "copy an image that does not change meanwhile",
            ),
        ],
    ),
    (
        "resume",
        &[
            ("blockyard resume disk", "requests that were held continue, in order"),
            ("blockyard table disk --load next.txt && blockyard resume disk", "resume with another table"),
            ("blockyard resume disk; blockyard status disk", "then show the status of its targets"),
        ],
    ),
    (
        "table",
        &[
            ("blockyard table disk", "the table in use (dmsetup table)"),
            ("blockyard table disk --load next.txt", "load another table, which resume activates"),
            ("blockyard table disk --inactive", "the inactive table"),
        ],
    ),
    (
        "status",
        &[
            ("blockyard status disk", "the state of each target (dmsetup status)"),
            ("blockyard status disk --json", "as JSON"),
            ("watch -n1 blockyard status mpath", "the paths of a multipath device"),
        ],
    ),
    (
        "message",
        &[
            (
                "blockyard message mpath 0 fail_path 8:16",
                "to the target that holds sector 0 (dmsetup message)",
            ),
            ("blockyard message dusty 0 addbadblock 60", "a bad block of a dust target"),
            ("blockyard message log 0 mark before-fsck", "a mark in a log of writes"),
        ],
    ),
    (
        "stat",
        &[
            ("blockyard stat -x disk 1", "iostat's extended columns, every second"),
            ("blockyard stat -l disk 0.5 10", "the time in each layer, ten reports, every half second"),
            ("blockyard stat -p --json mpath 1", "each path, a line of JSON every second"),
        ],
    ),
    (
        "top",
        &[
            ("blockyard top", "all devices, live; h lists the keys"),
            ("blockyard top disk scratch", "two of them"),
            ("blockyard top -b -n 10", "ten pages of text"),
        ],
    ),
    (
        "trace",
        &[
            ("blockyard trace disk", "blkparse's lines as requests happen, until Ctrl-C"),
            ("blockyard trace disk -o run -w 10", "ten seconds into run.blktrace.N, for blkparse and btt"),
            ("blockyard trace disk -o run --format perfetto", "for ui.perfetto.dev"),
        ],
    ),
    (
        "replay-log",
        &[
            ("blockyard replay-log --log writes.log -v", "list a log of writes"),
            ("blockyard replay-log --log writes.log --replay copy.img", "write all of it onto a copy"),
            ("blockyard replay-log --log writes.log --replay copy.img --next-flush", "up to the first flush"),
        ],
    ),
    (
        "crash",
        &[
            (
                "blockyard crash --fs ext4 --workload ./write.sh --check ./verify.sh",
                "mkfs, mount and run; then mount and check each state",
            ),
            (
                "blockyard crash --size 1M --workload './store $DEV' --check './verify $DEV'",
                "a store on a bare device, without root",
            ),
            ("blockyard crash --log writes.log --check 'xfs_repair -n $DEV'", "a log of dm-log-writes"),
            ("blockyard crash mark txn-17-acknowledged", "within a workload"),
            ("blockyard crash replay 7f3a-12", "attach the state of a finding"),
        ],
    ),
    (
        "copy",
        &[
            (
                "blockyard copy file:disk.img rbd:rbd/disk,size=10G,create",
                "import a disk into a Ceph cluster",
            ),
            (
                "blockyard copy nbd:nbd://host/disk file:disk.img,size=10G,create --verify",
                "export one, and compare",
            ),
            (
                "blockyard copy file:a.img file:/dev/sdb --rate 50M --resume a.copy",
                "limit the rate, and continue there after an interruption",
            ),
        ],
    ),
    (
        "losetup",
        &[
            ("sudo blockyard losetup -f --show disk.img", "a loop device over an image; prints its path"),
            ("sudo blockyard losetup -l", "our loop devices"),
            ("sudo blockyard losetup -j disk.img", "those of one file"),
        ],
    ),
    (
        "dmsetup",
        &[
            ("blockyard dmsetup create p --table '0 2048 linear disk.img 4096'", "a part of an image"),
            ("blockyard dmsetup status", "the state of all targets"),
            ("blockyard dmsetup targets", "the kinds of targets"),
        ],
    ),
    (
        "targetcli",
        &[
            ("blockyard targetcli /backstores/fileio create disk1 /var/disk1.img 10G", "a disk in a file"),
            ("blockyard targetcli ls", "all storage objects and targets"),
            ("blockyard targetcli restoreconfig /etc/target/saveconfig.json", "what LIO served"),
        ],
    ),
    (
        "completions",
        &[
            ("blockyard completions bash > /etc/bash_completion.d/blockyard", "for every user, with bash"),
            ("source <(blockyard completions zsh)", "for this shell, with zsh"),
            ("blockyard completions fish | source", "for this shell, with fish"),
        ],
    ),
    (
        "man",
        &[
            ("blockyard man | man -l -", "read the page"),
            ("blockyard man > /usr/share/man/man1/blockyard.1", "install it for every user"),
            ("blockyard man --folder man", "write a page for each command and topic"),
            ("blockyard man | groff -man -Tpdf > blockyard.pdf", "as a PDF file"),
        ],
    ),
    (
        "help",
        &[
            ("blockyard help", "all commands and topics"),
            ("blockyard help serve", "the options and examples of a command"),
            ("blockyard help stacks", "a topic"),
        ],
    ),
];
