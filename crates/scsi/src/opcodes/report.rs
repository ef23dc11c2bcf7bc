//! REPORT SUPPORTED OPERATION CODES and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS: SPC-6 sections 6.36 and 6.37.

use super::{CDB_MAX, Row, TABLE};
use crate::bytes::{be16, be32, put};
use crate::dispatch::Call;
use crate::sense::Sense;
use crate::{Begin, Outcome};

/// Executes REPORT SUPPORTED OPERATION CODES.
pub(crate) fn supported_codes(call: &Call<'_>) -> Begin {
    let with_timeouts = call.cdb[2] & 0x80 != 0;
    let (options, opcode, action) = (call.cdb[2] & 0x07, call.cdb[3], be16(&call.cdb, 4));
    let allocation = be32(&call.cdb, 6);
    let supported = || TABLE.iter().filter(|row| row.is_supported(&call.facts));
    let of_opcode = || supported().filter(|row| row.opcode == opcode);
    let has_actions = of_opcode().any(|row| row.action.is_some());
    let row = match options {
        0 => {
            let mut data = vec![0; 4];
            supported().for_each(|row| describe(row, with_timeouts, &mut data));
            let len = data.len() as u32 - 4;
            put(&mut data, 0, &len.to_be_bytes());
            return Outcome::with_data(data, allocation).into();
        }
        // Option 1: one command without service actions.
        1 if has_actions => return Sense::cdb_field(2, Some(2)).into(),
        1 => of_opcode().next(),
        // Option 2: one command with service actions.
        2 if !has_actions && of_opcode().next().is_some() => return Sense::cdb_field(2, Some(2)).into(),
        2 => of_opcode().find(|row| row.action == Some(action)),
        // Option 3: either kind; the service action of a command without service actions is 0.
        3 => of_opcode().find(|row| row.action.unwrap_or(0) == action),
        _ => return Sense::cdb_field(2, Some(2)).into(),
    };
    Outcome::with_data(one(row, call, with_timeouts), allocation).into()
}

/// Appends a descriptor to the list of all commands.
fn describe(row: &Row, with_timeouts: bool, data: &mut Vec<u8>) {
    let mut descriptor = [0; 8];
    descriptor[0] = row.opcode;
    put(&mut descriptor, 2, &row.action.unwrap_or(0).to_be_bytes());
    descriptor[5] = u8::from(with_timeouts) << 1 | u8::from(row.action.is_some());
    put(&mut descriptor, 6, &(row.len() as u16).to_be_bytes());
    data.extend_from_slice(&descriptor);
    if with_timeouts {
        data.extend_from_slice(&timeouts(row));
    }
}

/// Returns the parameter data for one command; for `None` it says that the command is not supported.
fn one(row: Option<&Row>, call: &Call<'_>, with_timeouts: bool) -> Vec<u8> {
    let Some(row) = row else { return vec![0, 0x01, 0, 0] };
    let usage: [u8; CDB_MAX] = row.usage(&call.facts);
    let mut data = vec![0, u8::from(with_timeouts) << 7 | 0x03];
    data.extend_from_slice(&(row.len() as u16).to_be_bytes());
    data.extend_from_slice(&usage[..row.len()]);
    if with_timeouts {
        data.extend_from_slice(&timeouts(row));
    }
    data
}

/// Returns the command timeouts descriptor.
fn timeouts(row: &Row) -> [u8; 12] {
    let mut descriptor = [0; 12];
    put(&mut descriptor, 0, &[0x00, 0x0A]);
    put(&mut descriptor, 4, &row.seconds.0.to_be_bytes());
    put(&mut descriptor, 8, &row.seconds.1.to_be_bytes());
    descriptor
}

/// Executes REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS: returns those of RFC 7143 except CLEAR ACA.
pub(crate) fn supported_task_management(call: &Call<'_>) -> Begin {
    const ABORT_TASK: u8 = 0x80;
    const ABORT_TASK_SET: u8 = 0x40;
    const CLEAR_TASK_SET: u8 = 0x10;
    const UNIT_RESET: u8 = 0x08;
    const TARGET_RESET: u8 = 0x02;
    let extended = call.cdb[2] & 0x80 != 0;
    let allocation = be32(&call.cdb, 6);
    // SPC-6 section 6.37.2: an allocation length below four bytes is an error.
    if allocation < 4 {
        return Sense::cdb_field(6, None).into();
    }
    let mut data = vec![0; if extended { 16 } else { 4 }];
    data[0] = ABORT_TASK | ABORT_TASK_SET | CLEAR_TASK_SET | UNIT_RESET | TARGET_RESET;
    if extended {
        data[3] = 0x0C;
    }
    Outcome::with_data(data, allocation).into()
}
