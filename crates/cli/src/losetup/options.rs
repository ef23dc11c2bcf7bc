//! losetup's command line: long and short options, exclusive options, and arguments.
//!
//! Parsed as GNU getopt does: options anywhere, long ones by any unique prefix, values after `=` or as the
//! next argument. Source: losetup(8) of util-linux 2.38 and its behaviour.

use super::Refusal;
use super::table::{Column, Style};

/// The requested action.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Help,
    Version,
    /// Lists all devices, or those over a file.
    ShowAll {
        file: Option<String>,
    },
    ShowOne(String),
    /// Sets up a file; `device`: `None` takes the first free one.
    Create {
        device: Option<String>,
        file: String,
    },
    FindFree,
    Detach(Vec<String>),
    DetachAll,
    SetCapacity(String),
    SetDirect(String, bool),
    SetBlock(String, u64),
    /// Removes unused devices from `/dev`.
    Remove(Vec<String>),
}

/// The format of lists.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Listing {
    /// Whether devices are listed in columns rather than in the old format.
    pub(super) list: bool,
    pub(super) style: Style,
    pub(super) headings: bool,
    pub(super) columns: Vec<Column>,
}

/// A parsed command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Options {
    pub(super) action: Action,
    pub(super) listing: Listing,
    pub(super) offset: Option<u64>,
    pub(super) sizelimit: Option<u64>,
    pub(super) block: Option<u64>,
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

/// Options: letter (control characters for options without one), name, value; in losetup's order, which error
/// messages follow.
const OPTIONS: [(char, &str, Value); 24] = [
    ('a', "all", Value::None),
    ('c', "set-capacity", Value::Required),
    ('d', "detach", Value::Required),
    ('D', "detach-all", Value::None),
    ('f', "find", Value::None),
    ('L', "nooverlap", Value::None),
    ('h', "help", Value::None),
    ('j', "associated", Value::Required),
    ('J', "json", Value::None),
    ('l', "list", Value::None),
    ('b', "sector-size", Value::Required),
    ('n', "noheadings", Value::None),
    ('o', "offset", Value::Required),
    ('O', "output", Value::Required),
    (OUTPUT_ALL, "output-all", Value::None),
    (SIZELIMIT, "sizelimit", Value::Required),
    ('P', "partscan", Value::None),
    ('r', "read-only", Value::None),
    (DIRECT_IO, "direct-io", Value::Optional),
    (RAW, "raw", Value::None),
    (SHOW, "show", Value::None),
    ('v', "verbose", Value::None),
    ('V', "version", Value::None),
    (REMOVE, "remove", Value::None),
];
const SIZELIMIT: char = '\u{1}';
const SHOW: char = '\u{2}';
const DIRECT_IO: char = '\u{3}';
const RAW: char = '\u{4}';
const OUTPUT_ALL: char = '\u{5}';
const REMOVE: char = '\u{6}';

/// Options that exclude each other, in the order of losetup's message. losetup has one more group, of
/// --output, whose order is wrong, so that it has no effect.
const EXCLUSIVE: [&[char]; 3] = [&['D', 'a', 'c', 'd', 'f', 'j'], &['D', 'c', 'd', 'f', 'l'], &['J', RAW]];

/// Options with their values in the order given, and the other arguments.
#[derive(Default)]
struct CommandLine {
    given: Vec<(char, Option<String>)>,
    rest: Vec<String>,
    /// The first error; arguments after it were not parsed. Options before it take effect.
    error: Option<Refusal>,
}

fn read(args: &[String]) -> CommandLine {
    let mut out = CommandLine::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let taken = if arg == "--" {
            out.rest.extend(args.by_ref().cloned());
            Ok(())
        } else if let Some(long) = arg.strip_prefix("--") {
            read_long(arg, long, &mut args).map(|option| out.given.push(option))
        } else if arg.len() > 1 && arg.starts_with('-') {
            read_letters(&arg[1..], &mut args, &mut out.given)
        } else {
            out.rest.push(arg.clone());
            Ok(())
        };
        if let Err(refusal) = taken {
            out.error = Some(refusal);
            break;
        }
    }
    out
}

fn read_long<'a>(
    arg: &str,
    long: &str,
    args: &mut impl Iterator<Item = &'a String>,
) -> Result<(char, Option<String>), Refusal> {
    let (name, value) = match long.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (long, None),
    };
    let (letter, full, takes) = long_option(name, arg)?;
    let value = match (takes, value) {
        (Value::None, Some(_)) => {
            return Err(Refusal::usage(format!("option '--{full}' doesn't allow an argument")));
        }
        (Value::Required, None) => {
            let next = args.next().cloned();
            Some(next.ok_or_else(|| Refusal::usage(format!("option '--{full}' requires an argument")))?)
        }
        (_, value) => value,
    };
    Ok((letter, value))
}

fn read_letters<'a>(
    letters: &str,
    args: &mut impl Iterator<Item = &'a String>,
    given: &mut Vec<(char, Option<String>)>,
) -> Result<(), Refusal> {
    let mut letters = letters.chars();
    while let Some(letter) = letters.next() {
        let known = OPTIONS.into_iter().find(|option| option.0 == letter && !letter.is_control());
        let Some((_, _, takes)) = known else {
            return Err(Refusal::usage(format!("invalid option -- '{letter}'")));
        };
        if takes != Value::Required {
            given.push((letter, None));
            continue;
        }
        let value = match letters.as_str() {
            "" => args
                .next()
                .cloned()
                .ok_or_else(|| Refusal::usage(format!("option requires an argument -- '{letter}'")))?,
            glued => glued.to_owned(),
        };
        given.push((letter, Some(value)));
        break;
    }
    Ok(())
}

fn long_option(name: &str, arg: &str) -> Result<(char, &'static str, Value), Refusal> {
    if let Some(exact) = OPTIONS.into_iter().find(|option| option.1 == name) {
        return Ok(exact);
    }
    let mut fitting = OPTIONS.into_iter().filter(|option| option.1.starts_with(name));
    match (fitting.next(), fitting.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => Err(Refusal::usage(format!("unrecognized option '{arg}'"))),
        (Some(one), Some(two)) => {
            let others: Vec<String> =
                [one, two].into_iter().chain(fitting).map(|option| format!("'--{}'", option.1)).collect();
            Err(Refusal::usage(format!("option '{arg}' is ambiguous; possibilities: {}", others.join(" "))))
        }
    }
}

/// Checks that the last option does not exclude an earlier one.
fn check_exclusive(given: &[(char, Option<String>)]) -> Result<(), Refusal> {
    let Some((last, _)) = given.last() else { return Ok(()) };
    for group in EXCLUSIVE.into_iter().filter(|group| group.contains(last)) {
        if given.iter().any(|(letter, _)| letter != last && group.contains(letter)) {
            let name =
                |letter: &char| OPTIONS.into_iter().find(|option| option.0 == *letter).map_or("", |o| o.1);
            let names: Vec<String> = group.iter().map(|letter| format!(" --{}", name(letter))).collect();
            return Err(Refusal::plain(format!("mutually exclusive arguments:{}", names.concat())));
        }
    }
    Ok(())
}

/// Why a size is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SizeError {
    /// The text is not a size.
    Invalid,
    /// The value exceeds 64 bits.
    Range,
}

/// Parses a size as util-linux does: `K` and `KiB` are 1024, `KB` is 1000, and so on up to `Y`. As with
/// `strtoumax`, leading spaces and a `+` are allowed, `0x` is hexadecimal and a leading `0` octal.
pub(super) fn size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim_start_matches([' ', '\t', '\n', '\u{b}', '\u{c}', '\r']);
    let text = text.strip_prefix('+').unwrap_or(text);
    let (digits, radix) = match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(hexadecimal) => (hexadecimal, 16),
        None if text.starts_with('0') => (text, 8),
        None => (text, 10),
    };
    let split = |text: &'_ str, radix: u32| text.find(|c: char| !c.is_digit(radix)).unwrap_or(text.len());
    let (number, rest) = digits.split_at(split(digits, radix));
    let units = whole(number, radix)?;
    let Some(fraction) = rest.strip_prefix('.') else { return scaled(units, unit(rest)?) };
    let (fraction, suffix) = fraction.split_at(split(fraction, 10));
    if radix == 16 || fraction.is_empty() || fraction.len() >= 10 {
        return Err(SizeError::Invalid);
    }
    let unit = unit(suffix)?;
    let one = u128::from(scaled(1, unit)?);
    let part = u128::from(whole(fraction, 10)?) * one / 10u128.pow(fraction.len() as u32);
    let part = u64::try_from(part).map_err(|_| SizeError::Range)?;
    scaled(units, unit)?.checked_add(part).ok_or(SizeError::Range)
}

fn whole(text: &str, radix: u32) -> Result<u64, SizeError> {
    u64::from_str_radix(text, radix).map_err(|why| match why.kind() {
        std::num::IntErrorKind::PosOverflow => SizeError::Range,
        _ => SizeError::Invalid,
    })
}

/// Returns the base and exponent of a suffix.
fn unit(suffix: &str) -> Result<(u64, u32), SizeError> {
    let suffix = suffix.to_ascii_uppercase();
    let Some(first) = suffix.chars().next() else { return Ok((1, 1)) };
    let power = "KMGTPEZY".find(first).ok_or(SizeError::Invalid)? as u32 + 1;
    match &suffix[first.len_utf8()..] {
        "" | "IB" => Ok((1024, power)),
        "B" => Ok((1000, power)),
        _ => Err(SizeError::Invalid),
    }
}

fn scaled(units: u64, (base, power): (u64, u32)) -> Result<u64, SizeError> {
    (0..power).try_fold(units, |units, _| units.checked_mul(base)).ok_or(SizeError::Range)
}

fn parse_size(text: &str, what: &str) -> Result<u64, Refusal> {
    size(text).map_err(|why| {
        let why = match why {
            SizeError::Invalid => "Invalid argument",
            SizeError::Range => "Numerical result out of range",
        };
        Refusal::plain(format!("failed to parse {what}: '{text}': {why}"))
    })
}

pub(super) fn parse(args: &[String]) -> Result<Options, Refusal> {
    let CommandLine { given, rest, error } = read(args);
    let mut options = Options {
        action: Action::Help,
        listing: Listing {
            list: false,
            style: Style::Table,
            headings: true,
            columns: Column::DEFAULT.to_vec(),
        },
        offset: None,
        sizelimit: None,
        block: None,
        direct: None,
        partscan: false,
        read_only: false,
        show: false,
        no_overlap: false,
    };
    let (mut requested, mut names) = (Requested::Nothing, None);
    // In order, as getopt returns options: the first error is reported.
    for (number, (letter, value)) in given.iter().enumerate() {
        check_exclusive(&given[..=number])?;
        let text = value.as_deref().unwrap_or_default();
        match *letter {
            'h' | 'V' => {
                options.action = if *letter == 'h' { Action::Help } else { Action::Version };
                return Ok(options);
            }
            'O' => {
                options.listing.list = true;
                names = Some(text);
            }
            OUTPUT_ALL => options.listing.columns = Column::ALL.to_vec(),
            'j' => requested = Requested::Show(Some(text.to_owned())),
            'a' => requested = Requested::Show(None),
            'c' => requested = Requested::SetCapacity(text.to_owned()),
            'd' => requested = Requested::Detach(text.to_owned()),
            'D' => requested = Requested::DetachAll,
            'f' => requested = Requested::Find,
            REMOVE => requested = Requested::Remove,
            _ => set(&mut options, *letter, value.as_deref())?,
        }
    }
    if let Some(refusal) = error {
        return Err(refusal);
    }
    if let Some(names) = names {
        options.listing.columns = Column::list(names)?;
    }
    options.action = action(args.len(), requested, rest, &mut options)?;
    check_context(&options)?;
    Ok(options)
}

/// Sets an option that is not an action.
fn set(options: &mut Options, letter: char, value: Option<&str>) -> Result<(), Refusal> {
    let text = value.unwrap_or_default();
    match letter {
        'J' => options.listing.style = Style::Json,
        RAW => options.listing.style = Style::Raw,
        'l' => options.listing.list = true,
        'n' => options.listing.headings = false,
        'L' => options.no_overlap = true,
        'o' => options.offset = Some(parse_size(text, "offset")?),
        SIZELIMIT => options.sizelimit = Some(parse_size(text, "size")?),
        'b' => options.block = Some(parse_size(text, "logical block size")?),
        'P' => options.partscan = true,
        'r' => options.read_only = true,
        SHOW => options.show = true,
        DIRECT_IO => {
            options.direct = match value {
                None | Some("on") => Some(true),
                Some("off") => Some(false),
                Some(other) => return Err(Refusal::plain(format!("argument error: '{other}'"))),
            }
        }
        _ => {}
    }
    Ok(())
}

/// The action that an option requests.
enum Requested {
    Nothing,
    Show(Option<String>),
    SetCapacity(String),
    Detach(String),
    DetachAll,
    Find,
    Remove,
}

/// Returns the action. `count` is the number of all arguments.
fn action(
    count: usize,
    requested: Requested,
    mut rest: Vec<String>,
    options: &mut Options,
) -> Result<Action, Refusal> {
    let unexpected = || Err(Refusal::plain("unexpected arguments".to_owned()));
    match requested {
        Requested::Detach(first) => return Ok(Action::Detach(std::iter::once(first).chain(rest).collect())),
        Requested::DetachAll => return Ok(Action::DetachAll),
        Requested::SetCapacity(device) => return Ok(Action::SetCapacity(device)),
        Requested::Show(file) => return Ok(Action::ShowAll { file }),
        Requested::Remove if rest.is_empty() => {
            return Err(Refusal::plain("no loop device specified".to_owned()));
        }
        Requested::Remove => return Ok(Action::Remove(rest)),
        Requested::Find => {
            return match rest.len() {
                0 => Ok(Action::FindFree),
                1 => Ok(Action::Create { device: None, file: rest.remove(0) }),
                _ => unexpected(),
            };
        }
        Requested::Nothing => {}
    }
    let listing = &mut options.listing;
    listing.list |= count == 0 || count == 1 && listing.style != Style::Table;
    match (rest.len(), options.direct, options.block) {
        (0, ..) if listing.list => Ok(Action::ShowAll { file: None }),
        (0, ..) => Err(Refusal::plain("no loop device specified".to_owned())),
        (1, _, Some(block)) => Ok(Action::SetBlock(rest.remove(0), block)),
        (1, Some(direct), None) => Ok(Action::SetDirect(rest.remove(0), direct)),
        (1, None, None) => Ok(Action::ShowOne(rest.remove(0))),
        (2, ..) => {
            let device = Some(rest.remove(0));
            Ok(Action::Create { device, file: rest.remove(0) })
        }
        _ => unexpected(),
    }
}

fn check_context(options: &Options) -> Result<(), Refusal> {
    let creates = matches!(options.action, Action::Create { .. });
    // For losetup, direct I/O on an existing device is an action of its own; without a device it belongs to
    // the setup.
    let direct = options.direct == Some(true)
        && !matches!(options.action, Action::SetDirect(..) | Action::SetBlock(..));
    let setup = options.sizelimit.is_some() || options.partscan || options.read_only || options.show;
    if (setup || direct) && !creates {
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
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        parse(&args).map_err(|refusal| refusal.why)
    }

    fn action(line: &str) -> Action {
        parsed(line).unwrap_or_else(|why| panic!("{line}: {why}")).action
    }

    #[test]
    fn options_are_parsed_at_any_position_and_in_any_form() {
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
    fn lists_are_chosen_as_in_losetup() {
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
        assert!(parsed("-O NAME").unwrap().listing.list && parsed("-j f -O NAME").unwrap().listing.list);
        for line in ["-n", "-r", "--", "--output-all", "-J -n"] {
            let why = parsed(line).expect_err(line);
            assert!(why.contains("no loop device specified") || why.contains("allowed during"), "{why}");
        }
    }

    #[test]
    fn the_first_decisive_option_wins() {
        assert_eq!(action("-h -k"), Action::Help);
        assert_eq!(action("-V -h -o x"), Action::Version);
        assert_eq!(action("-f -O NAME"), Action::FindFree);
        assert_eq!(action("--remove a b"), Action::Remove(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(action("-- -l"), Action::ShowOne("-l".to_owned()));
    }

    #[test]
    fn errors_are_losetups() {
        const SETUP: &str =
            "the options --{sizelimit,partscan,read-only,show} are allowed during loop device setup only";
        for (line, why) in [
            ("--bad=1", "unrecognized option '--bad=1'"),
            ("-k", "invalid option -- 'k'"),
            ("-j", "option requires an argument -- 'j'"),
            ("--offset", "option '--offset' requires an argument"),
            ("--all=1", "option '--all' doesn't allow an argument"),
            (
                "--s",
                "option '--s' is ambiguous; possibilities: '--set-capacity' '--sector-size' '--sizelimit' '--show'",
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
            ("-f --direct-io", SETUP),
            ("-l --direct-io=on", SETUP),
            ("-k -h", "invalid option -- 'k'"),
            ("-l -O NAME,", "unknown column: NAME,"),
            ("-l -O +,NAME", ""),
            ("-l -O NAME,,RO", ""),
            (
                "-f --show",
                "the options --{sizelimit,partscan,read-only,show} are allowed during loop device setup only",
            ),
        ] {
            assert_eq!(parsed(line), Err(why.to_owned()), "{line}");
        }
    }

    #[test]
    fn sizes_are_parsed_as_in_util_linux() {
        for (text, bytes) in [
            ("512", 512),
            ("1K", 1024),
            ("1KiB", 1024),
            ("1kB", 1000),
            ("1.5K", 1536),
            ("0x1000", 4096),
            ("2G", 2 << 30),
            ("7E", 7 << 60),
            ("0100", 64),
            ("0", 0),
            ("0.5K", 512),
            ("010.5K", 8 * 1024 + 512),
            ("+512", 512),
            (" \t512", 512),
            ("0Z", 0),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "x", "1x", "-1", "1KX", "1.", "é", "1é", "K", "08", "+-1", "512 ", "0x1.5K", "+"] {
            assert_eq!(size(text), Err(SizeError::Invalid), "{text}");
        }
        for text in ["16E", "99999999999999999999", "15.99999E9E"] {
            assert!(size(text).is_err(), "{text}");
        }
        for text in ["16E", "1Z", "1YB"] {
            assert_eq!(size(text), Err(SizeError::Range), "{text}");
        }
    }
}
