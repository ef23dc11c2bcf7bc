//! Actions on devices that the page may perform if the configuration allows it. Each action has an equivalent
//! command.

use engine::change::Change;
use engine::control::{ControlError, HostView};
use engine::spec::{Bytes, Direct};
use engine::tables::TableCall;
use serde::Deserialize;
use std::sync::Arc;
use tokio::runtime::Handle;

/// An action: the body of a request.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(tag = "action", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Action {
    /// `message NAME SECTOR fail_path PATH`
    FailPath {
        #[serde(default)]
        sector: u64,
        path: String,
    },
    /// `message NAME SECTOR reinstate_path PATH`
    ReinstatePath {
        #[serde(default)]
        sector: u64,
        path: String,
    },
    /// `suspend NAME`
    Suspend,
    /// `resume NAME`
    Resume,
    /// `resize NAME SIZE`
    Resize {
        size: String,
        #[serde(default)]
        shrink: bool,
    },
    /// `set NAME direct=on|off`
    Direct { on: bool },
}

impl Action {
    /// Performs the action on the runtime of the control plane, which finishes it even if the client
    /// disconnects.
    ///
    /// # Errors
    /// [`ControlError`] of the device, or of a size that cannot be parsed.
    pub(crate) async fn carry_out(
        self,
        name: String,
        view: Arc<dyn HostView>,
        control: &Handle,
    ) -> Result<(), ControlError> {
        tracing::info!(device = name, action = ?self, "requested by the page");
        let done = control.spawn(async move {
            let message = |sector, word: &str, path| TableCall::Message {
                sector,
                arguments: vec![word.to_owned(), path],
            };
            let change = match self {
                Action::FailPath { sector, path } => {
                    return view.table(&name, message(sector, "fail_path", path)).await.map(drop);
                }
                Action::ReinstatePath { sector, path } => {
                    return view.table(&name, message(sector, "reinstate_path", path)).await.map(drop);
                }
                Action::Suspend => Change::Suspend { flush: true },
                Action::Resume => Change::Resume,
                Action::Resize { size, shrink } => {
                    let size: Bytes = size.parse().map_err(|why| ControlError::Failed(format!("{why}")))?;
                    Change::Resize { size: Some(size.0), shrink }
                }
                Action::Direct { on } => Change::Direct(if on { Direct::On } else { Direct::Off }),
            };
            view.change(&name, change).await
        });
        done.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_actions_are_parsed_and_others_are_refused() {
        let read = |text: &str| serde_json::from_str::<Action>(text);
        let fail = read(r#"{"action":"fail-path","path":"ram:1M"}"#).unwrap();
        assert_eq!(fail, Action::FailPath { sector: 0, path: "ram:1M".into() });
        assert_eq!(read(r#"{"action":"suspend"}"#).unwrap(), Action::Suspend);
        let resize = read(r#"{"action":"resize","size":"2G"}"#).unwrap();
        assert_eq!(resize, Action::Resize { size: "2G".into(), shrink: false });
        for text in
            ["", "{}", r#"{"action":"delete"}"#, r#"{"action":"direct"}"#, r#"{"action":"fail-path"}"#]
        {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
