//! `error:`, a device on which every request fails, like dm-error: for tests of the layers above.

use crate::{Backend, Fact, Features};
use block::{Bytes, Cookie, QueueLimits, Request, Status};
use queue::{Cx, Node, Ring, Verdict};

/// The part of an error device that all queues share.
#[derive(Clone, Copy, Debug)]
pub struct Failing {
    size: Bytes,
}

impl Failing {
    /// Creates a device of this size, rounded down to whole sectors.
    pub fn new(size: Bytes) -> Failing {
        Failing { size: size.sectors().bytes() }
    }

    /// Creates the node of one hardware queue.
    pub fn node(&self) -> FailingNode {
        FailingNode
    }
}

impl Backend for Failing {
    fn size(&self) -> Bytes {
        self.size
    }

    /// All operations are declared as supported, so that each of them can be tested to fail.
    fn features(&self) -> Features {
        Features::MEMORY
    }

    fn limits(&self) -> QueueLimits {
        crate::memory_limits()
    }

    fn describe(&self) -> Vec<Fact> {
        vec![("backend", "error".to_owned()), ("size", self.size.to_string())]
    }
}

/// Completes every request with [`Status::IoError`].
#[derive(Clone, Copy, Debug)]
pub struct FailingNode;

impl<R: Ring> Node<R> for FailingNode {
    fn submit(&mut self, _io: Cookie, _req: &mut Request, _cx: &mut Cx<'_, R>) -> Verdict {
        Verdict::Up(Status::IoError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Harness;
    use block::Op;

    #[test]
    fn every_operation_on_error_fails() {
        let mut disk = Harness::new(Box::new(Failing::new(Bytes::mib(1)).node()));
        for op in Op::ALL {
            assert_eq!(disk.bare(op, 0, 4096), Status::IoError, "{op:?}");
        }
        assert_eq!(disk.read(0, 512).0, Status::IoError);
    }
}
