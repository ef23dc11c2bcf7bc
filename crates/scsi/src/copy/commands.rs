//! EXTENDED COPY and RECEIVE COPY RESULTS, as commands of a unit.

use super::{DESCRIPTORS_LEN_MAX, HEADER_LEN, begin, receive};
use crate::bytes::be32;
use crate::dispatch::Call;
use crate::sense::Sense;
use crate::{Begin, Outcome, reserve};

/// Begins EXTENDED COPY(LID1), whose parameter list has not been received yet.
pub(crate) fn extended_copy_begin(call: &Call<'_>) -> Begin {
    match be32(&call.cdb, 10) {
        // A missing parameter list is not an error: SPC-6 section 6.4.2.
        0 => Outcome::good(0).into(),
        len if len > DESCRIPTORS_LEN_MAX + HEADER_LEN => Sense::PARAMETER_LIST_LENGTH.into(),
        len => call.parameters(len),
    }
}

/// Continues EXTENDED COPY(LID1) with its parameter list.
pub(crate) fn extended_copy(call: &Call<'_>, list: &[u8]) -> Begin {
    if (list.len() as u64) < u64::from(be32(&call.cdb, 10)) {
        return Sense::PARAMETER_LIST_LENGTH.into();
    }
    // A zoned unit takes no part in copies, which write in any order.
    let find = |naa: &[u8]| {
        let found = call.session.find_unit(naa);
        found.filter(|nexus| nexus.unit().media().zones.is_none())
    };
    begin(call.nexus, list, &call.unit().guards.copies, &find, reserve::may_access)
}

/// Executes RECEIVE COPY RESULTS.
pub(crate) fn receive_results(call: &Call<'_>) -> Begin {
    match receive(&call.cdb, call.nexus.name(), &call.unit().guards.copies, &call.facts.media) {
        Ok((data, allocation)) => Outcome::with_data(data, allocation).into(),
        Err(sense) => sense.into(),
    }
}
