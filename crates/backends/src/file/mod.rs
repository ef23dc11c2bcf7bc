//! `file:`, a regular file or a block device.
pub(crate) mod sys;
