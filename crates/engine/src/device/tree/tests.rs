//! Trees with one path and with several.

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
    let context = OpenContext { pool: &SourcePool::default(), device: &|_| None, name: None };
    super::open(config, &context).map(|composition| composition.tree)
}

#[test]
fn each_layer_narrows_the_profile_below_it() {
    let tree = open(&config("ram:1M", &["split,max_sectors=255"], "max_segments=3")).unwrap();
    let whole = tree.profile();
    assert_eq!((whole.limits.max_sectors, whole.limits.max_segments), (Sectors(255), 3));
    assert_eq!(whole.size, Bytes::mib(1));
    assert!(!whole.zero_copy_reads && !whole.bytewise && whole.sparse);
    assert!(open(&config("ram:1M", &[], "")).unwrap().profile().zero_copy_reads);
}

#[test]
fn a_path_longer_than_depth_max_is_refused() {
    let splits = ["split,max_sectors=255"; DEPTH_MAX];
    assert!(open(&config("zero:1M", &splits[1..], "")).is_ok());
    assert!(matches!(open(&config("zero:1M", &splits, "")), Err(DeviceError::TooDeep(8))));
    assert!(matches!(open(&config("zero:1M", &splits[1..], "max_sectors=64")), Err(DeviceError::TooDeep(8))));
}

/// Numbers that each layer was given.
type Seen = Arc<Mutex<Vec<(usize, Vec<u8>)>>>;

/// A layer that records the numbers of its children.
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
fn nodes_are_numbered_in_stack_order() {
    let seen = Seen::default();
    let leaf = || Tree::leaf(source::open(&"zero:1M".parse::<StackSpec>().unwrap(), None).unwrap());
    let fork = |number, below| Tree::over(Arc::new(Fork(Arc::clone(&seen), number)), below).unwrap();
    let tree = fork(0, vec![fork(1, vec![leaf(), leaf()]), leaf(), fork(2, vec![leaf()])]);
    let mut ring = KernelRing::new(ring::RingConfig::default()).unwrap();
    let built = tree.build_nodes(&mut ring, 4, Arc::new(|| {})).unwrap();
    assert_eq!(*seen.lock().unwrap(), [(0, vec![1, 4, 5]), (1, vec![2, 3]), (2, vec![6])]);
    assert_eq!(built.resources.regions.len(), 4);
    built.resources.release(&mut ring);
    assert_eq!((tree.count(), tree.height()), (7, 3));
}

#[test]
fn a_scheduler_has_the_depth_of_its_own_device() {
    let lower = Device::open(
        &config("ram:1M", &["mq-deadline"], ""),
        0,
        &OpenContext { pool: &SourcePool::default(), device: &|_| None, name: None },
    );
    let lower = Arc::new(lower.unwrap());
    let find = |name: &str| (name == "test").then(|| lower.clone());
    let context = OpenContext { pool: &SourcePool::default(), device: &find, name: None };
    let table = "0 8 linear test 0".parse::<TableSpec>().unwrap();
    let upper = open_table(&table, &[], "", &context).unwrap().tree;
    let mut ring = KernelRing::new(ring::RingConfig::default()).unwrap();
    let own = lower.build_nodes(&mut ring, 4, Arc::new(|| {})).unwrap();
    let above = upper.build_nodes(&mut ring, 64, Arc::new(|| {})).unwrap();
    assert!(lower.describe().contains(&("nr_requests", "4".to_owned())), "{:?}", lower.describe());
    [own, above].into_iter().for_each(|built| built.resources.release(&mut ring));
}

#[test]
fn backends_are_labelled_with_their_files_and_those_of_an_overlay_with_their_roles() {
    let dir = tempfile::tempdir().unwrap();
    let [origin, overlay] =
        ["golden.img", "mine.cow"].map(|name| dir.path().join(name).display().to_string());
    std::fs::write(&origin, vec![0; 1 << 20]).unwrap();
    let layers = [&*format!("cow,file={overlay},create"), "split,max_sectors=8"];
    let context = OpenContext { pool: &SourcePool::default(), device: &|_| None, name: None };
    let device =
        Arc::new(Device::open(&config(&format!("file:{origin}"), &layers, ""), 0, &context).unwrap());
    let expected = [String::new(), String::new(), format!("origin {origin}"), format!("overlay {overlay}")];
    assert_eq!(device.labels(), expected, "{:?}", device.nodes());
    let find = |name: &str| (name == "test").then(|| device.clone());
    let context = OpenContext { pool: &SourcePool::default(), device: &find, name: None };
    let upper =
        open_table(&"0 8 linear test 0".parse::<TableSpec>().unwrap(), &[], "", &context).unwrap().tree;
    assert!(upper.labels().contains(&"device test".to_owned()), "{:?}", upper.labels());
}
