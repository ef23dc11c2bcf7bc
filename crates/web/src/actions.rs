//! What the page may have done to a device, where that was allowed: each is what a command does, too.

use engine::change::Change;
use engine::control::{ControlError, Yard};
use engine::spec::{Bytes, Direct};
use engine::tables::TableCall;
use serde::Deserialize;
use std::sync::Arc;
use tokio::runtime::Handle;

/// What is asked for.
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
    /// Carry it out. Once begun it is finished, also if whoever asked is gone: on the control plane's runtime, as what
    /// the control socket is asked for.
    ///
    /// # Errors
    /// What the device, or the size, was refused for.
    pub(crate) async fn carry_out(
        self,
        name: String,
        yard: Arc<dyn Yard>,
        control: &Handle,
    ) -> Result<(), ControlError> {
        tracing::info!(device = name, action = ?self, "asked for by the page");
        let done = control.spawn(async move {
            let message =
                |sector, word: &str, path| TableCall::Message { sector, words: vec![word.to_owned(), path] };
            let change = match self {
                Action::FailPath { sector, path } => {
                    return yard.table(&name, message(sector, "fail_path", path)).await.map(drop);
                }
                Action::ReinstatePath { sector, path } => {
                    return yard.table(&name, message(sector, "reinstate_path", path)).await.map(drop);
                }
                Action::Suspend => Change::Suspend { flush: true },
                Action::Resume => Change::Resume,
                Action::Resize { size, shrink } => {
                    let size: Bytes = size.parse().map_err(|why| ControlError::Failed(format!("{why}")))?;
                    Change::Resize { size: Some(size.0), shrink }
                }
                Action::Direct { on } => Change::Direct(if on { Direct::On } else { Direct::Off }),
            };
            yard.change(&name, change).await
        });
        done.await.unwrap_or_else(|why| Err(ControlError::Failed(why.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_are_read_and_nothing_else_is() {
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
