//! Valid input, changed at random: sessions of clients, and files that the server reads.

pub mod images;
pub mod sessions;

use sim::Rng;

/// Numbers at limits of types and fields.
const EDGES: [u64; 14] =
    [0, 1, 2, 7, 511, 512, 4095, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 32, 1 << 63, u64::MAX];

/// Changes one thing: a bit, a byte, a number, a range.
pub(crate) fn change(bytes: &mut Vec<u8>, rng: &mut Rng) {
    if bytes.is_empty() {
        return bytes.push(rng.word() as u8);
    }
    let at = rng.below(bytes.len() as u64) as usize;
    match rng.below(9) {
        0 => bytes[at] ^= 1 << rng.below(8),
        1 => bytes[at] = rng.word() as u8,
        2 => put(bytes, at, 4, number(rng), rng.chance(500)),
        3 => put(bytes, at / 8 * 8, 8, number(rng), rng.chance(500)),
        4 => put(bytes, at / 4 * 4, 4, number(rng), rng.chance(800)),
        5 => put(bytes, at, 2, number(rng), rng.chance(500)),
        6 => bytes.truncate(at),
        7 => {
            let end = (at + 1 + rng.below(64) as usize).min(bytes.len());
            drop(bytes.drain(at..end));
        }
        _ => {
            let noise: Vec<u8> = (0..1 + rng.below(32)).map(|_| rng.word() as u8).collect();
            drop(bytes.splice(at..at, noise));
        }
    }
}

fn number(rng: &mut Rng) -> u64 {
    match rng.below(3) {
        0 => *rng.pick(&EDGES),
        1 => rng.below(4096),
        _ => rng.word(),
    }
}

fn put(bytes: &mut [u8], at: usize, len: usize, number: u64, big: bool) {
    let wide = if big { number.to_be_bytes() } else { number.to_le_bytes() };
    let digits = if big { &wide[8 - len..] } else { &wide[..len] };
    let end = (at + len).min(bytes.len());
    bytes[at..end].copy_from_slice(&digits[..end - at]);
}
