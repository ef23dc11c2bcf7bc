//! The history of a device, for pages that are opened later: five minutes in steps of a second, and an hour
//! in steps of ten seconds.

use crate::rates::Sample;
use hyper::body::Bytes;
use std::collections::VecDeque;

/// Number of samples of five minutes, one a second.
const SECONDS_MAX: usize = 300;
/// Seconds between two samples of the hour.
pub(crate) const STEP: u64 = 10;
/// Number of samples of an hour, one every [`STEP`] seconds.
const STEPS_MAX: usize = 360;
/// Largest number of samples of all devices together in each resolution: 16 MiB at half a kilobyte each.
const SAMPLES_TOTAL: usize = 32_768;
/// Number of samples that each device may have, whatever the number of devices.
const SAMPLES_MIN: usize = 10;

/// The time that a history spans.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Span {
    /// Five minutes, a sample a second.
    Minutes,
    /// An hour, a sample every [`STEP`] seconds.
    Hour,
}

/// Samples of one resolution, as JSON.
#[derive(Default)]
struct Series {
    samples: VecDeque<String>,
    /// JSON array of all samples; `None`: a sample was added since it was built.
    answer: Option<Bytes>,
}

impl Series {
    fn push(&mut self, sample: &Sample, samples_max: usize, devices: usize) {
        let room = (SAMPLES_TOTAL / devices.max(1)).clamp(SAMPLES_MIN, samples_max);
        while self.samples.len() >= room {
            self.samples.pop_front();
        }
        self.answer = None;
        // The encoding of a plain structure as JSON does not fail.
        self.samples.push_back(serde_json::to_string(sample).unwrap_or_default());
    }

    fn answer(&mut self) -> Bytes {
        let joined = || {
            let samples: Vec<&str> = self.samples.iter().map(String::as_str).collect();
            Bytes::from(format!("[{}]", samples.join(",")))
        };
        self.answer.get_or_insert_with(joined).clone()
    }
}

/// The history of one device.
#[derive(Default)]
pub(crate) struct History {
    minutes: Series,
    hour: Series,
}

impl History {
    /// Adds the sample of a second. Returns its JSON. `devices` is the number of devices that share the
    /// memory.
    pub(crate) fn push(&mut self, sample: &Sample, devices: usize) -> &str {
        self.minutes.push(sample, SECONDS_MAX, devices);
        self.last()
    }

    /// Adds the sample of [`STEP`] seconds.
    pub(crate) fn push_step(&mut self, sample: &Sample, devices: usize) {
        self.hour.push(sample, STEPS_MAX, devices);
    }

    /// Returns the JSON of the newest sample of a second.
    pub(crate) fn last(&self) -> &str {
        self.minutes.samples.back().map_or("null", |text| text)
    }

    /// Returns a JSON array of the samples, oldest first.
    pub(crate) fn answer(&mut self, span: Span) -> Bytes {
        match span {
            Span::Minutes => self.minutes.answer(),
            Span::Hour => self.hour.answer(),
        }
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
        let kept: Vec<serde_json::Value> = serde_json::from_slice(&history.answer(Span::Minutes)).unwrap();
        assert_eq!((kept.len(), &kept[0]["t"], &kept[299]["t"]), (300, &100.into(), &399.into()));
        history.push(&Sample::default(), 1000);
        let kept: Vec<serde_json::Value> = serde_json::from_slice(&history.answer(Span::Minutes)).unwrap();
        assert_eq!(kept.len(), 32);
    }

    #[test]
    fn an_hour_is_kept_in_steps_beside_the_minutes() {
        let mut history = History::default();
        for t in 0..400 {
            history.push_step(&Sample { t: t * STEP * 1000, ..Sample::default() }, 1);
        }
        let kept: Vec<serde_json::Value> = serde_json::from_slice(&history.answer(Span::Hour)).unwrap();
        let between = |at: usize| kept[at]["t"].as_u64().unwrap() - kept[0]["t"].as_u64().unwrap();
        assert_eq!((kept.len(), between(1), between(359)), (360, 10_000, 3_590_000));
        assert_eq!(history.answer(Span::Minutes), "[]");
    }

    #[test]
    fn a_device_without_samples_has_an_empty_history() {
        let mut history = History::default();
        assert_eq!((history.answer(Span::Minutes), history.last()), (Bytes::from("[]"), "null"));
    }
}
