//! The figures of all parts: parsed from measurements, stored as JSON, and read again.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::left_out::LeftOut;

/// All rounds of one job on one subject.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Figure {
    pub(super) part: String,
    pub(super) subject: String,
    pub(super) job: String,
    /// A value for each round, by the column's name. A round without a value has NaN.
    pub(super) columns: BTreeMap<String, Vec<f64>>,
}

impl Figure {
    /// Returns the values of a column, without rounds that have none.
    pub(super) fn values(&self, column: &str) -> Vec<f64> {
        let values = self.columns.get(column).map_or(&[][..], Vec::as_slice);
        values.iter().copied().filter(|value| value.is_finite()).collect()
    }
}

/// Parses the lines of a measurement: subject (or device), job, round, and columns of numbers.
pub(super) fn parse_csv(text: &str) -> Result<Vec<Figure>> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    if !matches!(names.as_slice(), ["subject" | "device", "job", "round", _, ..]) {
        return Err(Error(format!("a measurement begins with {:?}", names.join(","))));
    }
    let mut figures: Vec<Figure> = Vec::new();
    for line in lines {
        let fields: Vec<&str> = line.split(',').collect();
        if fields.len() != names.len() {
            return Err(Error(format!("a measurement has the line {line:?}")));
        }
        let found = figures.iter().position(|figure| figure.subject == fields[0] && figure.job == fields[1]);
        let at = found.unwrap_or_else(|| {
            figures.push(Figure { subject: fields[0].into(), job: fields[1].into(), ..Figure::default() });
            figures.len() - 1
        });
        for (name, field) in names.iter().zip(&fields).skip(3) {
            let value = if field.is_empty() {
                f64::NAN
            } else {
                field.parse().map_err(|_| Error(format!("a measurement has the line {line:?}")))?
            };
            figures[at].columns.entry((*name).to_owned()).or_default().push(value);
        }
    }
    Ok(figures)
}

/// The figures of a whole run.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Results {
    pub(super) machine: BTreeMap<String, String>,
    pub(super) figures: Vec<Figure>,
    /// Parts that were not measured, and why.
    pub(super) errors: Vec<(String, String)>,
    /// Subjects of measured parts that were left out, and why.
    pub(super) left_out: Vec<LeftOutOf>,
}

/// A subject that a part left out.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct LeftOutOf {
    pub(super) part: String,
    pub(super) subject: String,
    pub(super) why: String,
}

impl Results {
    pub(super) fn of_this_machine(quick: bool) -> Results {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpu = read("/proc/cpuinfo");
        let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let cpus = std::thread::available_parallelism().map_or(0, usize::from);
        let machine = [
            ("kernel", read("/proc/sys/kernel/osrelease").trim().to_owned()),
            ("processors", format!("{cpus} x {}", model.map_or("unknown", |(_, name)| name))),
            ("extent", if quick { "quick" } else { "full" }.to_owned()),
        ];
        let machine = machine.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Results { machine, ..Results::default() }
    }

    pub(super) fn add(&mut self, part: &str, figures: Vec<Figure>, left_out: Vec<LeftOut>) {
        let named = |figure: Figure| Figure { part: part.to_owned(), ..figure };
        self.figures.extend(figures.into_iter().map(named));
        let of = |(subject, why)| LeftOutOf { part: part.to_owned(), subject, why };
        self.left_out.extend(left_out.into_iter().map(of));
    }

    /// Returns why a subject of a part was left out; `None` if it was measured or was no subject of it.
    pub(super) fn why_left_out(&self, part: &str, subject: &str) -> Option<&str> {
        let found = self.left_out.iter().find(|one| one.part == part && one.subject == subject);
        found.map(|one| one.why.as_str())
    }

    pub(super) fn find(&self, part: &str, subject: &str, job: &str) -> Option<&Figure> {
        let is_it = |figure: &&Figure| figure.part == part && figure.subject == subject && figure.job == job;
        self.figures.iter().find(is_it)
    }

    pub(super) fn to_json(&self) -> Value {
        let figure = |figure: &Figure| {
            json!({
                "part": figure.part, "subject": figure.subject, "job": figure.job, "rounds": figure.columns,
            })
        };
        let error = |(part, why): &(String, String)| json!({"part": part, "error": why});
        let left_out = |one: &LeftOutOf| json!({"part": one.part, "subject": one.subject, "error": one.why});
        json!({
            "format": 1,
            "machine": self.machine,
            "figures": self.figures.iter().map(figure).collect::<Vec<_>>(),
            "not_measured": self.errors.iter().map(error).collect::<Vec<_>>(),
            "left_out": self.left_out.iter().map(left_out).collect::<Vec<_>>(),
        })
    }

    /// Parses the output of [`Results::to_json`].
    pub(super) fn from_json(text: &str) -> Result<Results> {
        let value: Value = serde_json::from_str(text).map_err(|error| Error(error.to_string()))?;
        if value["format"] != 1 {
            return Err(Error("not a report of ./x bench report (\"format\" is not 1)".into()));
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
        let column = |(name, values): (&String, &Value)| {
            (name.clone(), values.as_array().into_iter().flatten().map(number).collect())
        };
        let figure = |value: &Value| Figure {
            part: text(&value["part"]),
            subject: text(&value["subject"]),
            job: text(&value["job"]),
            columns: value["rounds"].as_object().into_iter().flatten().map(column).collect(),
        };
        let error = |value: &Value| (text(&value["part"]), text(&value["error"]));
        let left_out = |value: &Value| LeftOutOf {
            part: text(&value["part"]),
            subject: text(&value["subject"]),
            why: text(&value["error"]),
        };
        Ok(Results {
            machine: value["machine"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(name, value)| (name.clone(), text(value)))
                .collect(),
            figures: value["figures"].as_array().into_iter().flatten().map(figure).collect(),
            errors: value["not_measured"].as_array().into_iter().flatten().map(error).collect(),
            // Missing in older reports.
            left_out: value["left_out"].as_array().into_iter().flatten().map(left_out).collect(),
        })
    }
}

#[cfg(test)]
pub(super) fn example() -> Results {
    let text = "subject,job,round,iops,p99_us,server_us\n\
                loop-buffered,randrw-files,0,100,10,\n\
                lio-fileio,randrw-files,0,50,20,\n\
                loop-buffered,randrw-files,1,120,11,\n\
                lio-fileio,randrw-files,1,40,21,\n\
                file,randrw-files,0,200,5,1.5\n\
                file,randrw-files,1,180,6,1.25\n";
    let mut results = Results::default();
    results.machine.insert("kernel".into(), "6.1 <test>".into());
    let left_out = vec![("tgtd-file".to_owned(), "tgtd is <not> installed".to_owned())];
    results.add("fabrics", parse_csv(text).expect("lines"), left_out);
    results.errors.push(("paths".into(), "it was left out".into()));
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_of_a_subject_are_gathered_in_order() {
        let results = example();
        let figure = results.find("fabrics", "loop-buffered", "randrw-files").expect("a figure");
        assert_eq!(figure.values("iops"), [100.0, 120.0]);
        assert!(figure.values("server_us").is_empty() && figure.values("none").is_empty());
    }

    #[test]
    fn a_report_reads_back_as_it_was_written() {
        let results = example();
        let again = Results::from_json(&results.to_json().to_string()).expect("a report");
        assert_eq!((&again.machine, &again.errors), (&results.machine, &results.errors));
        assert_eq!(again.left_out, results.left_out);
        assert_eq!(again.why_left_out("fabrics", "tgtd-file"), Some("tgtd is <not> installed"));
        assert_eq!(again.why_left_out("servers", "tgtd-file"), None);
        let values =
            |results: &Results| results.figures.iter().map(|one| one.values("iops")).collect::<Vec<_>>();
        assert_eq!(values(&again), values(&results));
    }

    #[test]
    fn other_files_are_refused() {
        for text in ["", "a,b\n1,2\n", "subject,job,round,iops\na,b,0\n", "subject,job,round,iops\na,b,0,x\n"]
        {
            assert!(parse_csv(text).is_err(), "{text:?}");
        }
        for text in ["", "{}", "[1]", "{\"format\": 2}"] {
            assert!(Results::from_json(text).is_err(), "{text:?}");
        }
    }
}
