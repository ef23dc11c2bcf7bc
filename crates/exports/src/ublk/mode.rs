//! How the data of requests gets from the kernel to the stack and back, and which way is the best there is.

use ::ublk::Features;
use std::fmt;
use std::str::FromStr;

/// A way for data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DataMode {
    /// The driver copies between a request and the buffer that we named for its tag.
    Copy,
    /// The same, but a buffer is named only for the request that needs it: when a write has been seen, and when a
    /// read is done, so that a read may be answered from memory of the stack's own.
    GetData,
    /// We copy, by reading and writing the character device.
    UserCopy,
    /// The request's memory is registered with our io_uring by command, and files are read and written with it:
    /// nobody copies.
    ZeroCopy,
    /// The same; the driver registers it by itself. What it could not register is registered by command.
    AutoZeroCopy,
}

impl DataMode {
    /// All of them.
    pub const ALL: [DataMode; 5] =
        [DataMode::Copy, DataMode::GetData, DataMode::UserCopy, DataMode::ZeroCopy, DataMode::AutoZeroCopy];

    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            DataMode::Copy => "copy",
            DataMode::GetData => "get-data",
            DataMode::UserCopy => "user-copy",
            DataMode::ZeroCopy => "zero-copy",
            DataMode::AutoZeroCopy => "auto-zero-copy",
        }
    }

    /// The features that a device must have for it.
    pub const fn features(self) -> Features {
        match self {
            DataMode::Copy => Features::NONE,
            DataMode::GetData => Features::NEED_GET_DATA,
            DataMode::UserCopy => Features::USER_COPY,
            DataMode::ZeroCopy => Features::SUPPORT_ZERO_COPY,
            // What does not register itself is registered by command.
            DataMode::AutoZeroCopy => Features(Features::AUTO_BUF_REG.0 | Features::SUPPORT_ZERO_COPY.0),
        }
    }

    /// Whether the stack is handed memory that only the kernel can reach.
    pub const fn is_opaque(self) -> bool {
        matches!(self, DataMode::ZeroCopy | DataMode::AutoZeroCopy)
    }

    /// Whether the driver must trust the server with it, so that unprivileged devices cannot have it.
    pub const fn needs_privilege(self) -> bool {
        matches!(self, DataMode::UserCopy | DataMode::ZeroCopy | DataMode::AutoZeroCopy)
    }
}

impl fmt::Display for DataMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// There is no such way.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{0}\" is no way for data (copy, get-data, user-copy, zero-copy or auto-zero-copy)")]
pub struct UnknownMode(String);

impl FromStr for DataMode {
    type Err = UnknownMode;

    fn from_str(word: &str) -> Result<DataMode, UnknownMode> {
        let known = DataMode::ALL.into_iter().find(|mode| mode.name() == word);
        known.ok_or_else(|| UnknownMode(word.to_owned()))
    }
}

/// What a choice depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Circumstances {
    /// What the driver offers.
    pub offered: Features,
    /// The device is to be an unprivileged one.
    pub unprivileged: bool,
    /// The device is to be a zoned one: the driver wants user copy for that.
    pub zoned: bool,
    /// Every node of the stack hands data on by name and never looks at it: see
    /// [`DeviceFacts::opaque`](crate::nbd::DeviceFacts).
    pub opaque: bool,
    /// Requests are mostly answered while they are submitted, which takes memory of our own: copying is cheaper then
    /// than registering and a second round through the ring.
    pub in_place: bool,
    /// The tables in which the threads' io_urings register memory have room for all tags of the device.
    pub has_room: bool,
}

/// A way, and why it is the best.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Choice {
    /// The way.
    pub mode: DataMode,
    /// Why, for `show`.
    pub why: &'static str,
}

/// Why a way that was asked for cannot be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotPossible {
    /// The driver does not offer it.
    #[error(
        "this kernel's ublk driver lacks {0:?} (leave the data mode out, and the best there is is taken)"
    )]
    Lacks(Features),
    /// The stack looks at data.
    #[error("the stack looks at data, which then only the kernel could reach (choose copy or user-copy)")]
    Looks,
    /// An unprivileged device.
    #[error("an unprivileged device cannot have it (choose copy or get-data)")]
    Unprivileged,
    /// A zoned device.
    #[error("a zoned device has its data by user-copy only")]
    Zoned,
}

impl Circumstances {
    /// The best way.
    pub fn best(&self) -> Choice {
        let choice = |mode, why| Choice { mode, why };
        if self.zoned {
            return choice(DataMode::UserCopy, "the driver has zoned devices do so");
        }
        if !self.opaque {
            return choice(DataMode::Copy, "the stack needs the data in memory of its own");
        }
        if self.in_place {
            return choice(DataMode::Copy, "the stack answers at once, into memory of its own");
        }
        if self.unprivileged {
            return choice(DataMode::Copy, "an unprivileged device has no zero copy");
        }
        if !self.has_room && self.check(DataMode::ZeroCopy).is_ok() {
            let why = "other devices of this process have registered what its threads can register";
            return choice(DataMode::Copy, why);
        }
        if self.check(DataMode::AutoZeroCopy).is_ok() {
            return choice(DataMode::AutoZeroCopy, "the stack hands data on without looking at it");
        }
        match self.check(DataMode::ZeroCopy) {
            Ok(()) => choice(DataMode::ZeroCopy, "the driver lacks AUTO_BUF_REG (6.16)"),
            Err(_) => choice(DataMode::Copy, "the driver lacks SUPPORT_ZERO_COPY (6.15)"),
        }
    }

    /// Whether that way can be had.
    ///
    /// # Errors
    /// Why not.
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
        in_place: false,
        has_room: true,
    };

    #[test]
    fn a_stack_that_does_not_look_gets_the_best_that_the_driver_has() {
        let with = |offered| Circumstances { offered, ..ALL }.best().mode;
        assert_eq!(with(Features::KNOWN), DataMode::AutoZeroCopy);
        assert_eq!(with(Features::SUPPORT_ZERO_COPY), DataMode::ZeroCopy);
        assert_eq!(with(Features::AUTO_BUF_REG), DataMode::Copy, "nothing to fall back on");
        assert_eq!(with(Features::NONE), DataMode::Copy);
    }

    #[test]
    fn a_stack_that_looks_gets_copies() {
        assert_eq!(Circumstances { opaque: false, ..ALL }.best().mode, DataMode::Copy);
        let in_place = Circumstances { in_place: true, ..ALL };
        assert_eq!((in_place.best().mode, in_place.check(DataMode::ZeroCopy)), (DataMode::Copy, Ok(())));
        assert_eq!(Circumstances { unprivileged: true, ..ALL }.best().mode, DataMode::Copy);
        assert_eq!(Circumstances { zoned: true, ..ALL }.best().mode, DataMode::UserCopy);
    }

    #[test]
    fn the_devices_that_are_too_many_for_the_table_get_copies_and_the_reason() {
        let full = Circumstances { has_room: false, ..ALL };
        assert_eq!(full.best().mode, DataMode::Copy);
        assert!(full.best().why.contains("other devices"), "{}", full.best().why);
        let old = Circumstances { offered: Features::NONE, ..full };
        assert!(old.best().why.contains("SUPPORT_ZERO_COPY"), "{}", old.best().why);
    }

    #[test]
    fn what_cannot_be_had_says_why() {
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
    fn a_mode_is_known_by_its_name() {
        for mode in DataMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("fast".parse::<DataMode>().is_err());
    }
}
