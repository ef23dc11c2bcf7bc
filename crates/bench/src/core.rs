//! `core`: what a request costs in the block layer alone, in time; `instructions`: the same, counted.
//!
//! One thread drives a queue over a ring that carries nothing, so no system call, socket or other thread is
//! in the figures. Times are the thread's own processor time, medians of interleaved rounds: what else runs
//! on the machine hardly shows.

mod export;
mod instructions;
mod rig;
mod ring;
mod time;

use std::process::ExitCode;

pub(crate) use instructions::main as instructions;
pub(crate) use rig::{Mix, Rig};
pub(crate) use ring::BenchRing;
pub(crate) use time::main;

/// Requests in flight: what is submitted in one turn.
pub(crate) const DEPTH: u16 = 32;
/// A request's length in bytes.
pub(crate) const LEN: u64 = 4096;
/// Pieces that a split request is cut into.
pub(crate) const PIECES: u64 = 8;
/// Layers that the price of one is measured with.
pub(crate) const LAYERS: u8 = 4;

/// Say what is wrong with the command line, and how to use it.
fn usage_error(what: &str, usage: &str) -> ExitCode {
    eprintln!("blockyard-bench: {what}\n{usage}");
    ExitCode::from(2)
}

#[cfg(test)]
mod tests {
    use super::PIECES;
    use super::export::ExportRig;
    use super::rig::{Mix, Rig, Stacking};

    #[test]
    fn every_stacking_moves_what_is_asked() {
        let whole = Stacking::Split { whole: true };
        let (rest, deadline) = (Stacking::Rest { layers: 3 }, Stacking::Deadline { follow: false });
        for stacking in [Stacking::Null { layers: 3 }, rest, whole, deadline, Stacking::Long, Stacking::Ram] {
            let mut rig = Rig::new(stacking);
            let before = rig.counted();
            rig.run(Mix::Half, 320);
            assert_eq!(rig.counted() - before, 320, "{stacking:?}");
        }
        ExportRig::new(true).run(Mix::Half, 320);
        ExportRig::new(false).run(Mix::Half, 320);
        let mut rig = Rig::new(Stacking::Split { whole: false });
        rig.run(Mix::Writes, 32);
        assert_eq!(rig.counted(), 32 * PIECES, "pieces are counted");
    }
}
