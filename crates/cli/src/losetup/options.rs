//! losetup's words: its options in long and short form, what may stand beside what, and what follows.
//!
//! As GNU getopt reads them: options anywhere, long ones by any beginning that fits one only, values behind
//! `=` or as the next word. Source: losetup(8) of util-linux 2.38 and what it answers.

use super::Refusal;
use super::table::{Column, Style};

/// What is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Help,
    Version,
    /// All devices, or those on a file.
    ShowAll {
        file: Option<String>,
    },
    ShowOne(String),
    /// A file behind a device; none: the first that is free.
    Create {
        device: Option<String>,
        file: String,
    },
    FindFree,
    Detach(Vec<String>),
    DetachAll,
    SetCapacity(String),
    SetDirect(String, bool),
    SetBlock(String, u32),
}

/// How answers are written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Listing {
    /// As a table rather than a sentence for each device.
    pub(super) list: bool,
    pub(super) style: Style,
    pub(super) headings: bool,
    pub(super) columns: Vec<Column>,
}

/// A command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Options {
    pub(super) action: Action,
    pub(super) listing: Listing,
    pub(super) offset: Option<u64>,
    pub(super) sizelimit: Option<u64>,
    pub(super) block: Option<u32>,
    pub(super) direct: Option<bool>,
    pub(super) partscan: bool,
    pub(super) read_only: bool,
    pub(super) show: bool,
    pub(super) no_overlap: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Value {
    None,
    Required,
    Optional,
}

/// Each option: its letter (upper half of ASCII for those without one), its word, its value.
const OPTIONS: [(char, &str, Value); 22] = [
    ('a', "all", Value::None),
    ('b', "sector-size", Value::Required),
    ('c', "set-capacity", Value::Required),
    ('d', "detach", Value::Required),
    ('D', "detach-all", Value::None),
    ('f', "find", Value::None),
    ('h', "help", Value::None),
    ('j', "associated", Value::Required),
    ('J', "json", Value::None),
    ('l', "list", Value::None),
    ('L', "nooverlap", Value::None),
    ('n', "noheadings", Value::None),
    ('o', "offset", Value::Required),
    ('O', "output", Value::Required),
    ('P', "partscan", Value::None),
    ('r', "read-only", Value::None),
    ('v', "verbose", Value::None),
    ('V', "version", Value::None),
    (SIZELIMIT, "sizelimit", Value::Required),
    (SHOW, "show", Value::None),
    (DIRECT_IO, "direct-io", Value::Optional),
    (RAW, "raw", Value::None),
];
const OUTPUT_ALL: (char, &str, Value) = ('\u{5}', "output-all", Value::None);
const SIZELIMIT: char = '\u{1}';
const SHOW: char = '\u{2}';
const DIRECT_IO: char = '\u{3}';
const RAW: char = '\u{4}';

/// Options that exclude each other, in the order in which losetup names them.
const EXCLUSIVE: [&[char]; 4] =
    [&['D', 'a', 'c', 'd', 'f', 'j'], &['D', 'c', 'd', 'f', 'l'], &['D', 'c', 'd', 'f', 'O'], &['J', RAW]];

fn all_options() -> impl Iterator<Item = (char, &'static str, Value)> {
    OPTIONS.into_iter().chain([OUTPUT_ALL])
}

/// Words in the order given, options with their values taken apart from the rest.
struct Words {
    given: Vec<(char, Option<String>)>,
    rest: Vec<String>,
}

fn read(words: &[String]) -> Result<Words, Refusal> {
    let mut out = Words { given: Vec::new(), rest: Vec::new() };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "--" {
            out.rest.extend(words.by_ref().cloned());
        } else if let Some(long) = word.strip_prefix("--") {
            let (name, value) = match long.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (long, None),
            };
            let (letter, full, takes) = long_option(name, word)?;
            let value = match (takes, value) {
                (Value::None, Some(_)) => {
                    return Err(Refusal::usage(format!("option '--{full}' doesn't allow an argument")));
                }
                (Value::Required, None) => Some(
                    words
                        .next()
                        .cloned()
                        .ok_or_else(|| Refusal::usage(format!("option '--{full}' requires an argument")))?,
                ),
                (_, value) => value,
            };
            out.given.push((letter, value));
        } else if word.len() > 1 && word.starts_with('-') {
            let mut letters = word[1..].chars();
            while let Some(letter) = letters.next() {
                let known = all_options().find(|option| option.0 == letter && !letter.is_control());
                let Some((_, _, takes)) = known else {
                    return Err(Refusal::usage(format!("invalid option -- '{letter}'")));
                };
                if takes != Value::Required {
                    out.given.push((letter, None));
                    continue;
                }
                let value = match letters.as_str() {
                    "" => words.next().cloned().ok_or_else(|| {
                        Refusal::usage(format!("option requires an argument -- '{letter}'"))
                    })?,
                    glued => glued.to_owned(),
                };
                out.given.push((letter, Some(value)));
                break;
            }
        } else {
            out.rest.push(word.clone());
        }
    }
    Ok(out)
}

fn long_option(name: &str, word: &str) -> Result<(char, &'static str, Value), Refusal> {
    if let Some(exact) = all_options().find(|option| option.1 == name) {
        return Ok(exact);
    }
    let mut fitting = all_options().filter(|option| option.1.starts_with(name));
    match (fitting.next(), fitting.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => {
            let shown = word.split('=').next().unwrap_or(word);
            Err(Refusal::usage(format!("unrecognized option '{shown}'")))
        }
        (Some(one), Some(two)) => {
            let others: Vec<String> =
                [one, two].into_iter().chain(fitting).map(|option| format!("'--{}'", option.1)).collect();
            Err(Refusal::usage(format!("option '{word}' is ambiguous; possibilities: {}", others.join(" "))))
        }
    }
}

fn check_exclusive(given: &[(char, Option<String>)]) -> Result<(), Refusal> {
    for group in EXCLUSIVE {
        let present = group.iter().filter(|letter| given.iter().any(|option| option.0 == **letter));
        if present.count() > 1 {
            let name = |letter: &char| all_options().find(|option| option.0 == *letter).map_or("", |o| o.1);
            let names: Vec<String> = group.iter().map(|letter| format!(" --{}", name(letter))).collect();
            return Err(Refusal::plain(format!("mutually exclusive arguments:{}", names.concat())));
        }
    }
    Ok(())
}

/// A size as util-linux reads it: `K` and `KiB` are 1024, `KB` is 1000, and so on up to `E`; `0x` is hexadecimal.
pub(super) fn size(text: &str) -> Option<u64> {
    let (digits, radix) = match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(hexadecimal) => (hexadecimal, 16),
        None => (text, 10),
    };
    let end = digits.find(|c: char| !c.is_digit(radix) && c != '.').unwrap_or(digits.len());
    let (number, suffix) = digits.split_at(end);
    let unit = match suffix.to_ascii_uppercase().as_str() {
        "" => 1,
        suffix => {
            let power = "KMGTPE".find(&suffix[..suffix.chars().next()?.len_utf8()])? as u32 + 1;
            match &suffix[1..] {
                "" | "IB" => 1024u64.pow(power),
                "B" => 1000u64.pow(power),
                _ => return None,
            }
        }
    };
    match number.split_once('.') {
        None => u64::from_str_radix(number, radix).ok()?.checked_mul(unit),
        Some((whole, fraction)) if radix == 10 && !fraction.is_empty() && fraction.len() < 10 => {
            let tenths = u128::from(fraction.parse::<u64>().ok()?) * u128::from(unit);
            let part = tenths / 10u128.pow(fraction.len() as u32);
            whole.parse::<u64>().ok()?.checked_mul(unit)?.checked_add(u64::try_from(part).ok()?)
        }
        Some(_) => None,
    }
}

fn sized(text: &str, what: &str) -> Result<u64, Refusal> {
    let why = || Refusal::plain(format!("failed to parse {what}: '{text}': Invalid argument"));
    size(text).filter(|&size| size <= i64::MAX as u64).ok_or_else(why)
}

pub(super) fn parse(words: &[String]) -> Result<Options, Refusal> {
    let Words { given, mut rest } = read(words)?;
    let has = |letter: char| given.iter().any(|option| option.0 == letter);
    let value = |letter: char| {
        given.iter().rev().find(|option| option.0 == letter).and_then(|option| option.1.as_deref())
    };
    let mut options = Options {
        action: Action::Help,
        listing: Listing {
            list: has('l'),
            style: if has('J') {
                Style::Json
            } else if has(RAW) {
                Style::Raw
            } else {
                Style::Table
            },
            headings: !has('n'),
            columns: Column::DEFAULT.to_vec(),
        },
        offset: value('o').map(|text| sized(text, "offset")).transpose()?,
        sizelimit: value(SIZELIMIT).map(|text| sized(text, "size")).transpose()?,
        block: value('b').map(|text| sized(text, "logical block size")).transpose()?.map(|block| {
            // What does not fit is no block size either.
            u32::try_from(block).unwrap_or(u32::MAX)
        }),
        direct: match (has(DIRECT_IO), value(DIRECT_IO)) {
            (false, _) => None,
            (true, None | Some("on")) => Some(true),
            (true, Some("off")) => Some(false),
            (true, Some(other)) => return Err(Refusal::plain(format!("argument error: '{other}'"))),
        },
        partscan: has('P'),
        read_only: has('r'),
        show: has(SHOW),
        no_overlap: has('L'),
    };
    if has('h') || has('V') {
        options.action = if has('h') { Action::Help } else { Action::Version };
        return Ok(options);
    }
    check_exclusive(&given)?;
    if has(OUTPUT_ALL.0) {
        options.listing.columns = Column::ALL.to_vec();
    }
    if let Some(names) = value('O') {
        options.listing.columns = Column::list(names)?;
    }
    options.action = action(&given, &mut rest, &mut options)?;
    check_context(&options)?;
    Ok(options)
}

fn action(
    given: &[(char, Option<String>)],
    rest: &mut Vec<String>,
    options: &mut Options,
) -> Result<Action, Refusal> {
    let value = |letter: char| given.iter().rev().find(|option| option.0 == letter).map(|o| o.1.clone());
    let mut rest = rest.drain(..);
    let none_left = |mut rest: std::vec::Drain<'_, String>| match rest.next() {
        None => Ok(()),
        Some(_) => Err(Refusal::plain("unexpected arguments".to_owned())),
    };
    let acting = |letter: &char| given.iter().any(|option| option.0 == *letter);
    if let Some(Some(first)) = value('d') {
        return Ok(Action::Detach(std::iter::once(first).chain(rest).collect()));
    }
    if acting(&'D') {
        return Ok(Action::DetachAll);
    }
    if let Some(Some(device)) = value('c') {
        return Ok(Action::SetCapacity(device));
    }
    if acting(&'f') {
        return match rest.next() {
            Some(file) => none_left(rest).map(|()| Action::Create { device: None, file }),
            None => Ok(Action::FindFree),
        };
    }
    if let Some(file) = value('j') {
        return Ok(Action::ShowAll { file });
    }
    if acting(&'a') {
        return Ok(Action::ShowAll { file: None });
    }
    let Some(first) = rest.next() else {
        let bare = given.is_empty() || given.len() == 1 && (acting(&'J') || acting(&RAW));
        options.listing.list |= bare;
        return match options.listing.list {
            true => Ok(Action::ShowAll { file: None }),
            false => Err(Refusal::plain("no loop device specified".to_owned())),
        };
    };
    match (rest.next(), options.direct, options.block) {
        (Some(file), ..) => none_left(rest).map(|()| Action::Create { device: Some(first), file }),
        (None, _, Some(block)) => Ok(Action::SetBlock(first, block)),
        (None, Some(direct), None) => Ok(Action::SetDirect(first, direct)),
        (None, None, None) => {
            options.listing.list |= options.listing.style == Style::Json && options.listing.list;
            Ok(Action::ShowOne(first))
        }
    }
}

fn check_context(options: &Options) -> Result<(), Refusal> {
    let creates = matches!(options.action, Action::Create { .. });
    let setup = options.sizelimit.is_some() || options.partscan || options.read_only || options.show;
    if setup && !creates {
        let why =
            "the options --{sizelimit,partscan,read-only,show} are allowed during loop device setup only";
        return Err(Refusal::plain(why.to_owned()));
    }
    let selects = matches!(options.action, Action::ShowAll { file: Some(_) });
    if options.offset.is_some() && !creates && !selects {
        return Err(Refusal::plain("the option --offset is not allowed in this context".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Options, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        parse(&words).map_err(|refusal| refusal.why)
    }

    fn action(line: &str) -> Action {
        parsed(line).unwrap_or_else(|why| panic!("{line}: {why}")).action
    }

    #[test]
    fn options_stand_anywhere_long_or_short_glued_or_apart() {
        let file = |device: Option<&str>| Action::Create {
            device: device.map(str::to_owned),
            file: "disk.img".to_owned(),
        };
        for line in ["-f disk.img", "disk.img -f", "--find disk.img", "--fi disk.img", "-f -- disk.img"] {
            assert_eq!(action(line), file(None), "{line}");
        }
        assert_eq!(action("/dev/loop3 disk.img -r"), file(Some("/dev/loop3")));
        for line in ["-fPo1M --show disk.img", "--offset=1MiB -P -f disk.img", "-f -P -o 1m disk.img"] {
            let options = parsed(line).unwrap();
            assert_eq!((options.offset, options.partscan), (Some(1 << 20), true), "{line}");
        }
        assert_eq!(action("-d a b"), Action::Detach(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(action("--direct-io=off x"), Action::SetDirect("x".to_owned(), false));
        assert_eq!(action("x --direct-io"), Action::SetDirect("x".to_owned(), true));
        assert_eq!(action("-b 4k x"), Action::SetBlock("x".to_owned(), 4096));
        assert_eq!(action("-j f -o 5"), Action::ShowAll { file: Some("f".to_owned()) });
    }

    #[test]
    fn what_is_shown_as_a_list_is_what_losetup_shows_so() {
        for (line, list) in [
            ("", true),
            ("-l", true),
            ("-J", true),
            ("--raw", true),
            ("-a", false),
            ("-l -a", true),
            ("x", false),
        ] {
            assert_eq!(parsed(line).unwrap().listing.list, list, "{line}");
        }
        for line in ["-n", "-r", "-O NAME", "--output-all", "-J -n"] {
            let why = parsed(line).expect_err(line);
            assert!(why.contains("no loop device specified") || why.contains("allowed during"), "{why}");
        }
    }

    #[test]
    fn refusals_are_losetups() {
        for (line, why) in [
            ("--bad=1", "unrecognized option '--bad'"),
            ("-k", "invalid option -- 'k'"),
            ("-j", "option requires an argument -- 'j'"),
            ("--offset", "option '--offset' requires an argument"),
            ("--all=1", "option '--all' doesn't allow an argument"),
            (
                "--s",
                "option '--s' is ambiguous; possibilities: '--sector-size' '--set-capacity' '--sizelimit' '--show'",
            ),
            (
                "-af",
                "mutually exclusive arguments: --detach-all --all --set-capacity --detach --find --associated",
            ),
            ("-J --raw", "mutually exclusive arguments: --json --raw"),
            ("-l -O BAD", "unknown column: BAD"),
            ("-f -o x f", "failed to parse offset: 'x': Invalid argument"),
            ("--direct-io=maybe x", "argument error: 'maybe'"),
            ("-f a b", "unexpected arguments"),
            ("-o 5 x", "the option --offset is not allowed in this context"),
            (
                "-f --show",
                "the options --{sizelimit,partscan,read-only,show} are allowed during loop device setup only",
            ),
        ] {
            assert_eq!(parsed(line), Err(why.to_owned()), "{line}");
        }
    }

    #[test]
    fn sizes_are_util_linuxs() {
        for (text, bytes) in [
            ("512", 512),
            ("1K", 1024),
            ("1KiB", 1024),
            ("1kB", 1000),
            ("1.5K", 1536),
            ("0x1000", 4096),
            ("2G", 2 << 30),
            ("7E", 7 << 60),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "x", "1x", "-1", "1KX", "16E", "99999999999999999999", "1.", "é", "1é"] {
            assert_eq!(size(text), None, "{text}");
        }
    }
}
