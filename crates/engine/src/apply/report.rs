//! Bodies of the control API's `GET /topology` and `POST /topology`.

use super::{Action, Plan};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A request to apply a topology to a process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ApplyRequest {
    /// The topology, as TOML.
    pub text: String,
    /// The absolute path of its file: relative paths in the text start from its folder.
    pub file: PathBuf,
    /// Whether to plan only.
    pub dry_run: bool,
}

/// The outcome of one action.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Planned only: a dry run, or the plan was refused.
    Planned,
    /// Executed.
    Done,
    /// Failed, without an effect.
    Failed,
    /// Not started, because an earlier action failed.
    NotDone,
}

/// One action of a plan and its outcome.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ActionReport {
    /// `add`, `remove`, `change`, `add-export` or `remove-export`.
    pub action: String,
    /// The device.
    pub device: String,
    /// The action in one line: `change disk: limits max_sectors=64`.
    pub text: String,
    /// The outcome.
    pub outcome: Outcome,
    /// The reason of a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Kinds and addresses of added exports: `nbd nbd+unix:///disk?socket=/run/disk.sock`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
}

/// The answer to an [`ApplyRequest`].
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ApplyAnswer {
    /// The actions, in the order of their execution.
    pub actions: Vec<ActionReport>,
    /// Reasons why the plan was refused, one line each.
    pub refused: Vec<String>,
}

impl ApplyAnswer {
    /// Reports a plan before its execution.
    pub fn planned(plan: &Plan) -> ApplyAnswer {
        let report = |action: &Action| ActionReport {
            action: action.kind().to_owned(),
            device: action.device().to_string(),
            text: action.to_string(),
            outcome: Outcome::Planned,
            why: None,
            addresses: Vec::new(),
        };
        ApplyAnswer {
            actions: plan.actions.iter().map(report).collect(),
            refused: plan.refusals.iter().map(ToString::to_string).collect(),
        }
    }
}

/// The served devices of a process as text of a topology.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TopologyText {
    /// The process id.
    pub pid: u32,
    /// The absolute path of the topology file that `up` was started with.
    pub file: Option<PathBuf>,
    /// The settings of the process, as lines of a topology.
    pub settings: String,
    /// Settings of the process that a topology cannot express, each with what to do.
    pub left_out: Vec<String>,
    /// The devices with their exports; lower devices precede their users.
    pub devices: Vec<DeviceText>,
}

/// A device as text of a topology.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceText {
    /// The device's name.
    pub name: String,
    /// TOML tables: `[device.NAME]` and an `[[export]]` for each export. Empty: a topology cannot express the
    /// device.
    pub text: String,
    /// Properties that a topology cannot express, each with what to do.
    pub left_out: Vec<String>,
    /// Whether the text contains the path of a private key.
    pub has_secrets: bool,
}
