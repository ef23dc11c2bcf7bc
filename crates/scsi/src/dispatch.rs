//! The slow path of commands: checks in the order of SAM-6 and SPC-6, then the command's own module.
//!
//! Order: unit attention, operation code, access state, reservation, medium, fields of the CDB.

use crate::command::{BlockIo, Parameters, Session};
use crate::nexus::{Nexus, Restrictions};
use crate::opcodes::{self, CDB_MAX, Code, Medium};
use crate::sense::Sense;
use crate::unit::{Facts, LogicalUnit};
use crate::{
    Begin, Command, Outcome, capacity, copy, data, diagnostics, inquiry, log, mode, report_luns, reserve,
    sanitize, states, zones,
};
use block::{Flags, Op};
use std::sync::Arc;

/// A command that passed the checks.
pub(crate) struct Call<'a> {
    pub(crate) nexus: &'a Arc<Nexus>,
    pub(crate) session: &'a dyn Session,
    pub(crate) facts: Facts,
    /// The CDB, padded with zeroes.
    pub(crate) cdb: [u8; CDB_MAX],
    pub(crate) command: &'a Command<'a>,
    pub(crate) code: Code,
}

impl Call<'_> {
    pub(crate) fn unit(&self) -> &LogicalUnit {
        self.nexus.unit()
    }

    /// Returns whether the mapping of the LUN forbids writes.
    pub(crate) fn is_mapping_read_only(&self) -> bool {
        self.nexus.is_restricted(Restrictions::READ_ONLY)
    }

    /// Requests the parameter list, whose length is in the CDB. An initiator that announced less is
    /// refused, because a truncated list could mean something else.
    pub(crate) fn parameters(&self, len: u32) -> Begin {
        if len > self.command.data_out {
            return Outcome { wanted: len.into(), ..Sense::INVALID_TRANSFER.into() }.into();
        }
        Begin::Parameters(Parameters {
            len,
            nexus: self.nexus.clone(),
            cdb: self.cdb,
            data_in: self.command.data_in,
            data_out: self.command.data_out,
            attribute: self.command.attribute,
        })
    }

    /// Returns a flush of the whole unit.
    pub(crate) fn flush(&self) -> BlockIo {
        BlockIo {
            op: Op::Flush,
            offset: 0,
            len: 0,
            transfer: 0,
            flags: Flags::empty(),
            wanted: 0,
            block_shift: self.facts.media.block_shift() as u8,
            descriptor_sense: self.facts.modes.descriptor_sense,
        }
    }
}

/// Begins a command that does not take the fast path.
#[cold]
pub(crate) fn begin(nexus: &Arc<Nexus>, command: &Command<'_>, session: &dyn Session) -> Begin {
    finish(nexus, checked(nexus, command, session, true).map_or_else(Begin::from, |call| start(&call)))
}

/// Begins a command that waited for its parameter list.
pub(crate) fn continue_with(
    nexus: &Arc<Nexus>,
    command: &Command<'_>,
    session: &dyn Session,
    list: &[u8],
) -> Begin {
    // Unit attentions that were raised in the meantime are for the next command.
    finish(
        nexus,
        checked(nexus, command, session, false).map_or_else(Begin::from, |call| resume(&call, list)),
    )
}

/// Sets the format of sense data that leaves the crate.
fn finish(nexus: &Nexus, begin: Begin) -> Begin {
    match begin {
        Begin::Finished(outcome) => Begin::Finished(nexus.finish(outcome)),
        begin => begin,
    }
}

/// Checks a command before its own module processes it.
fn checked<'a>(
    nexus: &'a Arc<Nexus>,
    command: &'a Command<'a>,
    session: &'a dyn Session,
    reports_attention: bool,
) -> Result<Call<'a>, Outcome> {
    let facts = nexus.unit().facts(nexus.name().relative_port);
    let mut cdb = [0; CDB_MAX];
    crate::bytes::put(&mut cdb, 0, command.cdb);
    let row = opcodes::find(&cdb, &facts);
    let is_exempt =
        row.is_ok_and(|row| matches!(row.code, Code::Inquiry | Code::ReportLuns | Code::RequestSense));
    if reports_attention && !is_exempt && nexus.has_attention() {
        let clears = facts.modes.clears_reported_attention();
        if let Some(attention) = nexus.take_attention(clears) {
            return Err(attention.sense().into());
        }
    }
    let row = row?;
    // The length in a CDB of variable length is checked with its other fields.
    if opcodes::cdb_len(&cdb).is_none_or(|len| command.cdb.len() < len.min(row.len())) {
        return Err(Sense::INVALID_FIELD_IN_CDB.into());
    }
    let whole = &cdb[..row.len()];
    reserve::check_access_state(nexus, whole)?;
    nexus.unit().guards.sanitize.check(whole)?;
    reserve::check_reservations(nexus, whole)?;
    if row.medium != Medium::Unused && nexus.is_restricted(Restrictions::NO_MEDIUM) {
        return Err(Sense::NO_MEDIUM.into());
    }
    row.check(&cdb, &facts)?;
    let call = Call { nexus, session, facts, cdb, command, code: row.code };
    let is_protected = facts.is_write_protected() || call.is_mapping_read_only();
    if row.medium == Medium::Written && is_protected {
        return Err(Sense::WRITE_PROTECTED.into());
    }
    Ok(call)
}

fn start(call: &Call<'_>) -> Begin {
    match call.code {
        Code::TestUnitReady | Code::Rezero => Outcome::good(0).into(),
        Code::RequestSense => states::request_sense(call),
        Code::StartStopUnit => states::start_stop(call),
        Code::PreventAllow => states::prevent_allow(call),
        Code::Read6 | Code::Read10 | Code::Read12 | Code::Read16 => data::read(call),
        Code::Write6 | Code::Write10 | Code::Write12 | Code::Write16 | Code::WriteAtomic16 => {
            data::write(call)
        }
        Code::Seek6 | Code::Seek10 => data::seek(call),
        Code::Prefetch10 | Code::Prefetch16 => data::prefetch(call),
        Code::SynchronizeCache10 | Code::SynchronizeCache16 => data::synchronize(call),
        Code::Verify10 | Code::Verify12 | Code::Verify16 => data::verify(call),
        Code::WriteVerify10 | Code::WriteVerify12 | Code::WriteVerify16 => data::write_verify(call),
        Code::WriteSame10 | Code::WriteSame16 | Code::WriteSame32 => data::write_same(call),
        Code::CompareAndWrite => data::compare_and_write(call),
        Code::OrWrite => data::or_write(call),
        Code::Unmap => data::unmap_begin(call),
        Code::GetLbaStatus => data::lba_status(call),
        Code::ReadDefectData10 | Code::ReadDefectData12 => capacity::defects(call),
        Code::ReadCapacity10 => capacity::read10(call),
        Code::ReadCapacity16 => capacity::read16(call),
        Code::Inquiry => inquiry::inquiry(call),
        Code::ModeSense => mode::sense(call),
        Code::ModeSelect => mode::select_begin(call),
        Code::LogSense => log::sense(call),
        Code::ReportLuns => report_luns::report(call),
        Code::Reserve => reserve::reserve(call),
        Code::Release => reserve::release(call),
        Code::PersistentIn => reserve::persistent_in(call),
        Code::PersistentOut => reserve::persistent_out_begin(call),
        Code::ReportGroups => reserve::report_groups(call),
        Code::SetGroups => reserve::set_groups_begin(call),
        Code::ExtendedCopy => copy::commands::extended_copy_begin(call),
        Code::ReceiveCopyResults => copy::commands::receive_results(call),
        Code::Sanitize => sanitize::commands::sanitize_begin(call),
        Code::ReportZones => zones::report(call),
        Code::ManageZones => zones::manage(call),
        Code::ReportOpcodes => opcodes::supported_codes(call),
        Code::ReportTaskManagement => opcodes::supported_task_management(call),
        Code::ReportIdentifying => states::report_identifying(call),
        Code::SetIdentifying => states::set_identifying_begin(call),
        Code::SendDiagnostic => diagnostics::send_begin(call),
        Code::ReceiveDiagnostic => diagnostics::receive(call),
        Code::ReadBuffer => diagnostics::read_buffer(call),
        Code::WriteBuffer => diagnostics::write_buffer_begin(call),
    }
}

/// Continues a command whose parameter list [`start`] requested.
fn resume(call: &Call<'_>, list: &[u8]) -> Begin {
    match call.code {
        Code::ModeSelect => mode::select(call, list),
        Code::PersistentOut => reserve::persistent_out(call, list),
        Code::SetGroups => reserve::set_groups(call, list),
        Code::ExtendedCopy => copy::commands::extended_copy(call, list),
        Code::Sanitize => sanitize::commands::sanitize(call, list),
        Code::Unmap => data::unmap(call, list),
        Code::SetIdentifying => states::set_identifying(call, list),
        Code::WriteBuffer => diagnostics::write_buffer(call, list),
        Code::SendDiagnostic => diagnostics::send(call, list),
        _ => Sense::INVALID_FIELD_IN_CDB.into(),
    }
}
