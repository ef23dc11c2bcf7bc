//! The manual: commands with their options and examples, and the topics, as one page or as a page for each.

use super::{Block, Topic, examples, topics};
use clap::Command;
use clap_mangen::Man;
use std::io;

/// Writes the page as roff.
///
/// # Errors
/// None in practice, as the page is written to memory; the renderer's signature has them.
pub(crate) fn page() -> io::Result<String> {
    let mut command = crate::args::Cli::command_for_pages();
    command.build();
    let man = Man::new(command.clone())
        .manual("Blockyard")
        .source(format!("blockyard {}", env!("CARGO_PKG_VERSION")));
    let mut out = Vec::new();
    man.render_title(&mut out)?;
    man.render_name_section(&mut out)?;
    out.extend_from_slice(b".SH SYNOPSIS\n.B blockyard\n.I COMMAND\n.RI [ OPTIONS ]\n");
    man.render_description_section(&mut out)?;
    let mut page = String::from_utf8_lossy(&out).into_owned();
    // Left-aligned, since terms are long and cannot be broken.
    page += ".ad l\n.SH COMMANDS\n";
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        page += &command_section(sub)?;
    }
    for topic in topics() {
        page += &format!(".SH {}\n", escaped(&topic.name.to_uppercase()));
        topic.blocks.iter().for_each(|block| page += &block_of(block));
    }
    page += ".SH EXAMPLES\n";
    for (line, about) in ["serve", "add"].iter().flat_map(|name| examples::of(name)) {
        page += &example(line, about);
    }
    Ok(ascii(&page))
}

/// Returns a page for each command (section 1) and each topic (section 7; files in section 5), and an overview, by file
/// name.
///
/// # Errors
/// As [`page`].
pub(crate) fn pages() -> io::Result<Vec<(String, String)>> {
    let mut command = crate::args::Cli::command_for_pages();
    command.build();
    let shown: Vec<&Command> =
        command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help").collect();
    let topics = topics();
    let mut pages = vec![("blockyard.1".to_owned(), ascii(&overview(&command, &shown, &topics)?))];
    for sub in &shown {
        let name = format!("blockyard-{}", sub.get_name());
        let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
        let see = see_also(topics.iter().map(|topic| (topic.name, section_of(topic))));
        let body = command_section(sub)?;
        // The subsection's heading is the usage.
        let (usage, body) = body.split_once('\n').unwrap_or_default();
        let usage = usage.trim_start_matches(".SS ").trim_matches('"');
        let text =
            format!("{}.SH SYNOPSIS\n{usage}\n.ad l\n.SH DESCRIPTION\n{body}{see}", title(&name, 1, &about));
        pages.push((format!("{name}.1"), ascii(&text)));
    }
    for topic in &topics {
        let (name, section) = (format!("blockyard-{}", topic.name), section_of(topic));
        let mut text = title(&name, section, topic.about) + ".ad l\n.SH DESCRIPTION\n";
        topic.blocks.iter().for_each(|block| text += &block_of(block));
        text += &see_also([("serve", 1), ("up", 1)].into_iter());
        pages.push((format!("{name}.{section}"), ascii(&text)));
    }
    Ok(pages)
}

/// Returns the section of a topic's page: 5 for the format of a file, 7 for everything else.
fn section_of(topic: &Topic) -> u8 {
    if topic.name == "topology" { 5 } else { 7 }
}

fn title(name: &str, section: u8, about: &str) -> String {
    format!(
        ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n.TH {} {section} \"\" \"blockyard {}\" Blockyard\n\
         .SH NAME\n{} \\- {}\n",
        escaped(name),
        env!("CARGO_PKG_VERSION"),
        escaped(name),
        escaped(about)
    )
}

fn see_also<'a>(others: impl Iterator<Item = (&'a str, u8)>) -> String {
    let others = others.map(|(name, section)| format!(".BR blockyard\\-{} ({section})", escaped(name)));
    let all: Vec<String> = std::iter::once(".BR blockyard (1)".to_owned()).chain(others).collect();
    format!(".SH SEE ALSO\n{}\n", all.join(",\n"))
}

/// Formats the page of `blockyard` itself, which lists commands and topics with their pages.
fn overview(command: &Command, shown: &[&Command], topics: &[Topic]) -> io::Result<String> {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut out = Vec::new();
    Man::new(command.clone()).render_description_section(&mut out)?;
    let mut text = title("blockyard", 1, &about);
    text += ".SH SYNOPSIS\n.B blockyard\n.I COMMAND\n.RI [ OPTIONS ]\n.ad l\n";
    text += &String::from_utf8_lossy(&out);
    text += ".SH COMMANDS\n";
    for sub in shown {
        let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
        text += &page_entry(sub.get_name(), 1, &about);
    }
    text += ".SH TOPICS\n";
    for topic in topics {
        text += &page_entry(topic.name, section_of(topic), topic.about);
    }
    text += ".SH EXAMPLES\n";
    for (line, about) in ["serve", "add"].iter().flat_map(|name| examples::of(name)) {
        text += &example(line, about);
    }
    Ok(text)
}

fn page_entry(name: &str, section: u8, about: &str) -> String {
    format!(".TP\n.BR blockyard\\-{} ({section})\n{}\n", escaped(name), escaped(about))
}

/// Replaces characters beyond ASCII by groff's names for them: troff reads bytes, in no encoding but
/// Latin-1.
fn ascii(page: &str) -> String {
    let mut out = String::with_capacity(page.len());
    for character in page.chars() {
        match character {
            '\0'..='\x7f' => out.push(character),
            beyond => out += &format!("\\[u{:04X}]", u32::from(beyond)),
        }
    }
    out
}

/// Formats a command's usage, description, options, examples and notes as one subsection.
fn command_section(command: &Command) -> io::Result<String> {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").lines().map(str::trim).collect::<Vec<_>>();
    let mut out = Vec::new();
    let man = Man::new(command.clone());
    man.render_description_section(&mut out)?;
    if command.get_arguments().any(|argument| !argument.is_hide_set()) {
        man.render_options_section(&mut out)?;
    }
    let body = String::from_utf8_lossy(&out).into_owned();
    let mut text = format!(".SS \"{}\"\n", escaped(usage[0]));
    for more in &usage[1..] {
        text += &format!(".br\n{}\n", escaped(more));
    }
    if usage.len() > 1 {
        text += ".PP\n";
    }
    text.extend(body.lines().filter(|line| !line.starts_with(".SH ")).map(|line| format!("{line}\n")));
    let examples = examples::of(command.get_name());
    if !examples.is_empty() {
        text += ".PP\n\\fBExamples:\\fR\n";
    }
    examples.iter().for_each(|(line, about)| text += &example(line, about));
    if let Some(notes) = command.get_after_help() {
        for paragraph in notes.to_string().split("\n\n") {
            let is_prose = paragraph.lines().all(|line| !line.starts_with(' '));
            text += if is_prose { ".PP\n" } else { ".PP\n.nf\n" };
            text.extend(paragraph.lines().map(|line| format!("{}\n", escaped(line))));
            text += if is_prose { "" } else { ".fi\n" };
        }
    }
    Ok(text)
}

fn example(line: &str, about: &str) -> String {
    format!(".TP\n\\f(CR{}\\fR\n{}\n", escaped(line), escaped(about))
}

/// Formats a term with its explanation. A long term may be broken before an option.
fn term_of(term: &str, about: &str) -> String {
    format!(".TP\n\\fB{}\\fR\n{}\n", escaped(term).replace("[,", "\\:[,"), escaped(about))
}

fn block_of(block: &Block) -> String {
    match block {
        Block::Heading(words) => format!(".SS {}\n", escaped(words)),
        Block::Text(words) => format!(".PP\n{}\n", escaped(words)),
        Block::Lines(lines) => {
            let lines: String = lines.lines().map(|line| format!("{}\n", escaped(line))).collect();
            format!(".PP\n.nf\n.RS\n{lines}.RE\n.fi\n")
        }
        Block::Terms(terms) => terms.iter().map(|(term, about)| term_of(term, about)).collect(),
        Block::Options(rows) => {
            rows.iter().map(|row| term_of(&row.usage(), &row.about_with_default())).collect()
        }
    }
}

/// Escapes text for roff: a minus does not become a hyphen, and no line starts a macro.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-").replace('"', "\\(dq");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_and_topic_has_a_page_with_a_name() {
        let pages = pages().expect("they are written to memory");
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        for name in ["blockyard.1", "blockyard-serve.1", "blockyard-stacks.7", "blockyard-topology.5"] {
            assert!(names.contains(&name), "{name} is missing: {names:?}");
        }
        for topic in topics() {
            assert!(names.contains(&format!("blockyard-{}.{}", topic.name, section_of(&topic)).as_str()));
        }
        for (name, text) in &pages {
            let (stem, section) = name.split_once('.').expect("a section");
            let stem = stem.replace('-', "\\-");
            assert!(text.contains(&format!(".TH {stem} {section} ")), "{name}: {text}");
            assert!(text.contains(&format!(".SH NAME\n{stem} \\- ")), "{name}");
        }
    }
}
