//! libnbd from Python: features that other clients do not use, and every error of the protocol.

use blockyard_tests::on_both_engines;
use blockyard_tests::server::{Engine, Sandbox};
use blockyard_tests::tools::{missing_libnbd, python, skip};
use rustix::fs::OFlags;
use std::os::unix::fs::OpenOptionsExt;

on_both_engines!(
    requests_work_with_each_reply_style,
    flush_on_one_connection_covers_another,
    errors_are_those_of_the_protocol_document,
    many_requests_in_flight_return_the_right_data,
);

/// Returns a stack of each kind that stores data, of 16 MiB.
fn stacks(sandbox: &Sandbox) -> Vec<String> {
    let mut stacks = vec![format!("file:{}", sandbox.image("image", 16 << 20).display()), "ram:16M".into()];
    let direct = sandbox.image("direct", 16 << 20);
    let flags = OFlags::DIRECT.bits() as i32;
    match std::fs::File::options().read(true).custom_flags(flags).open(&direct) {
        Ok(_) => stacks.push(format!("file:{},direct=on", direct.display())),
        Err(why) => skip(format_args!("no direct I/O in /tmp: {why}; that part is left out")),
    }
    stacks
}

fn on_each(engine: Engine, program: &str) {
    if missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::new(engine);
    for stack in stacks(&sandbox) {
        let server = sandbox.serve(&stack, &[]);
        python(server.uri(), program);
    }
}

fn requests_work_with_each_reply_style(engine: Engine) {
    on_each(
        engine,
        "
for structured in [True, False]:
    h = nbd.NBD()
    h.set_request_structured_replies(structured)
    h.connect_uri(uri)
    assert h.get_structured_replies_negotiated() == structured
    assert h.get_size() == 16 << 20
    base = 1 << 20
    one = bytes(i * 7 & 255 for i in range(65536))
    h.pwrite(one, base)
    assert h.pread(65536, base) == one
    # Within a sector's neighbours nothing changes.
    h.pwrite(b'x' * 512, base + 512)
    assert h.pread(1536, base) == one[:512] + b'x' * 512 + one[1024:1536]
    h.pwrite(b'y' * 4096, base + 8192, nbd.CMD_FLAG_FUA)
    assert h.pread(4096, base + 8192) == b'y' * 4096
    h.zero(8192, base + 8192, nbd.CMD_FLAG_NO_HOLE)
    assert h.pread(16384, base + 8192) == bytes(8192) + one[16384:24576]
    h.zero(4096, base, nbd.CMD_FLAG_FUA)
    assert h.pread(8192, base) == bytes(4096) + one[4096:8192]
    # A fast zero is fast, or says that it would not be; then nothing has changed.
    h.pwrite(one, 2 << 20)
    try:
        h.zero(65536, 2 << 20, nbd.CMD_FLAG_FAST_ZERO)
        assert h.pread(65536, 2 << 20) == bytes(65536)
    except nbd.Error as error:
        assert error.errnum in [errno.ENOTSUP, errno.EOPNOTSUPP], error.string
        assert h.pread(65536, 2 << 20) == one
    h.pwrite(one, 3 << 20)
    h.trim(65536, 3 << 20, nbd.CMD_FLAG_FUA)
    assert h.pread(65536, 3 << 20) == bytes(65536)
    h.cache(1 << 20, 0)
    h.flush()
    # To the last byte, and not one further.
    h.pwrite(one[:512], (16 << 20) - 512)
    assert h.pread(512, (16 << 20) - 512) == one[:512]
    h.shutdown()
",
    );
}

fn flush_on_one_connection_covers_another(engine: Engine) {
    on_each(
        engine,
        "
writer, flusher, reader = nbd.NBD(), nbd.NBD(), nbd.NBD()
for each in [writer, flusher, reader]:
    each.connect_uri(uri)
    assert each.can_multi_conn()
for turn in range(100):
    data = bytes([turn + 1]) * 4096
    offset = turn * 37 % 4096 * 4096
    writer.pwrite(data, offset)
    # What one connection acknowledged another sees, flushed or not.
    assert reader.pread(4096, offset) == data
    flusher.flush()
    assert reader.pread(4096, offset) == data
    flusher.zero(4096, offset)
    assert reader.pread(4096, offset) == bytes(4096)
",
    );
}

fn errors_are_those_of_the_protocol_document(engine: Engine) {
    on_each(
        engine,
        "
# libnbd would refuse most of this itself.
h.set_strict_mode(0)
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.connect_uri(uri)
size = h.get_size()
fails(errno.ENOSPC, h.pwrite, bytes(512), size)
fails(errno.ENOSPC, h.pwrite, bytes(1024), size - 512)
fails(errno.ENOSPC, h.zero, 1024, size - 512)
fails(errno.ENOSPC, h.trim, 1024, size - 512)
fails(errno.ENOSPC, h.pwrite, bytes(512), (1 << 63) - 512)
fails(errno.EINVAL, h.pread, 512, size)
fails(errno.EINVAL, h.pread, 1024, size - 512)
fails(errno.EINVAL, h.pread, 512, (1 << 63) - 512)
fails(errno.EINVAL, h.cache, 1024, size - 512)
fails(errno.EINVAL, h.block_status, 1024, size - 512, lambda *args: 0)
# Flags that the command does not have.
fails(errno.EINVAL, h.pread, 512, 0, nbd.CMD_FLAG_NO_HOLE)
fails(errno.EINVAL, h.pwrite, bytes(512), 0, nbd.CMD_FLAG_REQ_ONE)
fails(errno.EINVAL, h.flush, nbd.CMD_FLAG_FAST_ZERO)
fails(errno.EINVAL, h.trim, 512, 0, nbd.CMD_FLAG_DF)
# And it is none the worse for it.
h.pwrite(b'z' * 512, 0)
assert h.pread(512, 0) == b'z' * 512
",
    );
}

#[test]
fn reads_beyond_the_maximum_fail_with_the_error_of_their_flags() {
    if missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:128M", &[]);
    python(
        server.uri(),
        "
h.set_strict_mode(0)
h.connect_uri(uri)
most = h.get_block_size(nbd.SIZE_MAXIMUM)
assert most == 32 << 20
assert h.pread(most, 0) == bytes(most)
assert h.pread(most, 512, nbd.CMD_FLAG_DF) == bytes(most)
fails(errno.EINVAL, h.pread, most + 512, 0)
fails(errno.EOVERFLOW, h.pread, most + 512, 0, nbd.CMD_FLAG_DF)
assert h.pread(512, 0) == bytes(512)
",
    );
}

#[test]
fn holes_are_sent_as_holes_unless_disallowed() {
    if missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::default();
    for stack in stacks(&sandbox) {
        let server = sandbox.serve(&stack, &[]);
        python(
            server.uri(),
            "
h.connect_uri(uri)
h.pwrite(b'd' * 65536, 1 << 20)

def chunks(flags):
    kinds = []
    def f(data, offset, status, error):
        kinds.append((status, offset, len(data)))
    data = h.pread_structured(4 << 20, 0, f, flags)
    assert data == bytes(1 << 20) + b'd' * 65536 + bytes((3 << 20) - 65536)
    return kinds

found = chunks(0)
holes = sum(length for status, offset, length in found if status == nbd.READ_HOLE)
data = sum(length for status, offset, length in found if status == nbd.READ_DATA)
assert holes == (4 << 20) - 65536 and data == 65536, found
assert chunks(nbd.CMD_FLAG_DF) == [(nbd.READ_DATA, 0, 4 << 20)]
",
        );
    }
}

#[test]
fn block_status_distinguishes_holes_from_data() {
    if missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::default();
    for stack in stacks(&sandbox) {
        let server = sandbox.serve(&stack, &[]);
        python(
            server.uri(),
            "
h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
h.connect_uri(uri)
assert h.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
size = h.get_size()
hole, one = nbd.STATE_HOLE | nbd.STATE_ZERO, 1 << 20
assert extents(h, size, 0) == [(size, hole)]
h.pwrite(b'd' * one, 2 * one)
wanted = [(2 * one, hole), (one, 0), (size - 3 * one, hole)]
assert extents(h, size, 0) == wanted, extents(h, size, 0)
# One descriptor, which does not reach past the request.
assert extents(h, one, 0, nbd.CMD_FLAG_REQ_ONE) == [(one, hole)]
assert extents(h, size, 0, nbd.CMD_FLAG_REQ_ONE) == wanted[:1]
assert extents(h, 3 * one, one, nbd.CMD_FLAG_REQ_ONE) == [(one, hole)]
# In the middle of an extent.
assert extents(h, one, 2 * one + 4096)[0] == (one - 4096, 0)
h.trim(one, 2 * one)
assert extents(h, size, 0) == [(size, hole)]
# Data again where a hole was.
h.pwrite(b'd' * one, 0)
assert extents(h, 2 * one, 0) == [(one, 0), (one, hole)]
",
        );
    }
}

#[test]
fn a_client_without_a_negotiated_context_has_none() {
    if missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &[]);
    python(
        server.uri(),
        "
h.add_meta_context('qemu:dirty-bitmap:x')
h.set_strict_mode(0)
h.connect_uri(uri)
assert not h.can_meta_context('qemu:dirty-bitmap:x')
fails(errno.EINVAL, h.block_status, 4096, 0, lambda *args: 0)
assert h.pread(512, 0) == bytes(512)
",
    );
}

#[test]
fn a_read_only_export_refuses_all_writing_commands() {
    if missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::default();
    let image = sandbox.noise("image", 1 << 20);
    let server = sandbox.serve(&format!("file:{},ro", image.display()), &[]);
    python(
        server.uri(),
        "
h.set_strict_mode(0)
h.connect_uri(uri)
assert h.is_read_only()
before = h.pread(1 << 20, 0)
fails(errno.EPERM, h.pwrite, bytes(512), 0)
fails(errno.EPERM, h.zero, 512, 0)
fails(errno.EPERM, h.trim, 512, 0)
h.flush()
assert h.pread(1 << 20, 0) == before
",
    );
}

#[test]
fn options_can_be_negotiated_one_by_one() {
    if missing_libnbd() {
        return;
    }
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &[]);
    python(
        server.uri(),
        "
h.set_opt_mode(True)
h.connect_uri(uri)
assert h.get_protocol() == 'newstyle-fixed'
names = []
assert h.opt_list(lambda name, description: names.append(name)) == 1
assert names == ['disk'], names
contexts = []
h.add_meta_context('base:')
h.opt_list_meta_context(lambda name: contexts.append(name))
assert contexts == ['base:allocation'], contexts
# The default export is the only one there is.
h.set_export_name('')
h.opt_info()
assert h.get_size() == 1 << 20
h.set_export_name('nonsense')
fails(errno.ENOENT, h.opt_info)
h.set_export_name('disk')
h.opt_go()
assert h.pread(512, 0) == bytes(512)
h.shutdown()

# Some leave without an export.
h = nbd.NBD()
h.set_opt_mode(True)
h.connect_uri(uri)
h.opt_abort()

# And some speak as in the days before GO.
h = nbd.NBD()
h.set_handshake_flags(0)
h.connect_uri(uri)
assert h.pread(512, 0) == bytes(512)
",
    );
}

fn many_requests_in_flight_return_the_right_data(engine: Engine) {
    on_each(
        engine,
        "
import random
random.seed(7)
h.connect_uri(uri)
block, count = 4096, 16 << 8
model, pending = {}, {}

def reap(limit):
    while len(pending) > limit:
        h.poll(-1)
        done = [cookie for cookie in pending if h.aio_command_completed(cookie)]
        for cookie in done:
            where, buffer = pending.pop(cookie)
            busy.discard(where)
            if buffer is not None:
                assert bytes(buffer.to_bytearray()) == model.get(where, bytes(block)), where

busy = set()
for turn in range(4000):
    reap(63)
    where = random.randrange(count)
    if where in busy:
        continue
    busy.add(where)
    if random.random() < 0.5:
        data = bytes([turn & 255, turn >> 8]) * (block // 2)
        model[where] = data
        cookie = h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), where * block)
        pending[cookie] = (where, None)
    else:
        buffer = nbd.Buffer(block)
        pending[h.aio_pread(buffer, where * block)] = (where, buffer)
reap(0)
for where, data in model.items():
    assert h.pread(block, where * block) == data
",
    );
}
