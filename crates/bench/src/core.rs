//! `core`: the cost of a request in the block layer alone, in time; `instructions`: the same cost in
//! instructions.
//!
//! One thread drives a queue over a ring without I/O, so the figures include no system calls, sockets or
//! other threads. Times are the thread's own processor time, medians of interleaved rounds, so other load
//! on the machine has little effect.

mod export;
mod instructions;
mod rig;
mod ring;
mod time;
mod virtqueue;

use std::process::ExitCode;

pub(crate) use instructions::main as instructions;
pub(crate) use rig::{Mix, Rig};
pub(crate) use ring::BenchRing;
pub(crate) use time::main;

/// Requests in flight: those submitted in one turn.
pub(crate) const DEPTH: u16 = 32;
/// A request's length in bytes.
pub(crate) const LEN: u64 = 4096;
/// Children of a split request.
pub(crate) const PIECES: u64 = 8;
/// Layers of the stack that measures the cost of one.
pub(crate) const LAYERS: u8 = 4;

/// Prints a usage error, and the usage.
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
    fn every_stack_completes_its_requests() {
        let whole = Stacking::Split { whole: true };
        let (rest, deadline) = (Stacking::Held { layers: 3 }, Stacking::Deadline { follow: false });
        let (small, huge) = (Stacking::Ram { huge: false }, Stacking::Ram { huge: true });
        for stacking in [Stacking::Null { layers: 3 }, rest, whole, deadline, Stacking::Long, small, huge] {
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
