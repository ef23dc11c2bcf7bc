//! Feature bits of virtio, virtio-blk and vhost-user that are used here.

use bitflags::bitflags;

bitflags! {
    /// Feature bits, as a device offers them and a driver acknowledges them.
    #[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
    pub struct Features: u64 {
        /// `VIRTIO_BLK_F_SIZE_MAX`: `size_max` limits the bytes of a segment.
        const SIZE_MAX = 1 << 1;
        /// `VIRTIO_BLK_F_SEG_MAX`: `seg_max` limits the segments of a request.
        const SEG_MAX = 1 << 2;
        /// `VIRTIO_BLK_F_GEOMETRY`: cylinders, heads and sectors.
        const GEOMETRY = 1 << 4;
        /// `VIRTIO_BLK_F_RO`: the device is read-only.
        const RO = 1 << 5;
        /// `VIRTIO_BLK_F_BLK_SIZE`: `blk_size` is the logical block size.
        const BLK_SIZE = 1 << 6;
        /// `VIRTIO_BLK_F_FLUSH`: flush requests.
        const FLUSH = 1 << 9;
        /// `VIRTIO_BLK_F_TOPOLOGY`: physical block size, minimum and optimal I/O size.
        const TOPOLOGY = 1 << 10;
        /// `VIRTIO_BLK_F_CONFIG_WCE`: the driver can switch between write-back and write-through.
        const CONFIG_WCE = 1 << 11;
        /// `VIRTIO_BLK_F_MQ`: several request queues.
        const MQ = 1 << 12;
        /// `VIRTIO_BLK_F_DISCARD`: discard requests.
        const DISCARD = 1 << 13;
        /// `VIRTIO_BLK_F_WRITE_ZEROES`: write zeroes requests.
        const WRITE_ZEROES = 1 << 14;
        /// `VIRTIO_BLK_F_ZONED`: a zoned device.
        const ZONED = 1 << 17;
        /// `VHOST_F_LOG_ALL`: the device logs all writes to guest memory (live migration).
        const LOG_ALL = 1 << 26;
        /// `VIRTIO_F_INDIRECT_DESC`: descriptors may refer to tables of descriptors.
        const INDIRECT_DESC = 1 << 28;
        /// `VIRTIO_F_EVENT_IDX`: each side specifies the index at which it wants to be notified.
        const EVENT_IDX = 1 << 29;
        /// `VHOST_USER_F_PROTOCOL_FEATURES`: the back-end has protocol features.
        const PROTOCOL_FEATURES = 1 << 30;
        /// `VIRTIO_F_VERSION_1`: not a legacy device.
        const VERSION_1 = 1 << 32;
        /// `VIRTIO_F_ACCESS_PLATFORM`: addresses go through an IOMMU.
        const ACCESS_PLATFORM = 1 << 33;
        /// `VIRTIO_F_RING_PACKED`: packed virtqueues.
        const RING_PACKED = 1 << 34;
        /// `VIRTIO_F_IN_ORDER`: the device uses buffers in the order in which they were made available.
        const IN_ORDER = 1 << 35;
        /// `VIRTIO_F_RING_RESET`: the driver can reset a queue.
        const RING_RESET = 1 << 40;
    }
}
