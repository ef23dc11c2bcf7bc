//! The target `zero`: reads return zeroes, writes are dropped.

use super::{Area, Devices, Names, Simulated, Status, Target, TargetError, TargetRange, TargetRow, stack};
use crate::Layer;
use block::{Cookie, LimitsError, Op, Profile, Request, Sectors, Segment};
use queue::{Cx, Node, NodeId, Ring, Verdict};
use std::sync::Arc;

pub(super) const ROW: TargetRow = TargetRow {
    name: "zero",
    version: [1, 2, 0],
    usage: "zero",
    about: "reads return zeroes, writes are dropped",
    example: "0 2097152 zero",
    singleton: false,
    immutable: false,
    simulated: Simulated::KeepsNothing,
};

struct Zero {
    len: Sectors,
}

pub(super) fn construct<R: Ring>(
    place: TargetRange,
    args: &[&str],
    _: &mut dyn Devices,
) -> Result<Arc<dyn Target<R>>, TargetError> {
    if args.is_empty() {
        Ok(Arc::new(Zero { len: place.len }))
    } else {
        Err(TargetError::new("No arguments required"))
    }
}

impl<R: Ring> Layer<R> for Zero {
    fn name(&self) -> &'static str {
        "zero"
    }

    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        let mut whole = stack(self.len, &[], below)?;
        whole.opaque = false;
        Ok(whole)
    }

    fn node(&self, _: &Profile, _: &[NodeId]) -> Box<dyn Node<R>> {
        Box::new(ZeroNode)
    }
}

impl<R: Ring> Target<R> for Zero {
    fn areas(&self) -> Vec<Area> {
        Vec::new()
    }

    fn status(&self, _: Status, _: &Names) -> String {
        String::new()
    }
}

struct ZeroNode;

impl<R: Ring> Node<R> for ZeroNode {
    fn submit(&mut self, _: Cookie, req: &mut Request, cx: &mut Cx<'_, R>) -> Verdict {
        let status = match req.op {
            Op::Read => {
                clear(req, cx);
                block::Status::Ok
            }
            Op::Write | Op::Flush | Op::Discard | Op::WriteZeroes | Op::Prefetch => block::Status::Ok,
            _ => block::Status::NotSupported,
        };
        Verdict::Up(status)
    }
}

fn clear<R: Ring>(req: &Request, cx: &mut Cx<'_, R>) {
    let mut at = 0;
    while at < req.len.0 {
        let data = cx.advance(req.data, at);
        let Some(segment) = cx.segments(data, req.len.0 - at).next() else { return };
        let segment = Segment { len: u64::from(segment.len).min(req.len.0 - at) as u32, ..segment };
        cx.ring.bytes_mut(segment).fill(0);
        at += u64::from(segment.len);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::error;

    #[test]
    fn arguments_are_refused() {
        assert_eq!(error("zero", "1"), "No arguments required");
    }
}
