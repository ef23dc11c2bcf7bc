//! The control plane of the iSCSI export: targets, portal groups, portals, LUNs, ACLs, logins and sessions.
//!
//! [`Targets`] is the registry of a process. `--iscsi` and targetcli both change it and see each other's
//! objects.
//! A login runs on the control plane's runtime; then a reactor owns the session, with all its connections.
//! See [ADR 40](../../../../docs/adr/0040-iscsi-target.md).

mod aptpl;
mod auth;
mod discovery;
mod export;
mod handover;
mod login_directory;
mod portal;
mod session;
mod settings;
mod shared;
mod show;
mod targets;
mod tree;
mod unit;

pub use aptpl::{AptplError, AptplFile};
pub use auth::{Auth, AuthFileError, is_complete};
pub(crate) use export::export;
pub use proto::iscsi::login::{Credentials, Secret};
pub use session::{ConnectionInfo, SessionCounts, SessionInfo};
pub use settings::{ACL_ATTRIBUTES, GROUP_ATTRIBUTES, PARAMETERS, Rule, SettingError, SettingRow, Settings};
pub use targets::{Targets, TargetsError};
pub use tree::{
    Acl, Group, GroupId, LUN_MAX, LoginAuth, Lun, MappedLun, Scope, Target, Tree, TreeError, UnitId,
    VisibleLun,
};
pub use unit::{Unit, UnitOptions};
