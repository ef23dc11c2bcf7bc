//! LOG SENSE: SPC-6 section 6.11. Pages: 00h supported pages, 2Fh informational exceptions. There are no
//! pages for counters, because none are kept.

use crate::bytes::{be16, put};
use crate::dispatch::Call;
use crate::sense::Sense;
use crate::{Begin, Outcome};

const SUPPORTED: u8 = 0x00;
const EXCEPTIONS: u8 = 0x2F;
const ALL_SUBPAGES: u8 = 0xFF;

/// Executes LOG SENSE.
pub(crate) fn sense(call: &Call<'_>) -> Begin {
    let (code, subpage) = (call.cdb[2] & 0x3F, call.cdb[3]);
    let pointer = be16(&call.cdb, 5);
    let allocation = be16(&call.cdb, 7).into();
    let pages = [SUPPORTED, EXCEPTIONS];
    if !pages.contains(&code) {
        return Sense::cdb_field(2, Some(5)).into();
    }
    let body = match (code, subpage) {
        (SUPPORTED, 0) => pages.to_vec(),
        (SUPPORTED, ALL_SUBPAGES) => {
            let mut pairs: Vec<u8> = pages.iter().flat_map(|page| [*page, 0]).collect();
            pairs.splice(2..2, [SUPPORTED, ALL_SUBPAGES]);
            pairs
        }
        // There is no exception; the most recent temperature is FFh, unknown.
        (EXCEPTIONS, 0) => vec![0, 0, 0x03, 4, 0, 0, 0xFF, 0],
        _ => return Sense::cdb_field(3, None).into(),
    };
    // PARAMETER POINTER: no parameter code is above 0.
    if pointer != 0 {
        return Sense::cdb_field(5, None).into();
    }
    let mut data = vec![code, subpage, 0, 0];
    if subpage != 0 {
        // SPF: the page has a subpage code.
        data[0] |= 0x40;
    }
    let len = body.len() as u16;
    put(&mut data, 2, &len.to_be_bytes());
    data.extend_from_slice(&body);
    Outcome::with_data(data, allocation).into()
}
