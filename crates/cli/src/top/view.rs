//! Draws the screen from the model, the theme and the size, and nothing else.

use super::columns::{BAR, Column, Tone, columns, fit};
use super::detail::{self, Lines};
use super::input::HELP;
use super::model::{Model, Screen};
use super::numbers::{bytes, count};
use super::rows::{Row, Sort};
use super::theme::Theme;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

/// Screen height from which the selected device gets half of the lines, whatever the length of the list.
const TALL: u16 = 40;
/// Least number of lines below the list in which the selected device is shown.
const PANE_MIN: u16 = 8;
/// Screen height from which the sort keys have a line of their own.
const SORT_LINE: u16 = 10;

/// Draws the screen. Returns how many lines of a device are above its upper edge: the scroll position of
/// the model, limited by the number of lines.
pub(super) fn draw(frame: &mut Frame<'_>, model: &Model, theme: Theme) -> usize {
    let is_list = model.screen == Screen::Devices && !model.help;
    let foot_lines = if is_list && frame.area().height >= SORT_LINE { 2 } else { 1 };
    let parts = [Constraint::Length(2), Constraint::Min(0), Constraint::Length(foot_lines)];
    let [head, body, foot] = Layout::vertical(parts).areas(frame.area());
    frame.render_widget(Paragraph::new(header(model, theme, head.width.into())), head);
    let mut last = vec![footer(model, theme)];
    if foot_lines == 2 {
        last.insert(0, sort_keys(model, theme));
    }
    frame.render_widget(Paragraph::new(last), foot);
    match &model.screen {
        _ if model.help => frame.render_widget(Paragraph::new(help(theme)), body),
        Screen::Device(_) => return device(frame, body, model.shown(), model, theme),
        Screen::Devices => {
            let wanted = (model.listed().len() as u16).saturating_add(2);
            let list = if body.height >= TALL { wanted.min(body.height / 2) } else { wanted };
            let below = body.height.saturating_sub(list);
            if below < PANE_MIN || model.selected_row().is_none() {
                devices(frame, body, model, theme);
                return model.scroll;
            }
            let [list, below] =
                Layout::vertical([Constraint::Length(list), Constraint::Length(below)]).areas(body);
            devices(frame, list, model, theme);
            let _ = device(frame, below, model.selected_row(), model, theme);
        }
    }
    model.scroll
}

/// The sort keys, with the current order in bold.
fn sort_keys(model: &Model, theme: Theme) -> Line<'static> {
    let mut spans = vec![Span::raw("sort  ")];
    for (key, name, sort) in Sort::KEYS {
        let style = if sort == model.sort { theme.head() } else { Style::new() };
        spans.push(Span::styled(key, theme.key()));
        spans.push(Span::styled(format!(" {name}"), style));
        spans.push(Span::raw("  "));
    }
    spans.push(Span::styled("r", theme.key()));
    spans.push(Span::raw(" reverse"));
    Line::from(spans)
}

fn header(model: &Model, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let plural = |n: usize, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
    let mut left = format!(
        "blockyard top  {} of {}",
        plural(model.rows.len(), "device", "devices"),
        plural(model.processes, "process", "processes"),
    );
    if !model.filter.is_empty() {
        left += &format!(", {} with \"{}\"", model.listed().len(), fit(&model.filter, 20));
    }
    let every = format!("every {} s  {}", model.interval_ms as f64 / 1000.0, model.clock);
    let gap = width.saturating_sub(left.chars().count() + every.chars().count()).max(2);
    let mut first = vec![Span::styled(left, theme.head()), Span::raw(" ".repeat(gap)), Span::raw(every)];
    if model.paused {
        first.insert(1, Span::styled("  paused", theme.bad()));
        first[2] = Span::raw(" ".repeat(gap.saturating_sub(8).max(1)));
    }
    // The values of a silent process are not current.
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
    if model.typing {
        let text = format!("filter: {}_  (Enter keeps it, Esc removes it)", fit(&model.filter, 40));
        return Line::styled(text, theme.head());
    }
    if !model.note.is_empty() {
        return Line::styled(fit(&model.note, 512), theme.head());
    }
    let has_paths = model.shown().is_some_and(|row| !row.paths.is_empty());
    let keys: &[(&str, &str)] = match model.screen {
        _ if model.help => &[("any key", "back")],
        Screen::Devices => &[
            ("h", "help"),
            ("Enter", "show"),
            ("/", "filter"),
            ("+ -", "interval"),
            ("p", "pause"),
            ("q", "quit"),
        ],
        Screen::Device(_) if has_paths => &[
            ("h", "help"),
            ("Esc", "back"),
            ("f", "fail path"),
            ("r", "reinstate"),
            ("PgDn", "more"),
            ("p", "pause"),
            ("q", "quit"),
        ],
        Screen::Device(_) => {
            &[("h", "help"), ("Esc", "back"), ("PgDn", "more"), ("p", "pause"), ("q", "quit")]
        }
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
    let listed = model.listed();
    if listed.is_empty() {
        let text = match (model.sampled, model.rows.is_empty()) {
            (false, _) => "",
            (true, true) => "There are no devices (blockyard add).",
            (true, false) => "No device matches the filter (Esc removes it).",
        };
        lines.push(Line::styled(text, theme.quiet()));
    }
    let room = usize::from(area.height).saturating_sub(1).max(1);
    let selected = model.selected_at();
    // Scrolled by as few lines as show the selected device.
    let first = (selected + 1).saturating_sub(room);
    for (at, row) in listed.into_iter().enumerate().skip(first).take(room) {
        // The whole line is reversed, to the edge of the screen.
        let base = if at == selected { theme.selected() } else { Style::new() };
        let mut line = device_line(row, &columns, name_width, stack_width, base, theme);
        line.spans.push(Span::styled(" ".repeat(width.saturating_sub(line.width())), base));
        lines.push(line);
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
    base: Style,
    theme: Theme,
) -> Line<'static> {
    let name = fit(&row.info.name, name_width);
    let mut spans = vec![Span::styled(format!("{name:<name_width$}"), base)];
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
        let style = style.patch(base);
        if column.width == 0 {
            spans.push(Span::styled(
                format!(" {}", fit(&cell.text, stack_width.saturating_sub(1))),
                theme.quiet().patch(base),
            ));
            continue;
        }
        let mut width = column.width;
        if let Some(share) = cell.bar {
            spans.push(Span::styled(" ", base));
            // The bar is not reversed: it would show the empty part as filled.
            spans.push(Span::styled(theme.bar(share, BAR), theme.filled(share)));
            width -= BAR + 1;
        }
        spans.push(Span::styled(format!("{:>width$}", fit(&cell.text, width)), style));
    }
    Line::from(spans)
}

/// Draws the details of a device. Returns how many lines are above the upper edge.
fn device(frame: &mut Frame<'_>, area: Rect, row: Option<&Row>, model: &Model, theme: Theme) -> usize {
    let Some(row) = row else { return 0 };
    let (picked, wanted) = match model.screen {
        Screen::Device(_) => (model.shown_path(), model.scroll),
        Screen::Devices => (None, 0),
    };
    let Lines { left, right, picked } =
        detail::lines(row, model.past(&row.info.name), picked, usize::from(area.width), theme);
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
