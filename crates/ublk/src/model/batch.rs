//! Model of commands for many tags at once: one command passes tags to the driver, a second announces
//! requests, and a third commits them.

use super::device::{Device, Fetcher, Held};
use super::server::{CharDevice, RingId, ServerMemory, TagCommand, Taken, commit, fetch};
use crate::abi::{AutoBufReg, BatchFlags, BatchIo, ElementHeader, Features, IoCommand, IoOp};
use zerocopy::FromBytes;

/// Number of tags after which a fetch ends, as in the kernel when it runs out of buffers.
const TAGS_OF_A_FETCH: u32 = 50;

impl CharDevice {
    /// Sends a command for many tags from a thread; it completes with `token` on its ring. `elements` is
    /// the content of the memory that the command refers to. Fetched tags complete with result 0 and the
    /// token with the tag in its lower 32 bits.
    pub fn batch(
        &self,
        (ring, thread, token): (RingId, u64, u64),
        op: u32,
        batch: BatchIo,
        elements: &[u8],
        memory: &mut dyn ServerMemory,
    ) {
        self.change(|there| {
            let whose = TagCommand { ring, thread, token, command: IoCommand::default(), address: 0 };
            let known = usize::from(batch.q_id) < there.queues.len();
            let taken = match IoOp::from_code(op) {
                _ if !there.features().has(Features::BATCH_IO) => Taken::Ended(-libc::EOPNOTSUPP),
                Some(IoOp::FetchIoCmds) if known && batch.flags == 0 && batch.elem_bytes == 2 => {
                    take_fetch(there, batch.q_id.into(), Held { ring, token })
                }
                Some(IoOp::PrepIoCmds) if known => walk(there, &batch, elements, &whose, |there, asked| {
                    let done = fetch(there, asked.command.q_id.into(), asked);
                    settle(there, asked, &done);
                    done
                })
                .map_or_else(Taken::Ended, |_| Taken::Ended(0)),
                Some(IoOp::CommitIoCmds) if known => {
                    let done = walk(there, &batch, elements, &whose, |there, asked| {
                        let index = usize::from(asked.command.q_id);
                        if !there.queues[index].slots[usize::from(asked.command.tag)].with_server {
                            return Taken::Ended(-libc::EBUSY);
                        }
                        let done = commit(there, index, asked, memory);
                        settle(there, asked, &done);
                        done
                    });
                    done.map_or_else(Taken::Ended, |bytes| Taken::Ended(bytes as i32))
                }
                Some(IoOp::FetchIoCmds | IoOp::PrepIoCmds | IoOp::CommitIoCmds) => {
                    Taken::Ended(-libc::EINVAL)
                }
                _ => Taken::Ended(-libc::EOPNOTSUPP),
            };
            if let Taken::Ended(result) = taken {
                there.ended.push_back((ring, token, result));
            }
        });
    }
}

/// Adds a fetch command, through which requests are announced.
fn take_fetch(there: &mut Device, index: usize, held: Held) -> Taken {
    let queue = &mut there.queues[index];
    if queue.canceling || queue.force_abort {
        return Taken::Ended(-libc::ENODEV);
    }
    queue.fetchers.push_back(Fetcher { held, left: TAGS_OF_A_FETCH });
    Taken::Kept
}

/// Records that the driver owns a tag that has no command of its own.
fn settle(there: &mut Device, asked: &TagCommand, done: &Taken) {
    if matches!(done, Taken::Kept) {
        let slot = &mut there.queues[usize::from(asked.command.q_id)].slots[usize::from(asked.command.tag)];
        (slot.command, slot.by_batch, slot.thread) = (None, true, None);
    }
}

/// Calls `each` for every element until the driver refuses one. Returns the number of bytes done, or a
/// negative errno if it refused the first one.
fn walk(
    there: &mut Device,
    batch: &BatchIo,
    elements: &[u8],
    whose: &TagCommand,
    mut each: impl FnMut(&mut Device, &TagCommand) -> Taken,
) -> Result<usize, i32> {
    let flags = BatchFlags(batch.flags);
    let len = usize::from(flags.element_len());
    let copies = there.copies();
    let has = |flag: BatchFlags| flags.0 & flag.0 != 0;
    let refused = usize::from(batch.elem_bytes) != len
        || elements.len() != len * usize::from(batch.nr_elem)
        || has(BatchFlags::HAS_ZONE_LBA)
        || has(BatchFlags::HAS_BUF_ADDR) && !copies
        || has(BatchFlags::AUTO_BUF_REG_FALLBACK) && !there.features().has(Features::AUTO_BUF_REG);
    if refused {
        return Err(-libc::EINVAL);
    }
    let mut done = 0;
    for element in elements.chunks_exact(len) {
        let (header, rest) = ElementHeader::read_from_prefix(element).unwrap_or_default();
        let addr = rest.try_into().map_or(0, u64::from_ne_bytes);
        let flags = if has(BatchFlags::AUTO_BUF_REG_FALLBACK) { AutoBufReg::FALLBACK } else { 0 };
        let auto = AutoBufReg { index: header.buf_index, flags, ..AutoBufReg::default() };
        let command = IoCommand { q_id: batch.q_id, tag: header.tag, result: header.result, addr };
        let queue = &there.queues[usize::from(batch.q_id)];
        let taken = if usize::from(header.tag) < queue.slots.len() {
            each(there, &TagCommand { command, address: auto.to_sqe_addr(), ..*whose })
        } else {
            Taken::Ended(-libc::EINVAL)
        };
        match taken {
            Taken::Kept => done += len,
            Taken::Ended(errno) if done == 0 => return Err(errno),
            Taken::Ended(_) => break,
        }
    }
    Ok(done)
}
