//! SEND and RECEIVE DIAGNOSTIC RESULTS, READ BUFFER and WRITE BUFFER: SPC-6 sections 6.18, 6.19, 6.28, 6.42 and 6.49.

use crate::bytes::{be16, be24, be32, put};
use crate::dispatch::Call;
use crate::sense::Sense;
use crate::{Begin, Outcome};
use std::sync::PoisonError;

/// Bytes of the echo buffer.
const ECHO_LEN: usize = 4096;
/// Buffer modes.
const DATA: u8 = 0x02;
const DESCRIPTOR: u8 = 0x03;
const ECHO: u8 = 0x0A;
const ECHO_DESCRIPTOR: u8 = 0x0B;

/// Begins SEND DIAGNOSTIC, whose parameter list has not been received yet. All self-tests succeed at once.
pub(crate) fn send_begin(call: &Call<'_>) -> Begin {
    let (code, has_format, tests) = (call.cdb[1] >> 5, call.cdb[1] & 0x10 != 0, call.cdb[1] & 0x04 != 0);
    let len = be16(&call.cdb, 3);
    // A self-test, selected by SELFTEST or a self-test code, has no parameter list.
    if tests && (code != 0 || len != 0) || code != 0 && len != 0 {
        return Sense::cdb_field(3, None).into();
    }
    if matches!(code, 3 | 7) {
        return Sense::cdb_field(1, Some(7)).into();
    }
    match (len, has_format) {
        (0, _) => Outcome::good(0).into(),
        (_, false) => Sense::cdb_field(1, Some(4)).into(),
        _ => call.parameters(len.into()),
    }
}

/// Continues SEND DIAGNOSTIC with a page. The only page allowed requests the supported pages, which RECEIVE
/// DIAGNOSTIC RESULTS returns.
pub(crate) fn send(_: &Call<'_>, list: &[u8]) -> Begin {
    match list {
        [0, _, 0, 0] => Outcome::good(4).into(),
        [0, ..] => Sense::PARAMETER_LIST_LENGTH.into(),
        _ => Sense::parameter_field(0, None).into(),
    }
}

/// Executes RECEIVE DIAGNOSTIC RESULTS: returns page 00h, the supported pages.
pub(crate) fn receive(call: &Call<'_>) -> Begin {
    let is_page_valid = call.cdb[1] & 0x01 != 0;
    if is_page_valid && call.cdb[2] != 0 {
        return Sense::cdb_field(2, None).into();
    }
    Outcome::with_data(vec![0, 0, 0, 1, 0], be16(&call.cdb, 3).into()).into()
}

/// Executes READ BUFFER (10) on the echo buffer, of which each nexus has its own.
pub(crate) fn read_buffer(call: &Call<'_>) -> Begin {
    let (mode, id, offset, allocation) =
        (call.cdb[1] & 0x1F, call.cdb[2], be24(&call.cdb, 3) as usize, be24(&call.cdb, 6));
    if id != 0 {
        return Sense::cdb_field(2, None).into();
    }
    let echo = call.nexus.echo.lock().unwrap_or_else(PoisonError::into_inner);
    let data = match mode {
        // The buffer as the initiator wrote it, padded with zeroes.
        DATA => match offset {
            0..=ECHO_LEN => {
                let mut data = vec![0; ECHO_LEN - offset];
                put(&mut data, 0, echo.get(offset..).unwrap_or_default());
                data
            }
            _ => return Sense::cdb_field(3, None).into(),
        },
        DESCRIPTOR => {
            // Offset boundary 0: any byte offset is valid.
            let mut data = vec![0; 4];
            put(&mut data, 1, &(ECHO_LEN as u32).to_be_bytes()[1..]);
            data
        }
        // COMMAND SEQUENCE ERROR: nothing was written to the echo buffer.
        ECHO if echo.is_empty() => return Sense::new(crate::sense::Key::IllegalRequest, 0x2C, 0x00).into(),
        ECHO => echo.clone(),
        // EBOS is 0; the rest is the capacity.
        ECHO_DESCRIPTOR => (ECHO_LEN as u32).to_be_bytes().to_vec(),
        _ => return Sense::cdb_field(1, Some(4)).into(),
    };
    Outcome::with_data(data, allocation).into()
}

/// Begins WRITE BUFFER to the echo buffer. The data has not been received yet.
pub(crate) fn write_buffer_begin(call: &Call<'_>) -> Begin {
    let (mode, id, offset, len) =
        (call.cdb[1] & 0x1F, call.cdb[2], be24(&call.cdb, 3) as usize, be24(&call.cdb, 6));
    if !matches!(mode, DATA | ECHO) {
        return Sense::cdb_field(1, Some(4)).into();
    }
    if id != 0 {
        return Sense::cdb_field(2, None).into();
    }
    if mode == ECHO && offset != 0 || offset > ECHO_LEN {
        return Sense::cdb_field(3, None).into();
    }
    if len as usize > ECHO_LEN - offset {
        return Sense::cdb_field(6, None).into();
    }
    call.parameters(len)
}

/// Continues WRITE BUFFER with its data.
pub(crate) fn write_buffer(call: &Call<'_>, list: &[u8]) -> Begin {
    let offset = (be32(&call.cdb, 2) & 0xFF_FFFF) as usize;
    let mut echo = call.nexus.echo.lock().unwrap_or_else(PoisonError::into_inner);
    if call.cdb[1] & 0x1F == ECHO {
        *echo = list.to_vec();
    } else {
        let end = (offset + list.len()).min(ECHO_LEN).max(echo.len());
        echo.resize(end, 0);
        put(&mut echo, offset, list);
    }
    Outcome::good(list.len() as u64).into()
}
