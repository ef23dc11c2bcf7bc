//! LIO's configuration over another engine: targetcli's tree, commands and messages, and `saveconfig.json`.
//!
//! [`config`] holds the objects. [`edit::Editor`] changes them together with a [`System`](system::System):
//! the devices and targets of a process, or [`memory`] in tests.
//!
//! Source: targetcli 3.0, rtslib 2.2, configshell 2.0; their messages are kept where scripts may read them.

#![forbid(unsafe_code)]

pub mod attributes;
pub mod commands;
pub mod complete;
pub mod config;
pub mod edit;
mod groups;
pub mod json;
pub mod memory;
pub mod prefs;
mod render;
pub mod run;
pub mod size;
pub mod store;
pub mod system;
pub mod tree;
mod verbs;
pub mod words;
pub mod wwn;
