//! `blockyard help TOPIC`, examples of every command, and the manual page.
//!
//! A topic consists of [`Block`]s, which are formatted for the terminal's width here, as roff in [`man`], and as Markdown in
//! [`mod@reference`]. Topics that list layers, backends, exports, targets, schedulers or limits are generated from their rows.

mod examples;
pub(crate) mod man;
pub(crate) mod reference;
mod topics;

use crate::args::Cli;
use crate::failure::Failure;
use crate::pager::print_paged;
use clap::builder::StyledStr;
use clap::{Command, CommandFactory};
use engine::spec::OptionRow;
use std::fmt::Write;
use std::process::ExitCode;

pub(crate) use topics::all as topics;

/// The widest text, in columns.
pub(crate) const WIDTH_MAX: usize = 100;
/// The column where explanations begin, where their terms leave room.
const EXPLAINED_AT: usize = 26;

/// A subject without a command of its own.
pub(crate) struct Topic {
    /// The argument of `blockyard help`.
    pub(crate) name: &'static str,
    /// The purpose, in one line.
    pub(crate) about: &'static str,
    pub(crate) blocks: Vec<Block>,
}

/// A part of a topic.
pub(crate) enum Block {
    Heading(String),
    Text(String),
    /// Terms with their explanations.
    Terms(Vec<(String, String)>),
    /// Options with their defaults.
    Options(Vec<OptionRow>),
    /// Preformatted lines: commands, files.
    Lines(String),
}

/// Returns the command table with examples and the list of topics in its help.
pub(crate) fn command() -> Command {
    let mut command = Cli::command().after_help(topic_list());
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    for name in names {
        command = command.mut_subcommand(&name, |sub| {
            let notes = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
            match examples::of(&name) {
                [] => sub,
                examples => sub.after_help(with_examples(&notes, examples)),
            }
        });
    }
    command
}

fn topic_list() -> StyledStr {
    let mut text = heading("Topics, for blockyard help TOPIC");
    for topic in topics() {
        let _ = writeln!(text, "  {:<13}{}", topic.name, topic.about);
    }
    text.trim_end().to_owned().into()
}

fn with_examples(notes: &str, examples: &[(&str, &str)]) -> StyledStr {
    let mut text = heading("Examples");
    for (line, about) in examples {
        let _ = writeln!(text, "  {line}\n      {about}");
    }
    if !notes.is_empty() {
        text += "\n";
        notes.split("\n\n").for_each(|paragraph| text += &as_it_is_or_wrapped(paragraph));
    }
    text.trim_end().to_owned().into()
}

/// Wraps prose to the terminal; indented lines stay as they are.
fn as_it_is_or_wrapped(paragraph: &str) -> String {
    let is_prose = |line: &str| !line.starts_with(' ');
    if paragraph.lines().all(is_prose) {
        let prose = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
        return format!("{}\n\n", textwrap::fill(&prose, whole_words(width())));
    }
    format!("{paragraph}\n\n")
}

/// Formats a heading in the parser's style.
fn heading(text: &str) -> String {
    let style = crate::args::STYLES.get_header();
    format!("{style}{}:{style:#}\n", text.trim_end_matches(':'))
}

/// The width of text in columns: that of the terminal, or `COLUMNS`, or 100 without either.
fn width() -> usize {
    let of_terminal = || rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col.into());
    let of_environment = || std::env::var("COLUMNS").ok()?.parse().ok();
    of_terminal().or_else(of_environment).filter(|width| *width > 0).unwrap_or(WIDTH_MAX).clamp(40, WIDTH_MAX)
}

/// `blockyard help [COMMAND|TOPIC]`.
pub(crate) fn help(arguments: &[String]) -> Result<ExitCode, Failure> {
    let mut command = command();
    command.build();
    let Some(word) = arguments.first() else {
        print_paged(&command.render_help());
        return Ok(ExitCode::SUCCESS);
    };
    if let Some(topic) = topics().into_iter().find(|topic| topic.name == word) {
        print_paged(&text_of(&topic, width()).into());
        return Ok(ExitCode::SUCCESS);
    }
    let mut found = &mut command;
    for word in arguments {
        let known: Vec<String> = names(found);
        found = match found.find_subcommand_mut(word) {
            Some(found) => found,
            None => {
                let near = options::did_you_mean(word, known.iter().map(String::as_str));
                let why = format!("no such command or topic ({near}see blockyard help)");
                return Err(Failure::usage("help", word, why));
            }
        };
    }
    print_paged(&found.render_help());
    Ok(ExitCode::SUCCESS)
}

/// Returns the arguments of `help`: visible commands and topics.
fn names(command: &Command) -> Vec<String> {
    let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    let topics = topics().into_iter().map(|topic| topic.name.to_owned());
    shown.map(|sub| sub.get_name().to_owned()).chain(topics).collect()
}

/// Formats a topic for a terminal of that width.
fn text_of(topic: &Topic, width: usize) -> String {
    let mut text = String::new();
    let mut is_under_heading = true;
    for block in &topic.blocks {
        if !is_under_heading {
            text.push('\n');
        }
        is_under_heading = matches!(block, Block::Heading(_));
        match block {
            Block::Heading(words) => text += heading(words).as_str(),
            Block::Text(words) => {
                let _ = writeln!(text, "{}", textwrap::fill(words, whole_words(width)));
            }
            Block::Terms(terms) => terms.iter().for_each(|(term, about)| text += &entry(term, about, width)),
            Block::Options(rows) => {
                rows.iter().for_each(|row| text += &entry(&row.usage(), &row.about_with_default(), width))
            }
            Block::Lines(lines) => lines.lines().for_each(|line| text += &format!("  {line}\n")),
        }
    }
    text
}

/// Wraps at blanks only: words with hyphens are options and names.
fn whole_words(width: usize) -> textwrap::Options<'static> {
    textwrap::Options::new(width)
        .word_separator(textwrap::WordSeparator::AsciiSpace)
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
        .break_words(false)
}

/// Formats a term with its explanation beside or below it.
fn entry(term: &str, about: &str, width: usize) -> String {
    let literal = crate::args::STYLES.get_literal();
    let indent = " ".repeat(EXPLAINED_AT.min(width / 3));
    let options = whole_words(width).initial_indent(&indent).subsequent_indent(&indent);
    let about = textwrap::fill(about, options);
    if 2 + term.len() + 2 <= indent.len() {
        let gap = " ".repeat(indent.len() - 2 - term.len());
        return format!("  {literal}{term}{literal:#}{gap}{}\n", about.trim_start());
    }
    let options = whole_words(width)
        .initial_indent("  ")
        .subsequent_indent("      ")
        .word_separator(textwrap::WordSeparator::Custom(at_options));
    let term = textwrap::fill(term, options);
    format!("{literal}{term}{literal:#}\n{about}\n")
}

/// Splits a usage where it may be wrapped: before an option, `[,key=VALUE]`, and at blanks.
fn at_options(line: &str) -> Box<dyn Iterator<Item = textwrap::core::Word<'_>> + '_> {
    let mut starts: Vec<usize> = line.match_indices("[,").map(|(at, _)| at).collect();
    starts.extend(line.match_indices(' ').map(|(at, _)| at + 1));
    starts.extend([0, line.len()]);
    starts.sort_unstable();
    starts.dedup();
    let words: Vec<_> =
        starts.windows(2).map(|pair| textwrap::core::Word::from(&line[pair[0]..pair[1]])).collect();
    Box::new(words.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_three_examples_and_fits_its_terminal() {
        for sub in command().get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let examples = examples::of(sub.get_name());
            assert!(examples.len() >= 3, "{}", sub.get_name());
            for (line, about) in examples {
                assert!(line.len() <= 78 && about.len() <= 74, "{line}: {about}");
                assert!(line.contains("blockyard"), "{line}");
            }
        }
    }

    #[test]
    fn every_example_belongs_to_a_command() {
        let command = command();
        let is_known = |name: &str| command.get_subcommands().any(|sub| sub.get_name() == name);
        assert!(examples::ALL.iter().all(|(name, _)| is_known(name)));
    }

    #[test]
    fn examples_parse() {
        let command = command();
        for (name, examples) in examples::ALL {
            for (line, _) in *examples {
                // Lines with other shell commands, and lines for losetup and dmsetup, are not parsed by our
                // parser.
                if line.contains(['|', '$', '<', '>']) || matches!(*name, "losetup" | "dmsetup") {
                    continue;
                }
                let line = line.split(" #").next().unwrap_or_default();
                for line in line.split("&&").flat_map(|part| part.split(';')) {
                    parses(&command, line);
                }
            }
        }
    }

    fn parses(command: &Command, line: &str) {
        let words = line.split_whitespace().skip_while(|word| *word != "blockyard");
        let words: Vec<&str> = words.map(|word| word.trim_matches('\'')).collect();
        if words.is_empty() {
            return;
        }
        let parsed = command.clone().try_get_matches_from(words);
        assert!(parsed.is_ok(), "{line}: {}", parsed.err().map(|e| e.to_string()).unwrap_or_default());
    }
    #[test]
    fn topics_fit_terminals_of_any_width() {
        for width in [60, 80, 100] {
            for topic in topics() {
                let text = anstream_free(&text_of(&topic, width));
                for line in text.lines() {
                    let is_one_word = line.split_whitespace().count() == 1;
                    let stays = line.starts_with("  ") && !line.starts_with("   ");
                    assert!(line.chars().count() <= width || is_one_word || stays, "{width}: {line}");
                }
            }
        }
    }

    /// Removes escape sequences from a text.
    fn anstream_free(text: &str) -> String {
        StyledStr::from(text.to_owned()).to_string()
    }

    #[test]
    fn a_topic_shows_every_target_with_an_example() {
        let tables = topics().into_iter().find(|topic| topic.name == "tables").expect("a topic");
        let text = text_of(&tables, 100).split_whitespace().collect::<Vec<_>>().join(" ");
        for row in engine::tables::target_rows() {
            for form in row.usage.lines() {
                assert!(text.contains(form), "{form} is missing");
            }
            assert!(text.contains(row.example), "{} is missing", row.example);
        }
    }

    #[test]
    fn a_topic_names_every_layer() {
        let layers = topics().into_iter().find(|topic| topic.name == "layers").expect("a topic");
        let text = text_of(&layers, 100);
        for row in engine::spec::layer_rows() {
            assert!(text.contains(row.usage.split(['[', ',']).next().unwrap_or_default()), "{}", row.name);
        }
    }
}
