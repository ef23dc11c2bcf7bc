//! What is on the screen: a function of the model, the theme and the size, and of nothing else.

use super::columns::{BAR, Column, Tone, columns, fit};
use super::detail::{self, Lines};
use super::input::HELP;
use super::model::{Model, Screen};
use super::numbers::{bytes, count};
use super::rows::Row;
use super::theme::Theme;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

/// From so many lines on, the device that is picked out is shown below the list.
const TALL: u16 = 40;

/// Draws everything. How many lines of a device are above the screen: as many as the model says, if there are.
pub(super) fn draw(frame: &mut Frame<'_>, model: &Model, theme: Theme) -> usize {
    let parts = [Constraint::Length(2), Constraint::Min(0), Constraint::Length(1)];
    let [head, body, foot] = Layout::vertical(parts).areas(frame.area());
    frame.render_widget(Paragraph::new(header(model, theme, head.width.into())), head);
    frame.render_widget(Paragraph::new(footer(model, theme)), foot);
    match &model.screen {
        _ if model.help => frame.render_widget(Paragraph::new(help(theme)), body),
        Screen::Device(_) => return device(frame, body, model.shown(), model, theme),
        Screen::Devices if body.height >= TALL && !model.rows.is_empty() => {
            let wanted = (model.rows.len() as u16).saturating_add(2).min(body.height / 2);
            let [list, below] =
                Layout::vertical([Constraint::Length(wanted), Constraint::Min(0)]).areas(body);
            devices(frame, list, model, theme);
            let _ = device(frame, below, model.rows.get(model.selected_at()), model, theme);
        }
        Screen::Devices => devices(frame, body, model, theme),
    }
    model.scroll
}

fn header(model: &Model, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let plural = |n: usize, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
    let left = format!(
        "blockyard top  {} of {}",
        plural(model.rows.len(), "device", "devices"),
        plural(model.processes, "process", "processes"),
    );
    let every = format!("every {} s  {}", model.interval_ms as f64 / 1000.0, model.clock);
    let gap = width.saturating_sub(left.chars().count() + every.chars().count()).max(2);
    let mut first = vec![Span::styled(left, theme.head()), Span::raw(" ".repeat(gap)), Span::raw(every)];
    if model.paused {
        first.insert(1, Span::styled("  paused", theme.bad()));
        first[2] = Span::raw(" ".repeat(gap.saturating_sub(8).max(1)));
    }
    // What a silent process does is not known.
    let sum = |of: fn(&Row) -> f64| model.rows.iter().filter(|row| !row.silent).map(of).sum::<f64>();
    let mut second = vec![Span::raw(format!(
        "{} IOPS  read {}/s  write {}/s  {} in flight",
        count(sum(Row::iops)),
        bytes(sum(|row| row.rates.read_bytes)),
        bytes(sum(|row| row.rates.written_bytes)),
        count(sum(|row| row.in_flight as f64)),
    ))];
    if model.silent > 0 {
        let text = format!("  {} not answering", plural(model.silent, "process is", "processes are"));
        second.push(Span::styled(text, theme.bad()));
    }
    vec![Line::from(first), Line::from(second)]
}

fn footer(model: &Model, theme: Theme) -> Line<'static> {
    if let Some(order) = &model.asks {
        let what = if order.fail { "Fail" } else { "Reinstate" };
        let text = format!("{what} the path {} of {}? y, or any other key for no", order.path, order.device);
        return Line::styled(text, theme.bad());
    }
    if !model.note.is_empty() {
        return Line::styled(fit(&model.note, 512), theme.head());
    }
    let keys: &[(&str, &str)] = match model.screen {
        _ if model.help => &[("any key", "back")],
        Screen::Devices => &[
            ("h", "help"),
            ("Enter", "show"),
            ("ibldeun", "sort"),
            ("r", "reverse"),
            ("p", "pause"),
            ("q", "quit"),
        ],
        Screen::Device(_) => &[
            ("h", "help"),
            ("Esc", "back"),
            ("f", "fail path"),
            ("r", "reinstate"),
            ("PgDn", "more"),
            ("p", "pause"),
            ("q", "quit"),
        ],
    };
    let spans = keys
        .iter()
        .flat_map(|(key, what)| [Span::styled(*key, theme.key()), Span::raw(format!(" {what}  "))]);
    Line::from(spans.collect::<Vec<_>>())
}

fn help(theme: Theme) -> Vec<Line<'static>> {
    let row = |(keys, what): &(&'static str, &'static str)| {
        Line::from(vec![Span::styled(format!("{keys:>19}"), theme.key()), Span::raw(format!("  {what}"))])
    };
    let about = "Rates and latencies are of the last interval, errors since the start.";
    HELP.iter().map(row).chain([Line::raw(""), Line::styled(about, theme.quiet())]).collect()
}

fn devices(frame: &mut Frame<'_>, area: Rect, model: &Model, theme: Theme) {
    let width = usize::from(area.width);
    let (columns, name_width, stack_width) = columns(width);
    let mark = |title| if model.sort.title() == title { sort_mark(model, theme) } else { "" };
    let mut titles = format!("{:<name_width$}", format!("DEVICE{}", mark("DEVICE")));
    for column in &columns {
        let width = if column.width == 0 { stack_width } else { column.width };
        let title = format!("{}{}", column.title, mark(column.title));
        titles += &if column.left { format!(" {title:<width$}") } else { format!("{title:>width$}") };
    }
    let mut lines = vec![Line::styled(format!("{titles:<width$}"), theme.titles())];
    if model.rows.is_empty() {
        let text = if model.looked { "There are no devices (blockyard add)." } else { "" };
        lines.push(Line::styled(text, theme.quiet()));
    }
    let room = usize::from(area.height).saturating_sub(1).max(1);
    let selected = model.selected_at();
    // As few lines off the top as show the one that is picked out.
    let first = (selected + 1).saturating_sub(room);
    for (at, row) in model.rows.iter().enumerate().skip(first).take(room) {
        lines.push(device_line(row, &columns, name_width, stack_width, at == selected, theme));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn sort_mark(model: &Model, theme: Theme) -> &'static str {
    match (theme.unicode, model.reversed) {
        (true, false) => "▼",
        (true, true) => "▲",
        (false, false) => "v",
        (false, true) => "^",
    }
}

fn device_line(
    row: &Row,
    columns: &[&Column],
    name_width: usize,
    stack_width: usize,
    selected: bool,
    theme: Theme,
) -> Line<'static> {
    let name = fit(&row.info.name, name_width);
    let name_style = if selected { theme.selected() } else { Style::new() };
    let mut spans = vec![Span::styled(format!("{name:<name_width$}"), name_style)];
    if row.silent {
        spans.push(Span::styled(" does not answer", theme.bad()));
        return Line::from(spans);
    }
    for column in columns {
        let cell = (column.cell)(row);
        let style = match cell.tone {
            Tone::Plain => Style::new(),
            Tone::Quiet => theme.quiet(),
            Tone::Bad => theme.bad(),
        };
        if column.width == 0 {
            spans.push(Span::styled(
                format!(" {}", fit(&cell.text, stack_width.saturating_sub(1))),
                theme.quiet(),
            ));
            continue;
        }
        let mut width = column.width;
        if let Some(share) = cell.bar {
            spans.push(Span::raw(" "));
            spans.push(Span::styled(theme.bar(share, BAR), theme.filled(share)));
            width -= BAR + 1;
        }
        spans.push(Span::styled(format!("{:>width$}", fit(&cell.text, width)), style));
    }
    Line::from(spans)
}

/// A device's lines; how many of them are above the screen.
fn device(frame: &mut Frame<'_>, area: Rect, row: Option<&Row>, model: &Model, theme: Theme) -> usize {
    let Some(row) = row else { return 0 };
    let (picked, wanted) = match model.screen {
        Screen::Device(_) => (model.shown_path(), model.scroll),
        Screen::Devices => (None, 0),
    };
    let Lines { left, right, picked } = detail::lines(row, picked, usize::from(area.width), theme);
    let room = usize::from(area.height);
    let most = |lines: &[Line<'_>]| lines.len().saturating_sub(room);
    let wanted = match picked.filter(|_| model.follow) {
        Some(line) => wanted.clamp((line + 1).saturating_sub(room), line),
        None => wanted,
    };
    let scroll = wanted.min(most(&left).max(most(&right)));
    let parts = if right.is_empty() {
        [Constraint::Percentage(100), Constraint::Length(0)]
    } else {
        [Constraint::Percentage(50), Constraint::Percentage(50)]
    };
    let areas: [Rect; 2] = Layout::horizontal(parts).areas(area);
    for (lines, area) in [left, right].into_iter().zip(areas) {
        let at = u16::try_from(scroll.min(most(&lines))).unwrap_or(u16::MAX);
        frame.render_widget(Paragraph::new(lines).scroll((at, 0)), area);
    }
    scroll
}
