//! SANITIZE, as a command of a unit.

use super::{begin, list_len};
use crate::bytes::be16;
use crate::dispatch::Call;
use crate::sense::Sense;
use crate::{Begin, Nexus};

/// Begins SANITIZE, whose parameter list has not been received yet.
pub(crate) fn sanitize_begin(call: &Call<'_>) -> Begin {
    match list_len(&call.cdb, &call.facts.media) {
        Ok(0) => sanitize(call, &[]),
        Ok(len) => call.parameters(len),
        Err(sense) => sense.into(),
    }
}

/// Continues SANITIZE with its parameter list.
pub(crate) fn sanitize(call: &Call<'_>, list: &[u8]) -> Begin {
    if list.len() < be16(&call.cdb, 7).into() {
        return Sense::PARAMETER_LIST_LENGTH.into();
    }
    let changed = |nexus: &Nexus| nexus.unit().enforce();
    begin(call.nexus, &call.unit().guards.sanitize, &call.cdb, list, changed)
}
