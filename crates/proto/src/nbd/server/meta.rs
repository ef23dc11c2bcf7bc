//! Metadata contexts ("`NBD_OPT_LIST_META_CONTEXT`", "`NBD_OPT_SET_META_CONTEXT`"). The only one supported
//! is `base:allocation`.

use super::super::reply::Style;
use super::super::wire::{BASE_ALLOCATION, option, rep};
use super::Catalogue;
use super::handshake::Handshake;
use super::options::Fields;

/// Id of a selected `base:allocation`. The value is arbitrary; a client treats it as opaque.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;

/// The metadata contexts that a client queries for an export.
struct Query<'a> {
    export: &'a str,
    /// Whether `base:allocation` is among the queried contexts.
    allocation: bool,
}

/// Handles LIST_META_CONTEXT and SET_META_CONTEXT.
pub(super) fn handle(at: &mut Handshake, option: u32, data: &[u8], catalogue: &dyn Catalogue) {
    let select = option == option::SET_META_CONTEXT;
    if select {
        // A selection replaces the previous one, "including when this command fails".
        at.context_of = None;
    }
    if at.style() == Style::Simple {
        // Without structured replies, ERR_INVALID SHOULD (set) or MAY (list) be returned.
        return at.refuse(option, rep::ERR_INVALID, "structured replies have to be negotiated first");
    }
    let Some(query) = parse(data, select) else {
        return at.refuse(option, rep::ERR_INVALID, "the option's data is malformed");
    };
    if catalogue.resolve(query.export).is_none() {
        return at.refuse(option, rep::ERR_UNKNOWN, "there is no export of that name");
    }
    if query.allocation {
        // The id is reserved in a list and SHOULD be 0 there.
        let id = if select { BASE_ALLOCATION_ID } else { 0 };
        at.reply(option, rep::META_CONTEXT, &[&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()]);
    }
    if select && query.allocation {
        at.context_of = Some(query.export.to_owned());
    }
    at.ack(option);
}

/// Parses the data of both options. Returns `None` if it is malformed, which MUST be refused with
/// ERR_INVALID.
fn parse(data: &[u8], select: bool) -> Option<Query<'_>> {
    let mut fields = Fields(data);
    let export = fields.string()?;
    let count = fields.u32()?;
    // Without queries, a list MUST return every context, and a selection selects none.
    let mut allocation = count == 0 && !select;
    for _ in 0..count {
        let query = fields.string()?;
        // A query MUST have a namespace and a colon, and MAY be refused if it does not.
        let (namespace, leaf) = query.split_once(':')?;
        // Other namespaces MUST be ignored, and unknown leaves of `base` are ignored as well. An empty leaf
        // MUST be a wildcard in a list and MUST be ignored in a selection.
        allocation |= namespace == "base" && (leaf == "allocation" || (leaf.is_empty() && !select));
    }
    fields.end()?;
    Some(Query { export, allocation })
}
