#!/usr/bin/env python3
# A disk in memory: blockyard serve 'exec:./memory.py 64M' (docs/exec.md).
import mmap, socket, struct, sys
READ, WRITE, FLUSH, DISCARD, WRITE_ZEROES = range(5)
CAN_FLUSH, CAN_FUA, CAN_DISCARD, CAN_ZERO, ENOSPC, EOPNOTSUPP = 2, 4, 8, 16, 28, 95

size = sys.argv[1] if len(sys.argv) > 1 else "64M"
disk = bytearray(int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]])

def answer(memory, op, length, offset, place):
    if offset + length > len(disk):
        return ENOSPC
    if op == READ:
        memory[place:place + length] = disk[offset:offset + length]
    elif op == WRITE:
        disk[offset:offset + length] = memory[place:place + length]
    elif op in (DISCARD, WRITE_ZEROES):
        disk[offset:offset + length] = bytes(length)
    elif op != FLUSH:
        return EOPNOTSUPP
    return 0

def serve(connection, memory):
    requests = connection.makefile("rb")
    while len(request := requests.read(32)) == 32:
        tag, op, flags, length, offset, place = struct.unpack("<QHHIQQ", request)
        error = answer(memory, op, length, offset, place)
        connection.sendall(struct.pack("<QII", tag, error, 0))

control = socket.socket(fileno=0)
magic, version = struct.unpack_from("<8sI", control.recv(64))
can = CAN_FLUSH | CAN_FUA | CAN_DISCARD | CAN_ZERO
control.send(struct.pack("<8sIIQIII12x", magic, 1, can, len(disk), 1, 0, 0))
while True:
    message, fds, _, _ = socket.recv_fds(control, 64, 2)
    if not message:
        break  # The device is closed.
    _, number, length = struct.unpack("<IIQ", message)
    with socket.socket(fileno=fds[0]) as connection, mmap.mmap(fds[1], length) as memory:
        serve(connection, memory)
