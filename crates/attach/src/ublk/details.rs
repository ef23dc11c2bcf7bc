//! Details of a ublk device for `show`: chosen settings with the reasons, features of the driver, and
//! errors.

use super::UblkExport;
use ::ublk::Features;
use block::Bytes;
use engine::device::Device;
use spec::Recovery;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

impl UblkExport {
    /// Whether commands are per request or in batches, and why.
    fn commands(&self) -> String {
        let (batch, why) = self.batch;
        format!("{}: {why}", if batch { "one for many requests" } else { "one for each request" })
    }

    /// Describes the integrity data, or the reason why there is none.
    fn describe_integrity(&self) -> String {
        match self.integrity {
            (Some(shape), why) => {
                format!("{shape}, {} bytes with every {}: {why}", shape.tuple, shape.interval)
            }
            (None, why) => format!("none: {why}"),
        }
    }

    pub(super) fn details(&self, device: &Device) -> BTreeMap<String, String> {
        let info = self.driver.info(self.info.dev_id).unwrap_or(self.info);
        let features = info.features();
        let state =
            info.state().map_or_else(|| format!("state {}", info.state), |state| state.name().to_owned());
        let refused =
            self.queues().iter().map(|served| served.refused.load(Relaxed)).find(|errno| *errno != 0);
        let mut details = BTreeMap::from([
            ("state".to_owned(), state),
            ("data".to_owned(), format!("{}: {}", self.choice.mode, self.choice.why)),
            ("commands".to_owned(), self.commands()),
            ("recovery".to_owned(), Recovery::of(features).to_string()),
            ("queues".to_owned(), format!("{} of depth {}", info.nr_hw_queues, info.queue_depth)),
            ("integrity".to_owned(), self.describe_integrity()),
            ("request".to_owned(), format!("at most {}", Bytes(info.max_io_buf_bytes.into()))),
            ("features".to_owned(), features.common(Features::KNOWN).to_string()),
            ("size".to_owned(), device.size().to_string()),
        ]);
        if let Some(offered) = self.offered {
            let unknown = offered.without(Features::KNOWN);
            details.insert("driver".to_owned(), offered.common(Features::KNOWN).to_string());
            if !unknown.is_empty() {
                details.insert("driver, unknown to us".to_owned(), unknown.to_string());
            }
        }
        if let Some((path, memory, _)) = &self.client_memory {
            let requests: u64 =
                self.queues().iter().map(|served| served.in_client_memory.load(Relaxed)).sum();
            let size = Bytes(memory.len());
            details.insert("shared".to_owned(), format!("{size} of {}: {requests} requests", path.display()));
        }
        if let Some(errno) = refused {
            details.insert("refused".to_owned(), io::Error::from_raw_os_error(errno).to_string());
        }
        details
    }
}
