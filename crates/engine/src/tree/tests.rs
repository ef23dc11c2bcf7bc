//! Trees of one path and of several.

use super::*;
use crate::device::DeviceConfig;
use crate::spec::{DeviceName, LayerSpec, StackSpec, TableSpec};
use block::{Bytes, Sectors};
use queue::Node;
use std::sync::{Arc, Mutex};

fn config(stack: &str, layers: &[&str], limits: &str) -> DeviceConfig {
    DeviceConfig {
        name: "test".parse::<DeviceName>().unwrap(),
        stack: stack.parse().unwrap(),
        layers: layers.iter().map(|layer| layer.parse().unwrap()).collect::<Vec<LayerSpec>>(),
        limits: limits.to_owned(),
        depth: 4,
        slow: None,
        io_timeout: None,
    }
}

fn open(config: &DeviceConfig) -> Result<Tree, DeviceError> {
    let around = Surroundings { pool: &Pool::default(), device: &|_| None };
    super::open(config, &around).map(|form| form.tree)
}

#[test]
fn each_layer_narrows_what_stands_below_it() {
    let tree = open(&config("ram:1M", &["split,max_sectors=255"], "max_segments=3")).unwrap();
    let whole = tree.profile();
    assert_eq!((whole.limits.max_sectors, whole.limits.max_segments), (Sectors(255), 3));
    assert_eq!(whole.size, Bytes::mib(1));
    assert!(!whole.lends && !whole.bytewise && whole.sparse);
    assert!(open(&config("ram:1M", &[], "")).unwrap().profile().lends);
}

#[test]
fn a_path_longer_than_a_request_can_go_is_refused() {
    let splits = ["split,max_sectors=255"; DEPTH_MAX];
    assert!(open(&config("zero:1M", &splits[1..], "")).is_ok());
    assert!(matches!(open(&config("zero:1M", &splits, "")), Err(DeviceError::TooDeep(8))));
    assert!(matches!(open(&config("zero:1M", &splits[1..], "max_sectors=64")), Err(DeviceError::TooDeep(8))));
}

/// Which layer was given which numbers.
type Seen = Arc<Mutex<Vec<(usize, Vec<u8>)>>>;

/// A layer that writes down the numbers of its children.
struct Fork(Seen, usize);

struct Nothing;

impl Node<KernelRing> for Nothing {
    fn submit(
        &mut self,
        _: block::Cookie,
        _: &mut block::Request,
        _: &mut queue::Cx<'_, KernelRing>,
    ) -> queue::Verdict {
        queue::Verdict::Up(block::Status::Ok)
    }
}

impl Layer<KernelRing> for Fork {
    fn profile(&self, below: &[Profile]) -> Result<Profile, LimitsError> {
        Ok(below[0].clone())
    }

    fn node(&self, _: &Profile, below: &[NodeId]) -> Box<dyn Node<KernelRing>> {
        self.0.lock().unwrap().push((self.1, below.iter().map(|id| id.0).collect()));
        Box::new(Nothing)
    }
}

#[test]
fn nodes_are_numbered_as_they_are_put_on_the_stack() {
    let seen = Seen::default();
    let leaf = || Tree::leaf(Source::open(&"zero:1M".parse::<StackSpec>().unwrap()).unwrap());
    let fork = |number, below| Tree::over(Arc::new(Fork(Arc::clone(&seen), number)), below).unwrap();
    let tree = fork(0, vec![fork(1, vec![leaf(), leaf()]), leaf(), fork(2, vec![leaf()])]);
    let mut ring = KernelRing::new(ring::RingConfig::default()).unwrap();
    let mounted = tree.mount(&mut ring, 4, Arc::new(|| {})).unwrap();
    assert_eq!(*seen.lock().unwrap(), [(0, vec![1, 4, 5]), (1, vec![2, 3]), (2, vec![6])]);
    assert_eq!(mounted.held.regions.len(), 4);
    mounted.held.release(&mut ring);
    assert_eq!((tree.count(), tree.height()), (7, 3));
}

#[test]
fn a_scheduler_has_the_depth_of_its_own_device_whatever_stands_above() {
    let lower = Device::open(
        &config("ram:1M", &["mq-deadline"], ""),
        0,
        &Surroundings { pool: &Pool::default(), device: &|_| None },
    );
    let lower = Arc::new(lower.unwrap());
    let find = |name: &str| (name == "test").then(|| lower.clone());
    let around = Surroundings { pool: &Pool::default(), device: &find };
    let table = "0 8 linear test 0".parse::<TableSpec>().unwrap();
    let upper = open_table(&table, &[], "", &around).unwrap().tree;
    let mut ring = KernelRing::new(ring::RingConfig::default()).unwrap();
    let own = lower.mount(&mut ring, 4, Arc::new(|| {})).unwrap();
    let above = upper.mount(&mut ring, 64, Arc::new(|| {})).unwrap();
    assert!(lower.describe().contains(&("nr_requests", "4".to_owned())), "{:?}", lower.describe());
    [own, above].into_iter().for_each(|mounted| mounted.held.release(&mut ring));
}
