//! Device properties that front-ends rely on.

/// Properties of the device of a hardware queue that the front-ends depend on.
#[derive(Clone, Copy, Debug)]
pub struct DeviceFacts {
    /// Reads are zero-copy: they are answered from the device's memory and need no buffer.
    pub zero_copy_reads: bool,
    /// Reads may be zero-copy or not, so a buffer is passed as well. Set for a device created from a table,
    /// because its next table may not support zero-copy reads.
    pub allows_zero_copy: bool,
    /// Reads complete inline, into the given buffer.
    pub inline: bool,
    /// The device reports holes: large structured reads query them first.
    pub sparse: bool,
    /// No node accesses the data, so it may be in memory that only the kernel can access.
    pub opaque: bool,
    /// [`Op::CompareAndWrite`](block::Op::CompareAndWrite) reaches the backend, which may support it.
    pub compare_and_write: bool,
}
