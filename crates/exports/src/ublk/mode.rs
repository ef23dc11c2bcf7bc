//! Data modes: how the data of requests moves between kernel and stack, and how the best mode is chosen.

use ::ublk::Features;
use std::fmt;
use std::str::FromStr;

/// A data mode.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DataMode {
    /// The driver copies between a request and the buffer of its tag.
    Copy,
    /// The driver copies, but a buffer is provided for each request: once a write has arrived, or once a
    /// read is done, so that a read may be answered from memory of the stack.
    GetData,
    /// The server copies, by reading and writing the character device.
    UserCopy,
    /// Zero copy: a command registers the request's memory with the server's io_uring, and file operations
    /// use it.
    ZeroCopy,
    /// Zero copy, where the driver registers the memory itself. If it cannot, a command registers the memory.
    AutoZeroCopy,
}

impl DataMode {
    /// All modes.
    pub const ALL: [DataMode; 5] =
        [DataMode::Copy, DataMode::GetData, DataMode::UserCopy, DataMode::ZeroCopy, DataMode::AutoZeroCopy];

    /// Name of the mode on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DataMode::Copy => "copy",
            DataMode::GetData => "get-data",
            DataMode::UserCopy => "user-copy",
            DataMode::ZeroCopy => "zero-copy",
            DataMode::AutoZeroCopy => "auto-zero-copy",
        }
    }

    /// Returns the driver features that this mode requires.
    pub const fn features(self) -> Features {
        match self {
            DataMode::Copy => Features::NONE,
            DataMode::GetData => Features::NEED_GET_DATA,
            DataMode::UserCopy => Features::USER_COPY,
            DataMode::ZeroCopy => Features::SUPPORT_ZERO_COPY,
            // Memory that is not registered automatically is registered by command.
            DataMode::AutoZeroCopy => Features(Features::AUTO_BUF_REG.0 | Features::SUPPORT_ZERO_COPY.0),
        }
    }

    /// Returns whether the stack gets memory that only the kernel can access.
    pub const fn is_opaque(self) -> bool {
        matches!(self, DataMode::ZeroCopy | DataMode::AutoZeroCopy)
    }

    /// Returns whether the mode requires that the driver trusts the server, so that unprivileged devices
    /// cannot use it.
    pub const fn needs_privilege(self) -> bool {
        matches!(self, DataMode::UserCopy | DataMode::ZeroCopy | DataMode::AutoZeroCopy)
    }
}

impl fmt::Display for DataMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for a text that names no data mode.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is not a data mode (copy, get-data, user-copy, zero-copy or auto-zero-copy)")]
pub struct UnknownMode(String);

impl FromStr for DataMode {
    type Err = UnknownMode;

    fn from_str(word: &str) -> Result<DataMode, UnknownMode> {
        let known = DataMode::ALL.into_iter().find(|mode| mode.name() == word);
        known.ok_or_else(|| UnknownMode(word.to_owned()))
    }
}

/// Conditions on which the choice of a mode depends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Circumstances {
    /// Features of the driver.
    pub offered: Features,
    /// Whether the device is to be unprivileged.
    pub unprivileged: bool,
    /// Whether the device is to be zoned, for which the driver requires user copy.
    pub zoned: bool,
    /// Whether no node of the stack accesses data: see [`DeviceFacts::opaque`](crate::nbd::DeviceFacts).
    pub opaque: bool,
    /// Whether requests mostly complete inline, which needs private memory: copying is then cheaper than
    /// registration and a second round through the ring.
    pub inline: bool,
    /// Whether the buffer tables of the threads' io_urings have space for all tags of the device.
    pub has_room: bool,
}

/// A data mode, and the reason for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// The mode.
    pub mode: DataMode,
    /// The reason, for `blockyard show`.
    pub why: &'static str,
}

/// Reasons why a requested mode is not possible.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotPossible {
    /// The driver lacks these features.
    #[error("this kernel's ublk driver lacks {0:?} (omit the data mode to use the best one)")]
    Lacks(Features),
    /// The stack accesses data, which only the kernel could reach in this mode.
    #[error(
        "the stack accesses data, which only the kernel could reach in this mode (choose copy or user-copy)"
    )]
    Looks,
    /// The device is unprivileged.
    #[error("an unprivileged device cannot have it (choose copy or get-data)")]
    Unprivileged,
    /// The device is zoned.
    #[error("a zoned device supports user-copy only")]
    Zoned,
}

impl Circumstances {
    /// Returns the best mode.
    pub fn best(&self) -> Choice {
        let choice = |mode, why| Choice { mode, why };
        if self.zoned {
            return choice(DataMode::UserCopy, "the driver requires it for zoned devices");
        }
        if !self.opaque {
            return choice(DataMode::Copy, "the stack accesses data");
        }
        if self.inline {
            return choice(DataMode::Copy, "the stack completes requests inline, into its own memory");
        }
        if self.unprivileged {
            return choice(DataMode::Copy, "an unprivileged device has no zero copy");
        }
        if !self.has_room && self.check(DataMode::ZeroCopy).is_ok() {
            let why = "other devices of this process have registered what its threads can register";
            return choice(DataMode::Copy, why);
        }
        if self.check(DataMode::AutoZeroCopy).is_ok() {
            return choice(DataMode::AutoZeroCopy, "the stack does not access data");
        }
        match self.check(DataMode::ZeroCopy) {
            Ok(()) => choice(DataMode::ZeroCopy, "the driver lacks AUTO_BUF_REG (6.16)"),
            Err(_) => choice(DataMode::Copy, "the driver lacks SUPPORT_ZERO_COPY (6.15)"),
        }
    }

    /// Checks whether a mode is possible.
    ///
    /// # Errors
    /// The reason why the mode is not possible.
    pub fn check(&self, mode: DataMode) -> Result<(), NotPossible> {
        let lacking = Features(mode.features().0 & !self.offered.0);
        if self.zoned && mode != DataMode::UserCopy {
            Err(NotPossible::Zoned)
        } else if lacking != Features::NONE {
            Err(NotPossible::Lacks(lacking))
        } else if mode.is_opaque() && !self.opaque {
            Err(NotPossible::Looks)
        } else if mode.needs_privilege() && self.unprivileged {
            Err(NotPossible::Unprivileged)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Circumstances = Circumstances {
        offered: Features::KNOWN,
        unprivileged: false,
        zoned: false,
        opaque: true,
        inline: false,
        has_room: true,
    };

    #[test]
    fn a_stack_that_does_not_access_data_gets_the_best_mode() {
        let with = |offered| Circumstances { offered, ..ALL }.best().mode;
        assert_eq!(with(Features::KNOWN), DataMode::AutoZeroCopy);
        assert_eq!(with(Features::SUPPORT_ZERO_COPY), DataMode::ZeroCopy);
        assert_eq!(with(Features::AUTO_BUF_REG), DataMode::Copy, "nothing to fall back on");
        assert_eq!(with(Features::NONE), DataMode::Copy);
    }

    #[test]
    fn a_stack_that_accesses_data_gets_copies() {
        assert_eq!(Circumstances { opaque: false, ..ALL }.best().mode, DataMode::Copy);
        let inline = Circumstances { inline: true, ..ALL };
        assert_eq!((inline.best().mode, inline.check(DataMode::ZeroCopy)), (DataMode::Copy, Ok(())));
        assert_eq!(Circumstances { unprivileged: true, ..ALL }.best().mode, DataMode::Copy);
        assert_eq!(Circumstances { zoned: true, ..ALL }.best().mode, DataMode::UserCopy);
    }

    #[test]
    fn devices_that_exceed_the_buffer_table_get_copies_with_the_reason() {
        let full = Circumstances { has_room: false, ..ALL };
        assert_eq!(full.best().mode, DataMode::Copy);
        assert!(full.best().why.contains("other devices"), "{}", full.best().why);
        let old = Circumstances { offered: Features::NONE, ..full };
        assert!(old.best().why.contains("SUPPORT_ZERO_COPY"), "{}", old.best().why);
    }

    #[test]
    fn an_impossible_mode_is_refused_with_the_reason() {
        let none = Circumstances { offered: Features::NONE, ..ALL };
        assert_eq!(none.check(DataMode::UserCopy), Err(NotPossible::Lacks(Features::USER_COPY)));
        assert_eq!(none.check(DataMode::Copy), Ok(()));
        let looks = Circumstances { opaque: false, ..ALL };
        assert_eq!(looks.check(DataMode::ZeroCopy), Err(NotPossible::Looks));
        assert_eq!(looks.check(DataMode::UserCopy), Ok(()));
        let user = Circumstances { unprivileged: true, ..ALL };
        assert_eq!(user.check(DataMode::UserCopy), Err(NotPossible::Unprivileged));
        let zoned = Circumstances { zoned: true, ..ALL };
        assert_eq!(zoned.check(DataMode::Copy), Err(NotPossible::Zoned));
    }

    #[test]
    fn a_mode_is_parsed_from_its_name() {
        for mode in DataMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("fast".parse::<DataMode>().is_err());
    }
}
