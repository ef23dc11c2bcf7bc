#!/usr/bin/python3
"""A small journal to try `blockyard crash` on, with six bugs that --bug enables.

A table has eight pages of 8 KiB. A transaction replaces one page: its record (sequence number, page number,
checksum, the page) goes to the next of four slots with one synchronous write, and is acknowledged. Before a
slot is used again, a checkpoint writes the pages of all records to the table, flushes, and advances the tail
in the first sector.

    journal.py write DEVICE [--bug NAME]     creates the journal, commits 12 transactions, acknowledges each
    journal.py verify DEVICE [--bug NAME]    recovers, and checks what the last mark acknowledged
    journal.py replace DIR [--bug NAME]      replaces a file 4 times by writing another and renaming it
    journal.py compare DIR                   checks that file

Bugs: missing-flush, fua-ignored, checksum-not-checked, torn-page, reused-sector; rename-without-fsync.
"""

import os
import struct
import sys
import zlib

PAGE, PAGES, SLOTS, UNIT, COUNT = 8192, 8, 4, 4096, 12
HEAD = struct.Struct("<4sIII")  # magic, sequence number, page number, checksum
SLOT_LEN = UNIT + PAGE
TABLE = UNIT + SLOTS * SLOT_LEN


def page_of(number):
    return bytes([number]) * PAGE


def record(number):
    page = page_of(number)
    sum_of = zlib.crc32(struct.pack("<II", number, number % PAGES) + page)
    return HEAD.pack(b"JRNL", number, number % PAGES, sum_of).ljust(UNIT, b"\0") + page


def slot_at(number):
    return UNIT + number % SLOTS * SLOT_LEN


def acknowledge(number):
    if "CRASH_FD" in os.environ:
        os.write(int(os.environ["CRASH_FD"]), b"%d\n" % number)


def set_tail(fd, tail):
    os.pwrite(fd, struct.pack("<4sI", b"TAIL", tail).ljust(UNIT, b"\0"), 0)


def write(device, bug):
    plain = os.open(device, os.O_RDWR)
    durable = os.open(device, os.O_RDWR | os.O_DSYNC)
    tail = 1
    set_tail(durable, tail)
    for number in range(1, COUNT + 1):
        if number - tail == SLOTS:  # all slots are in use: checkpoint
            for old in range(tail, number):
                os.pwrite(plain, page_of(old), TABLE + old % PAGES * PAGE)
            if bug != "missing-flush":
                os.fsync(plain)
            tail = number
            set_tail(plain if bug == "reused-sector" else durable, tail)
        if bug == "torn-page":  # the page is updated in place, before its record
            os.pwrite(durable, page_of(number), TABLE + number % PAGES * PAGE)
        os.pwrite(plain if bug == "fua-ignored" else durable, record(number), slot_at(number))
        acknowledge(number)


def verify(device, bug):
    fd = os.open(device, os.O_RDONLY)
    acknowledged = int(os.environ.get("CRASH_MARK") or 0)
    magic, tail = struct.unpack("<4sI", os.pread(fd, 8, 0))
    if magic != b"TAIL":
        return "no journal, but transaction %d was acknowledged" % acknowledged if acknowledged else None
    table = [os.pread(fd, PAGE, TABLE + page * PAGE) for page in range(PAGES)]
    last = tail - 1
    for number in range(tail, tail + SLOTS):
        slot = os.pread(fd, SLOT_LEN, slot_at(number))
        magic, sequence, page, sum_of = HEAD.unpack(slot[: HEAD.size])
        if magic != b"JRNL" or sequence != number:
            break
        content = slot[UNIT:]
        actual = zlib.crc32(struct.pack("<II", sequence, page) + content)
        if bug != "checksum-not-checked" and actual != sum_of:
            break
        table[page], last = content, number
    if last < acknowledged:
        return "transaction %d was acknowledged, but recovery ended at %d" % (acknowledged, last)
    for page, content in enumerate(table):
        newest = max((n for n in range(1, last + 1) if n % PAGES == page), default=0)
        expected = [page_of(newest)]
        if bug == "torn-page":  # a page in place may be newer than its record
            expected.append(page_of(newest + PAGES if newest else page or PAGES))
        if content not in expected:
            return "page %d: has %s, and not %d" % (page, sorted(set(content)), newest)
    return None


def replace(directory, bug):
    folder = os.open(directory, os.O_RDONLY)
    for number in range(1, 5):
        new = os.path.join(directory, "new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, b"%d\n" % number * 1000)
        os.fsync(fd)
        os.close(fd)
        os.rename(new, os.path.join(directory, "file"))
        if bug != "rename-without-fsync":
            os.fsync(folder)
        acknowledge(number)


def compare(directory):
    acknowledged = int(os.environ.get("CRASH_MARK") or 0)
    try:
        with open(os.path.join(directory, "file"), "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return "the file is missing, but %d was acknowledged" % acknowledged if acknowledged else None
    if lines != [lines[0]] * 1000 + [b""]:
        return "the file is damaged"
    if int(lines[0]) < acknowledged:
        return "%d was acknowledged, but the file has %d" % (acknowledged, int(lines[0]))
    return None


def main():
    bugs = ["missing-flush", "fua-ignored", "checksum-not-checked", "torn-page", "reused-sector"]
    bugs += ["rename-without-fsync"]
    words = sys.argv[1:]
    bug = None
    if len(words) == 4 and words[2] == "--bug" and words[3] in bugs:
        bug = words[3]
    elif len(words) != 2:
        sys.exit(__doc__)
    commands = {"write": write, "verify": verify, "replace": replace, "compare": lambda at, _: compare(at)}
    if words[0] not in commands:
        sys.exit(__doc__)
    wrong = commands[words[0]](words[1], bug)
    if wrong:
        print(wrong)
        sys.exit(1)


main()
