//! The persistent state as text: APTPL, SPC-6 section 5.14.5.
//!
//! The text is readable for people. Its last line has a checksum, so that a file that was truncated or
//! edited by mistake is not accepted:
//!
//! ```text
//! blockyard reservations 1
//! reservation type=5 holder=0
//! registration key=0x00000000deadbeef port=1 initiator=iqn.1993-08.org.debian:01:abc isid=00023d000001
//! checksum 0875c327
//! ```
//!
//! `holder` is the index of a registration, from 0; types that all registrants hold have `holder=all`.

use super::port::{isid_number, parse_isid};
use super::{Held, Kind, NAME_LEN_MAX, REGISTRATIONS_MAX, Registrant, Registration, Reservations};
use std::fmt::Write as _;

/// The first line. Later versions of the format have another number.
const TITLE: &str = "blockyard reservations 1";

/// Reasons why an image of reservations cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ImageError {
    /// The first line is not that of this version.
    #[error("not an image of reservations of version 1 (the first line must be \"{TITLE}\")")]
    Title,
    /// The last line is missing or does not fit the lines before it.
    #[error("the checksum does not match: the image is cut or was changed")]
    Checksum,
    /// A line cannot be parsed.
    #[error("line {line} is not a valid registration or reservation")]
    Line {
        /// Number of the line, from 1.
        line: usize,
    },
}

impl Reservations {
    /// Returns the image to store, or `None` if the state does not persist, so that a stored image must be
    /// removed.
    pub fn image(&self) -> Option<String> {
        if !self.persists {
            return None;
        }
        let mut text = format!("{TITLE}\n");
        if let Some(held) = &self.held {
            let _ = write!(text, "reservation type={} holder=", held.kind as u8);
            let of_holder =
                |known: &Registration| held.holder.as_ref().is_some_and(|holder| *holder == known.registrant);
            let _ = match self.registrations.iter().position(of_holder) {
                Some(index) => writeln!(text, "{index}"),
                None => writeln!(text, "all"),
            };
        }
        for Registration { registrant: Registrant { initiator, isid, port }, key } in &self.registrations {
            let _ = write!(text, "registration key=0x{key:016x} port={port} initiator={initiator} isid=");
            let _ = match isid {
                Some(isid) => writeln!(text, "{:012x}", isid_number(*isid)),
                None => writeln!(text, "any"),
            };
        }
        let checksum = crc32fast::hash(text.as_bytes());
        let _ = writeln!(text, "checksum {checksum:08x}");
        Some(text)
    }

    /// Reads an image, after a restart. The result persists, and has PRGENERATION 0.
    pub fn parse_image(text: &str) -> Result<Reservations, ImageError> {
        if text.lines().next() != Some(TITLE) {
            return Err(ImageError::Title);
        }
        let (content, checksum) = text.rsplit_once("checksum ").ok_or(ImageError::Checksum)?;
        let expected = format!("{:08x}\n", crc32fast::hash(content.as_bytes()));
        if checksum != expected || !content.ends_with('\n') {
            return Err(ImageError::Checksum);
        }
        let mut state = Reservations { persists: true, ..Reservations::default() };
        let mut holder = None;
        for (index, line) in content.lines().enumerate().skip(1) {
            let wrong = ImageError::Line { line: index + 1 };
            match line.split_once(' ') {
                Some(("reservation", fields)) if holder.is_none() => {
                    holder = Some((parse_reservation(fields).ok_or_else(|| wrong.clone())?, wrong));
                }
                Some(("registration", fields)) => {
                    let known = parse_registration(fields).ok_or_else(|| wrong.clone())?;
                    let is_new = state.registrations.iter().all(|other| other.registrant != known.registrant);
                    if !is_new || state.registrations.len() >= REGISTRATIONS_MAX {
                        return Err(wrong);
                    }
                    state.registrations.push(known);
                }
                _ => return Err(wrong),
            }
        }
        if let Some(((kind, index), wrong)) = holder {
            let known = index.map(|index| state.registrations.get(index).ok_or_else(|| wrong.clone()));
            let holder = known.transpose()?.map(|known| known.registrant.clone());
            if holder.is_none() != kind.is_all_registrants() || state.registrations.is_empty() {
                return Err(wrong);
            }
            state.held = Some(Held { kind, holder });
        }
        Ok(state)
    }
}

/// Parses the type, and the index of the holder.
fn parse_reservation(fields: &str) -> Option<(Kind, Option<usize>)> {
    let (kind, holder) = fields.strip_prefix("type=")?.split_once(" holder=")?;
    let holder = if holder == "all" { None } else { Some(holder.parse().ok()?) };
    Some((Kind::of(kind.parse().ok()?)?, holder))
}

fn parse_registration(fields: &str) -> Option<Registration> {
    let (key, rest) = fields.strip_prefix("key=0x")?.split_once(" port=")?;
    let (port, rest) = rest.split_once(" initiator=")?;
    let (initiator, isid) = rest.split_once(" isid=")?;
    let key = u64::from_str_radix(key, 16).ok().filter(|key| *key != 0)?;
    let isid = if isid == "any" { None } else { Some(parse_isid(isid)?) };
    if initiator.is_empty() || initiator.len() > NAME_LEN_MAX || initiator.contains(' ') {
        return None;
    }
    let registrant = Registrant { initiator: initiator.to_owned(), isid, port: port.parse().ok()? };
    Some(Registration { registrant, key })
}
