//! Helpers for the tests of the NBD backend.

use proto::nbd::{BlockSizes, ExportId, Session, Style, TransmissionFlags};

/// Returns a session with a server that supports everything.
pub(super) fn session(size: u64) -> Session {
    Session {
        export: ExportId(0),
        name: "disk".to_owned(),
        size,
        flags: TransmissionFlags::all().difference(TransmissionFlags::READ_ONLY),
        style: Style::Structured,
        block_sizes: BlockSizes::DEFAULT,
        block_sizes_agreed: true,
        base_allocation: Some(1),
        tls: false,
    }
}
