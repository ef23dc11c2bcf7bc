//! Requests of zoned devices in a virtqueue: reports, appends, and the statuses of requests that break a
//! zone's rules.
//!
//! The stack reports such a request as an I/O error, as the kernel's block layer does. The specification has
//! statuses of its own for it, so the virtqueue reads the state of the zone after a failure, and derives the
//! status from it ([`virtio::blk::failed_status_byte`]). Another request may have changed the zone in
//! between; the status is then that of its new state, and an error in any case.

use super::virtqueue::{Popped, TagSlot, Virtqueue};
use crate::fronts::Turn;
use block::{Bytes, Data, Op, Request, Segment, Status, Tag, Zone};
use queue::{Done, Ring};
use virtio::blk::{self, S_OK, Ticket, ZONE_DESCRIPTOR_LEN, ZoneRequest};
use virtio::memory::Span;

/// Most bytes of a report. A driver asks again for the zones behind it.
const REPORT_MAX: u32 = 1 << 20;

/// Memory of a zone report: a header, then a descriptor of each zone, in which the stack first stores a
/// record.
pub(super) struct Report;

impl Report {
    /// The part behind the header, for the records.
    pub(super) fn records(memory: Segment) -> Segment {
        memory.split_at(ZONE_DESCRIPTOR_LEN.min(memory.len)).1
    }

    /// Replaces the records by descriptors, and stores the header.
    #[cold]
    pub(super) fn encode(memory: Segment, turn: &mut Turn<'_>) {
        let report = turn.ring.bytes_mut(memory);
        let records = report[ZONE_DESCRIPTOR_LEN.min(memory.len) as usize..].to_vec();
        blk::encode_report(&records, report);
    }
}

impl Virtqueue {
    /// Starts a zone request. `place` is where an append reports its sector, and the room that the driver has
    /// for a report in bytes.
    #[cold]
    pub(super) fn zone_request(
        &mut self,
        tag: u16,
        mut ticket: Ticket,
        zone: ZoneRequest,
        (append_sector, room): (Span, u64),
        segments: &[Segment],
        turn: &mut Turn<'_>,
    ) -> Popped {
        match zone.op {
            Op::ZoneAppend => {
                self.append_sectors[usize::from(tag)] = append_sector;
                self.transfer(tag, ticket, zone.op, (zone.offset, zone.len), segments, turn)
            }
            Op::ReportZones => {
                let room = room.min(REPORT_MAX.into()) as u32;
                let len = room - room % ZONE_DESCRIPTOR_LEN;
                // The bytes behind the report are not written.
                ticket.written = ticket.written.min(len);
                let queue = turn.queues.touch(self.config.queue);
                let guest = queue.run(Tag(tag), segments).unwrap_or(Data::NONE);
                let req = Request::new(zone.op, zone.offset, zone.len);
                self.slots[usize::from(tag)] =
                    TagSlot { ticket, guest, len, is_read: true, req, ..TagSlot::FREE };
                self.free.pop();
                self.provide(tag, turn)
            }
            op => self.submit_bare(tag, ticket, Request::new(op, zone.offset, zone.len), turn),
        }
    }

    /// The stack has completed a request of a zoned device, and its data was moved.
    pub(super) fn zoned_done(&mut self, done: Done, turn: &mut Turn<'_>) {
        let tag = done.tag.0;
        let slot = self.slots[usize::from(tag)];
        if let Some(failure) = self.failures[usize::from(tag)].take() {
            return self.explained(tag, failure, done, turn);
        }
        match (slot.req.op, done.status) {
            (Op::ZoneAppend, Status::Ok) => {
                let sector = turn.queues.get_mut(self.config.queue).request(done.tag).offset.sectors().0;
                let place = self.append_sectors[usize::from(tag)];
                if let Some(active) = &self.active {
                    // The span was checked when the request was parsed.
                    let _ = active.ring.memory().write(place, &sector.to_le_bytes());
                }
                self.settle(tag, Status::Ok, S_OK, turn);
            }
            (Op::Read | Op::Write | Op::ZoneAppend, Status::IoError | Status::Invalid) => {
                self.explain(tag, done.status, turn);
            }
            (Op::Read | Op::Write | Op::ZoneAppend | Op::Flush, status) => {
                self.settle(tag, status, blk::status_byte(status), turn);
            }
            (_, status) => self.settle(tag, status, blk::zone_status_byte(status), turn),
        }
    }

    /// Reads the state of the zone in which a request failed.
    #[cold]
    fn explain(&mut self, tag: u16, failure: Status, turn: &mut Turn<'_>) {
        let Some(memory) = turn.ring.allocate(Zone::RECORD_LEN as u32) else {
            return self.settle(tag, failure, blk::status_byte(failure), turn);
        };
        let start = self.config.config.zone_start(self.slots[usize::from(tag)].req.offset);
        self.bounced += u64::from(memory.len);
        self.slots[usize::from(tag)].bounce = memory;
        self.failures[usize::from(tag)] = Some(failure);
        let mut report = Request::new(Op::ReportZones, start, Bytes(blk::SECTOR));
        report.data = Data::One(memory);
        self.submit_as(tag, report, turn);
    }

    /// The state of the zone is known, or cannot be read.
    #[cold]
    fn explained(&mut self, tag: u16, failure: Status, done: Done, turn: &mut Turn<'_>) {
        let slot = &mut self.slots[usize::from(tag)];
        let memory = std::mem::replace(&mut slot.bounce, Segment::EMPTY);
        let (op, sector) = (slot.req.op, slot.req.offset.sectors().0);
        let sectors = slot.req.len.sectors().0;
        let zone = done.status.is_ok().then(|| Zone::from_record(turn.ring.bytes(memory))).flatten();
        self.bounced -= u64::from(memory.len);
        turn.ring.free(memory);
        let byte = zone
            .map_or(blk::status_byte(failure), |zone| blk::failed_status_byte(op, sector, sectors, &zone));
        self.settle(tag, failure, byte, turn);
    }
}
