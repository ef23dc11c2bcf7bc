//! The report as one HTML file: no script, no network, for light and dark screens and for paper.

use std::fmt::Write;

use super::markdown::{beside, cell, columns_of, grouped, heading, judged, missing, role, unit};
use super::results::{Figure, Results};
use super::tables::{Chart, Line, Role, TABLES};
use crate::figures::{median, spread};

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c2024;--soft:#5d6670;--paper:#fff;--rule:#d9dee3;--original:#7b8794;\
--alternative:#c08a3e;--ours:#2f6fb5;--good:#2c7a4b;--bad:#b3402e}\
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ec;--soft:#98a2ad;--paper:#14181c;--rule:#333b44;\
--original:#8d99a6;--alternative:#d6a45c;--ours:#5b9be0;--good:#5cb883;--bad:#e07a68}}\
*{box-sizing:border-box}body{margin:0 auto;max-width:64rem;padding:2rem 1.25rem 4rem;background:var(--paper);\
color:var(--ink);font:16px/1.5 system-ui,sans-serif}\
h1{font-size:1.8rem;line-height:1.2;margin:0 0 .5rem}h2{margin:3rem 0 .5rem;padding-top:1rem;\
border-top:1px solid var(--rule)}h3{margin:2rem 0 .25rem;font-size:1.05rem}\
p{margin:.4rem 0;max-width:48rem}.soft{color:var(--soft)}.tag{font-size:.75rem;font-weight:400;color:var(--soft);\
border:1px solid var(--rule);border-radius:.6rem;padding:.05rem .5rem;margin-left:.4rem}\
nav a{margin-right:1rem}a{color:var(--ours)}.wide{overflow-x:auto}\
table{border-collapse:collapse;font-size:.85rem;margin:.5rem 0}th,td{padding:.2rem .7rem .2rem 0;text-align:right;\
border-bottom:1px solid var(--rule);vertical-align:top}th{font-weight:600;color:var(--soft)}\
td:first-child,th:first-child{text-align:left}.text td{text-align:left}\
svg{width:100%;height:auto;display:block;margin:.5rem 0}svg text{font:13px system-ui,sans-serif;fill:var(--ink)}\
.original{fill:var(--original)}.alternative{fill:var(--alternative)}.ours{fill:var(--ours)}\
.whisker{stroke:var(--ink);stroke-width:1.5;fill:none}.axis{stroke:var(--rule)}\
.key span{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin:0 .3rem 0 1rem}\
.good{color:var(--good)}.bad{color:var(--bad)}\
@media print{body{max-width:none;padding:0;font-size:11px}h2{break-before:page}section{break-inside:avoid}nav{display:none}}";

/// Width of a chart in its own units, and where bars begin and end.
const WIDTH: f64 = 960.0;
const LEFT: f64 = 270.0;
const RIGHT: f64 = 800.0;
const ROW: f64 = 26.0;

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn class(of: Role) -> &'static str {
    match of {
        Role::Original => "original",
        Role::Alternative => "alternative",
        Role::Ours => "ours",
    }
}

/// Returns a bar for each line, with a whisker from the least round to the greatest.
fn bars(chart: &Chart, measured: &[(&Line, &Figure)]) -> String {
    let (scale, digits) = unit(chart);
    let of = |figure: &Figure| {
        let (least, middle, greatest) = spread(&figure.values(chart.column));
        (least / scale, middle / scale, greatest / scale)
    };
    let greatest = measured.iter().map(|(_, figure)| of(figure).2).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let x = |value: f64| LEFT + (RIGHT - LEFT) * (value.max(0.0) / greatest);
    let height = ROW * measured.len() as f64 + 8.0;
    let mut text = format!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">\
         <line class=\"axis\" x1=\"{LEFT}\" y1=\"0\" x2=\"{LEFT}\" y2=\"{height}\"/>",
        escaped(chart.title)
    );
    for (at, (line, figure)) in measured.iter().enumerate() {
        let (least, middle, most) = of(figure);
        let top = ROW * at as f64 + 4.0;
        let (centre, base) = (top + ROW / 2.0 - 2.0, top + ROW / 2.0 + 3.0);
        let _ = write!(
            text,
            "<text x=\"{:.0}\" y=\"{base:.1}\" text-anchor=\"end\">{}</text>\
             <rect class=\"{}\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"2\"/>\
             <path class=\"whisker\" d=\"M{:.1} {centre:.1}H{:.1}M{:.1} {:.1}v8M{:.1} {:.1}v8\"/>\
             <text x=\"{:.1}\" y=\"{base:.1}\">{} {}</text>",
            LEFT - 8.0,
            escaped(line.name),
            class(line.role),
            x(middle) - LEFT,
            ROW - 6.0,
            x(least),
            x(most),
            x(least),
            centre - 4.0,
            x(most),
            centre - 4.0,
            x(most) + 8.0,
            grouped(middle, digits),
            heading(chart)
        );
    }
    text + "</svg>"
}

fn figures(results: &Results, chart: &Chart, measured: &[(&Line, &Figure)]) -> String {
    let columns = columns_of(results, chart);
    let headings: String = columns.iter().map(|(_, heading, ..)| format!("<th>{heading}</th>")).collect();
    let mut text = format!(
        "<div class=\"wide\"><table><tr><th></th><th></th><th>{}</th><th>: first</th>{headings}</tr>",
        heading(chart)
    );
    for (line, figure) in measured {
        let times = beside(chart, figure, measured[0].1);
        let times = times.map_or_else(|| "–".to_owned(), |times| format!("{times:.2}"));
        let _ = write!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{times}</td>",
            escaped(line.name),
            role(line.role),
            cell(chart, figure)
        );
        for (name, _, scale, digits) in &columns {
            let values = figure.values(name);
            let value =
                if values.is_empty() { "–".into() } else { grouped(median(&values) / scale, *digits) };
            let _ = write!(text, "<td>{value}</td>");
        }
        text += "</tr>";
    }
    for (line, why) in chart.left_out(results) {
        let (name, role, why) = (escaped(line.name), role(line.role), escaped(why));
        let width = columns.len() + 2;
        let _ = write!(
            text,
            "<tr class=\"soft\"><td>{name}</td><td>{role}</td><td colspan=\"{width}\">not measured: {why}</td></tr>"
        );
    }
    text + "</table></div>"
}

fn section(results: &Results, chart: &Chart) -> String {
    let guest = if chart.is_in_guest() { "<span class=\"tag\">in a guest</span>" } else { "" };
    let mut text = format!("<section><h3>{}{guest}</h3>", escaped(chart.title));
    let measured: Vec<(&Line, &Figure)> =
        chart.lines.iter().filter_map(|line| Some((line, chart.figure(results, line)?))).collect();
    if measured.is_empty() {
        let _ = write!(text, "<p class=\"soft\">{}</p></section>", escaped(&missing(results, chart)));
        return text;
    }
    text += &bars(chart, &measured);
    let _ = write!(text, "<p class=\"soft\">{}", escaped(chart.note));
    for order in chart.orders {
        let sentence = judged(results, chart, order);
        let class = if sentence.contains(": reproduced") { "good" } else { "bad" };
        let _ = write!(text, " <span class=\"{class}\">{}.</span>", escaped(&sentence));
    }
    text += "</p>";
    text += &figures(results, chart, &measured);
    text + "</section>"
}

/// Returns the whole page.
pub(super) fn page(results: &Results) -> String {
    let mut text = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>Blockyard: five texts, measured again</title><style>{STYLE}</style></head><body>\
         <h1>Five texts on virtual block devices, measured again</h1><p class=\"soft\">"
    );
    let facts: Vec<String> =
        results.machine.iter().map(|(name, value)| format!("{name}: {}", escaped(value))).collect();
    let _ = write!(
        text,
        "{}</p><p>A bar is the median of the rounds, a whisker reaches from the least to the greatest. A ratio is the \
         median of the rounds' own ratios to the first line of its table. <em>In a guest</em> marks another kernel \
         under emulation: its ratios hold, its rates do not.</p>\
         <p class=\"key\"><span style=\"background:var(--original)\"></span>the original\
         <span style=\"background:var(--alternative)\"></span>the usual alternative\
         <span style=\"background:var(--ours)\"></span>Blockyard</p><nav>",
        facts.join(" · ")
    );
    for table in TABLES {
        let _ = write!(text, "<a href=\"#{}\">{}</a>", table.id, escaped(table.title));
    }
    text += "</nav>";
    for table in TABLES {
        let _ = write!(
            text,
            "<h2 id=\"{}\">{}</h2><p>{}</p><div class=\"wide\"><table class=\"text\"><tr><th>published</th><th></th></tr>",
            table.id,
            escaped(table.title),
            escaped(table.origin)
        );
        for line in table.published {
            let _ = write!(text, "<tr><td>{}</td><td>{}</td></tr>", escaped(line.name), escaped(line.figure));
        }
        text += "</table></div>";
        for chart in table.charts {
            text += &section(results, chart);
        }
    }
    text + "</body></html>\n"
}

#[cfg(test)]
mod tests {
    use super::super::results::example;
    use super::*;

    #[test]
    fn the_page_needs_nothing_else_and_foreign_text_is_escaped() {
        let text = page(&example());
        assert!(text.contains("6.1 &lt;test&gt;"), "the kernel's name");
        for absent in ["http", "<script", "url(", "NaN"] {
            assert!(!text.contains(absent), "{absent}");
        }
        assert_eq!(text.matches("<svg").count(), 1, "the chart of fabrics with a figure");
        assert_eq!(text.matches("<section>").count(), text.matches("</section>").count());
    }

    #[test]
    fn a_bar_ends_at_its_median_and_the_whisker_at_the_extremes() {
        let results = example();
        let chart = &TABLES[0].charts[0];
        let line = &chart.lines[3];
        let text = bars(chart, &[(line, results.find("fabrics", "file", "randrw-files").unwrap())]);
        // 180 to 200, median 190, on 530 units for 200.
        assert!(
            text.contains("width=\"503.5\"") && text.contains("M747.0 ") && text.contains("H800.0"),
            "{text}"
        );
    }
}
