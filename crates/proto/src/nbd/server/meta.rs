//! Metadata contexts ("`NBD_OPT_LIST_META_CONTEXT`", "`NBD_OPT_SET_META_CONTEXT`").
//!
//! There is one: `base:allocation`.

use super::super::reply::Style;
use super::super::wire::{BASE_ALLOCATION, option, rep};
use super::Catalogue;
use super::handshake::Handshake;
use super::options::Fields;

/// The number that a selected `base:allocation` gets. Any would do; a client treats it as opaque.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;

/// What is asked for: contexts of an export, by queries.
struct Query<'a> {
    export: &'a str,
    /// Whether `base:allocation` is among what was asked for.
    allocation: bool,
}

/// Answers either option.
pub(super) fn handle(at: &mut Handshake, option: u32, data: &[u8], catalogue: &dyn Catalogue) {
    let select = option == option::SET_META_CONTEXT;
    if select {
        // It replaces what was selected before, "including when this command fails".
        at.context_of = None;
    }
    if at.style() == Style::Simple {
        // SHOULD (set), MAY (list) be refused with ERR_INVALID without structured replies.
        return at.refuse(option, rep::ERR_INVALID, "structured replies have to be negotiated first");
    }
    let Some(query) = parse(data, select) else {
        return at.refuse(option, rep::ERR_INVALID, "the option's data is malformed");
    };
    if catalogue.resolve(query.export).is_none() {
        return at.refuse(option, rep::ERR_UNKNOWN, "there is no export of that name");
    }
    if query.allocation {
        // The number is reserved in a list and SHOULD be 0 there.
        let id = if select { BASE_ALLOCATION_ID } else { 0 };
        at.reply(option, rep::META_CONTEXT, &[&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()]);
    }
    if select && query.allocation {
        at.context_of = Some(query.export.to_owned());
    }
    at.ack(option);
}

/// Reads either option's data; `None` when it is malformed, which MUST be refused with ERR_INVALID.
fn parse(data: &[u8], select: bool) -> Option<Query<'_>> {
    let mut fields = Fields(data);
    let export = fields.string()?;
    let count = fields.u32()?;
    // No queries: a list MUST tell of every context, a selection selects none.
    let mut allocation = count == 0 && !select;
    for _ in 0..count {
        let query = fields.string()?;
        // A query MUST have a namespace and a colon, and MAY be refused if it has not.
        let (namespace, leaf) = query.split_once(':')?;
        // Other namespaces MUST be ignored, and so are leaves of ours that are not known. An empty
        // leaf MUST be a wildcard in a list and MUST be ignored in a selection.
        allocation |= namespace == "base" && (leaf == "allocation" || (leaf.is_empty() && !select));
    }
    fields.end()?;
    Some(Query { export, allocation })
}
