//! The last minutes of a device, for a page that is opened now.

use crate::rates::Sample;
use hyper::body::Bytes;
use std::collections::VecDeque;

/// Five minutes, a sample a second.
const SAMPLES_MAX: usize = 300;
/// Samples of all devices together: of half a kilobyte each, 16 MiB.
const SAMPLES_TOTAL: usize = 32_768;
/// What each device has nevertheless.
const SAMPLES_MIN: usize = 10;

/// What was sent of one device.
#[derive(Default)]
pub(crate) struct History {
    samples: VecDeque<String>,
    /// All of it as an answer, until there is more.
    answer: Option<Bytes>,
}

impl History {
    /// One more, with so many devices to keep the history of. The text of it.
    pub(crate) fn push(&mut self, sample: &Sample, devices: usize) -> &str {
        let room = (SAMPLES_TOTAL / devices.max(1)).clamp(SAMPLES_MIN, SAMPLES_MAX);
        while self.samples.len() >= room {
            self.samples.pop_front();
        }
        self.answer = None;
        // A plain structure always has a JSON form.
        self.samples.push_back(serde_json::to_string(sample).unwrap_or_default());
        self.last()
    }

    /// The newest.
    pub(crate) fn last(&self) -> &str {
        self.samples.back().map_or("null", |text| text)
    }

    /// A JSON array of them, oldest first.
    pub(crate) fn answer(&mut self) -> Bytes {
        let made = || {
            let samples: Vec<&str> = self.samples.iter().map(String::as_str).collect();
            Bytes::from(format!("[{}]", samples.join(",")))
        };
        self.answer.get_or_insert_with(made).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_minutes_are_kept_and_less_of_very_many_devices() {
        let mut history = History::default();
        for t in 0..400 {
            history.push(&Sample { t, ..Sample::default() }, 1);
        }
        let kept: Vec<serde_json::Value> = serde_json::from_slice(&history.answer()).unwrap();
        assert_eq!((kept.len(), &kept[0]["t"], &kept[299]["t"]), (300, &100.into(), &399.into()));
        history.push(&Sample::default(), 1000);
        let kept: Vec<serde_json::Value> = serde_json::from_slice(&history.answer()).unwrap();
        assert_eq!(kept.len(), 32);
    }

    #[test]
    fn a_device_without_any_has_an_empty_one() {
        assert_eq!((History::default().answer().as_ref(), History::default().last()), (&b"[]"[..], "null"));
    }
}
