//! `UBLK_F_*`: features of the driver and of devices.

use std::fmt;

/// A set of feature bits; some may be newer than this program.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Features(pub u64);

macro_rules! features {
    ($($(#[doc = $doc:literal])+ $name:ident = $bit:literal),+ $(,)?) => {
        impl Features {
            $($(#[doc = $doc])+ pub const $name: Features = Features(1 << $bit);)+

            /// All features of the header, with the kernel's name without its prefix.
            pub const NAMED: &'static [(Features, &'static str)] =
                &[$((Features::$name, stringify!($name))),+];
        }
    };
}

features! {
    /// Request buffers can be registered with an io_uring by command.
    SUPPORT_ZERO_COPY = 0,
    /// Commands complete through task work; for comparison.
    URING_CMD_COMP_IN_TASK = 1,
    /// The server provides the buffer for a write's data after it has seen the write.
    NEED_GET_DATA = 2,
    /// The block device survives its server: requests in flight fail, later ones wait.
    USER_RECOVERY = 3,
    /// With USER_RECOVERY: requests in flight are reissued to the next server.
    USER_RECOVERY_REISSUE = 4,
    /// The device can be created and used without privileges.
    UNPRIVILEGED_DEV = 5,
    /// Commands may have ioctl-encoded numbers.
    CMD_IOCTL_ENCODE = 6,
    /// The server copies data itself, with `pread` and `pwrite` on the character device.
    USER_COPY = 7,
    /// A zoned block device.
    ZONED = 8,
    /// With USER_RECOVERY: requests fail while there is no server.
    USER_RECOVERY_FAIL_IO = 9,
    /// The size can change while the device is live.
    UPDATE_SIZE = 10,
    /// Request buffers are registered with the server's io_uring automatically.
    AUTO_BUF_REG = 11,
    /// The server can be changed in a planned way (QUIESCE_DEV).
    QUIESCE = 12,
    /// Each tag may have its own thread.
    PER_IO_DAEMON = 13,
    /// Buffers may be registered from any thread.
    BUF_REG_OFF_DAEMON = 14,
    /// Commands for many tags at once.
    BATCH_IO = 15,
    /// Requests have integrity data.
    INTEGRITY = 16,
    /// TRY_STOP_DEV is supported: stop unless in use.
    SAFE_STOP_DEV = 17,
    /// Partitions are not scanned when the device is started.
    NO_AUTO_PART_SCAN = 18,
    /// Zero copy is supported for memory shared with clients.
    SHMEM_ZC = 19,
    /// The server sets the size of request descriptors; bytes beyond our size are padding so far.
    IO_DESC_SIZE = 20,
}

impl Features {
    /// The empty set.
    pub const NONE: Features = Features(0);

    /// All features of the header.
    pub const KNOWN: Features = {
        let mut all = 0;
        let mut i = 0;
        while i < Features::NAMED.len() {
            all |= Features::NAMED[i].0.0;
            i += 1;
        }
        Features(all)
    };

    /// Returns whether this set contains all features of `other`.
    pub const fn has(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the union of both sets.
    #[must_use]
    pub const fn with(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }

    /// Returns the difference: this set without the features of `other`.
    #[must_use]
    pub const fn without(self, other: Features) -> Features {
        Features(self.0 & !other.0)
    }

    /// Returns the intersection of both sets.
    #[must_use]
    pub const fn common(self, other: Features) -> Features {
        Features(self.0 & other.0)
    }

    /// Returns whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the names in order of their bits; unknown bits are `bit N`.
    pub fn names(self) -> Vec<String> {
        let name = |bit: u32| {
            let named = Features::NAMED.iter().find(|(feature, _)| feature.0 == 1 << bit);
            named.map_or_else(|| format!("bit {bit}"), |(_, name)| (*name).to_owned())
        };
        (0..u64::BITS).filter(|bit| self.0 & 1 << bit != 0).map(name).collect()
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().join(", "))
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Features({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_feature_is_reported_by_its_bit() {
        let features = Features::USER_COPY.with(Features(1 << 41));
        assert_eq!(features.to_string(), "USER_COPY, bit 41");
        assert_eq!(features.without(Features::KNOWN), Features(1 << 41));
    }

    #[test]
    fn every_feature_of_the_header_is_named_once() {
        assert_eq!(Features::KNOWN, Features((1 << 21) - 1));
        assert_eq!(Features::NAMED.len(), 21);
    }
}
