//! What front-ends rely on about a device.

/// Properties of the device of a hardware queue that the front-ends depend on.
#[derive(Clone, Copy, Debug)]
pub struct DeviceFacts {
    /// Reads are zero-copy: answered with memory of the device, so no buffer is needed.
    pub zero_copy_reads: bool,
    /// Reads may be zero-copy or not: a buffer is passed as well. For a device made from a table, whose next
    /// table may not support zero-copy reads.
    pub allows_zero_copy: bool,
    /// Reads complete inline, into the given buffer.
    pub inline: bool,
    /// The device knows holes: large structured reads query them first.
    pub sparse: bool,
    /// No node accesses data, so it may be in memory that only the kernel can access.
    pub opaque: bool,
}
