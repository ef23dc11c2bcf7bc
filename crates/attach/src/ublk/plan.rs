//! Plans a ublk device before it is created: features, queues, data mode.

use super::{UblkError, params};
use ::ublk::{DeviceInfo, Features, NewDevice, Params};
use block::{Bytes, Integrity, Profile};
use exports::ublk::{Choice, Circumstances, DataMode};
use spec::{Recovery, UblkSpec};

/// Whether most requests complete within submit.
fn completes_inline(profile: &Profile) -> bool {
    profile.inline || profile.zero_copy_reads
}

/// Default of the largest request.
const IO_MAX: Bytes = Bytes(512 << 10);
/// Most bytes of buffers per queue if every tag has one: all buffers fill up when memory runs out and
/// everything is written back at once. At the default depth this is 128 KiB a request, the block layer's
/// default read-ahead.
const BUFFERS_MAX: Bytes = Bytes::mib(16);
/// Lower bound of the largest request, at any depth.
const IO_MAX_LEAST: Bytes = Bytes(64 << 10);
/// Features of drivers that are too old to report any: Linux 6.1.
const OLDEST: Features = Features::URING_CMD_COMP_IN_TASK
    .with(Features::NEED_GET_DATA)
    .with(Features::USER_RECOVERY)
    .with(Features::USER_RECOVERY_REISSUE);
/// Flag in the driver's `ublksrv_flags`: every queue is served by all threads.
pub(super) const SPREAD: u64 = 1;
/// The reason for no integrity data where the stack stores none.
const NO_INTEGRITY: &str = "the stack keeps none";

/// Properties of the stack that the plan depends on.
pub(super) struct StackFacts<'a> {
    pub(super) profile: &'a Profile,
    /// Whether the data outlives the process.
    pub(super) survives: bool,
    /// Integrity data that the stack keeps.
    pub(super) integrity: Option<Integrity>,
    /// A layer hides the integrity data kept below it.
    pub(super) hides_integrity: bool,
    /// Kernel buffers that each thread can still register, in each free stretch of its table.
    pub(super) room: &'a [Vec<u16>],
}

/// Arguments of the driver's commands, and the reasons.
pub(super) struct Plan {
    pub(super) new: NewDevice,
    pub(super) params: Params,
    pub(super) choice: Choice,
    /// Whether commands are batched, and why.
    pub(super) batch: (bool, &'static str),
    pub(super) io_max: Bytes,
    /// The integrity data of the device, and the reason if there is none.
    pub(super) integrity: (Option<Integrity>, &'static str),
    /// Features that the driver reports.
    pub(super) offered: Option<Features>,
    /// Features that the driver must grant, each with the option that needs it.
    essential: Vec<(Features, &'static str)>,
}

impl Plan {
    /// Plans a new device.
    pub(super) fn new(
        spec: &UblkSpec,
        stack: &StackFacts<'_>,
        depth: u16,
        threads: u16,
        offered: Option<Features>,
    ) -> Result<Plan, UblkError> {
        let has = offered.unwrap_or(OLDEST);
        let profile = stack.profile;
        let recovery = recovery(spec, stack.survives)?;
        let integrity = integrity(spec, stack, has);
        let zoned = profile.limits.features.contains(block::Features::ZONED);
        if zoned && profile.limits.max_hw_zone_append_sectors.0 == 0 {
            return Err(UblkError::NoAppend);
        }
        let depth = spec.depth.unwrap_or(depth).min(::ublk::QUEUE_DEPTH_MAX - 1);
        let queues = spec.queues.unwrap_or(threads);
        let assignments = assignments(queues, depth, threads.max(1).into(), spec.per_io_daemon);
        let at = Circumstances {
            offered: has,
            unprivileged: spec.unprivileged,
            zoned,
            opaque: profile.opaque,
            inline: completes_inline(profile),
            has_room: fits(&assignments, stack.room),
        };
        let choice = match spec.mode {
            Some(mode) => {
                at.check(mode)?;
                Choice { mode, why: "asked for" }
            }
            None if integrity.0.is_some() => {
                Choice { mode: DataMode::UserCopy, why: "integrity data needs it" }
            }
            None => at.best(),
        };
        let batch = batch(spec, choice.mode, zoned, has)?;
        check_sharing(spec, profile, choice.mode)?;
        let mut essential = vec![(choice.mode.features(), "mode=…"), (recovery.features(), "recovery=…")];
        for (wanted, feature, option) in [
            (spec.unprivileged, Features::UNPRIVILEGED_DEV, "unprivileged"),
            (spec.per_io_daemon, Features::PER_IO_DAEMON, "per-io-daemon"),
            (spec.no_part_scan, Features::NO_AUTO_PART_SCAN, "no-part-scan"),
            (batch.0, Features::BATCH_IO, "batch=yes"),
            (spec.shmem.is_some(), Features::SHMEM_ZC, "shmem=…"),
            (integrity.0.is_some(), Features::INTEGRITY, "integrity=…"),
            (zoned, Features::ZONED, "the zones, or choose a newer kernel"),
        ] {
            essential.extend(wanted.then_some((feature, option)));
        }
        for (feature, option) in &essential {
            let lacking = feature.without(has);
            // recovery=none requires no feature.
            if !lacking.is_empty() {
                return Err(UblkError::Lacks(lacking, option));
            }
        }
        let mut features = Features::UPDATE_SIZE.with(Features::CMD_IOCTL_ENCODE);
        // With batches, quiescing makes Linux 7.3 fail all requests until the next server comes.
        if recovery != Recovery::None && !batch.0 {
            features = features.with(Features::QUIESCE);
        }
        features = features.common(has);
        for (feature, _) in &essential {
            features = features.with(*feature);
        }
        let io_max = io_max(spec, profile, choice.mode, depth);
        Ok(Plan {
            new: NewDevice {
                number: spec.number,
                queues,
                depth,
                io_bytes_max: io_max.0 as u32,
                features,
                server_flags: if spec.per_io_daemon { SPREAD } else { 0 },
            },
            params: params::with_integrity(params::of(profile, io_max)?, integrity.0),
            choice,
            batch,
            integrity,
            io_max,
            offered,
            essential,
        })
    }

    /// Plans the takeover of a device with the parameters that it was created with.
    pub(super) fn of(
        spec: &UblkSpec,
        profile: &Profile,
        info: &DeviceInfo,
        params: &Params,
        offered: Option<Features>,
    ) -> Result<Plan, UblkError> {
        let features = info.features();
        let newest_first =
            [DataMode::AutoZeroCopy, DataMode::ZeroCopy, DataMode::UserCopy, DataMode::GetData];
        let made =
            newest_first.into_iter().find(|mode| features.has(mode.features())).unwrap_or(DataMode::Copy);
        let zoned = features.has(Features::ZONED);
        let unprivileged = spec.unprivileged;
        let at = Circumstances {
            offered: features,
            unprivileged,
            zoned,
            opaque: profile.opaque,
            inline: completes_inline(profile),
            has_room: true,
        };
        at.check(made)?;
        check_sharing(spec, profile, made)?;
        if spec.shmem.is_some() && !features.has(Features::SHMEM_ZC) {
            return Err(UblkError::NoSharing("the device was created without it"));
        }
        let io_max = Bytes(info.max_io_buf_bytes.into());
        let now = params::of(profile, io_max)?;
        Ok(Plan {
            new: NewDevice {
                number: Some(info.dev_id),
                queues: info.nr_hw_queues,
                depth: info.queue_depth,
                io_bytes_max: info.max_io_buf_bytes,
                features,
                server_flags: info.ublksrv_flags,
            },
            params: Params {
                basic: ::ublk::ParamBasic { dev_sectors: now.basic.dev_sectors, ..params.basic },
                ..*params
            },
            choice: Choice { mode: made, why: "the device was created so" },
            batch: (features.has(Features::BATCH_IO), "the device was created so"),
            integrity: (None, NO_INTEGRITY),
            io_max,
            offered,
            essential: Vec::new(),
        })
    }

    /// Checks that the driver granted the features. An old driver that cannot report its features refuses
    /// only now.
    pub(super) fn check_granted(&self, granted: Features) -> Result<(), UblkError> {
        for (feature, option) in &self.essential {
            let lacking = feature.without(granted);
            if lacking == Features::UNPRIVILEGED_DEV {
                return Err(UblkError::Privileged);
            }
            if !lacking.is_empty() {
                return Err(UblkError::Lacks(lacking, option));
            }
        }
        Ok(())
    }
}

/// Chooses what happens when the server dies. By default requests are reissued to the next server, as
/// repeating a write is harmless.
fn recovery(spec: &UblkSpec, survives: bool) -> Result<Recovery, UblkError> {
    match spec.recovery {
        Some(Recovery::None) => Ok(Recovery::None),
        Some(_) if !survives => Err(UblkError::Volatile),
        Some(_) if spec.unprivileged => Err(UblkError::UnprivilegedRecovery),
        Some(asked) => Ok(asked),
        None if survives && !spec.unprivileged => Ok(Recovery::Reissue),
        None => Ok(Recovery::None),
    }
}

/// Checks whether memory can be shared with clients, if requested.
fn check_sharing(spec: &UblkSpec, profile: &Profile, mode: DataMode) -> Result<(), UblkError> {
    match () {
        () if spec.shmem.is_none() => Ok(()),
        // Clients may change shared memory at any time, so no layer may read it.
        () if !profile.opaque => Err(UblkError::NoSharing("the stack accesses data")),
        () if mode == DataMode::GetData => Err(UblkError::NoSharing("get-data uses memory of its own")),
        () => Ok(()),
    }
}

/// Chooses the integrity data of the block device, with the reason. Integrity data that cannot be offered
/// is omitted: the device works without it.
fn integrity(spec: &UblkSpec, stack: &StackFacts<'_>, has: Features) -> (Option<Integrity>, &'static str) {
    let none = |why| (None, why);
    match (stack.integrity, spec.mode) {
        (None, _) if stack.hides_integrity => none("left out: a layer above does not carry it"),
        (None, _) => none(NO_INTEGRITY),
        (Some(_), Some(mode)) if mode != DataMode::UserCopy => {
            none("left out: it needs user-copy, and another mode was requested")
        }
        (Some(_), _) if spec.unprivileged => none("left out: an unprivileged device cannot have it"),
        (Some(_), _) if !has.has(Features::INTEGRITY) => none("left out: the driver lacks INTEGRITY (7.0)"),
        (Some(shape), _) => (Some(shape), "the stack keeps it"),
    }
}

/// Chooses whether commands are batched, with the reason.
fn batch(
    spec: &UblkSpec,
    mode: DataMode,
    zoned: bool,
    has: Features,
) -> Result<(bool, &'static str), UblkError> {
    let obstacle = if zoned {
        Some("zoned commands are per request")
    } else if mode == DataMode::GetData {
        Some("the driver does not support it with get-data")
    } else if spec.per_io_daemon {
        Some("per-io-daemon gives each thread tags of its own")
    } else {
        None
    };
    match (spec.batch, obstacle) {
        (Some(true), Some(why)) => Err(UblkError::NoBatch(why)),
        (Some(true), None) => Ok((true, "asked for")),
        (Some(false), _) => Ok((false, "asked for")),
        (None, Some(why)) => Ok((false, why)),
        (None, None) if !has.has(Features::BATCH_IO) => Ok((false, "the driver lacks BATCH_IO (7.0)")),
        // docs/ublk.md has measurements, and describes the driver's behaviour when a batching server is
        // killed.
        (None, None) => Ok((false, "safer when a server is killed (batch=yes enables it)")),
    }
}

fn io_max(spec: &UblkSpec, profile: &Profile, mode: DataMode, depth: u16) -> Bytes {
    let most = Bytes(::ublk::IO_BUFFER_BYTES_MAX.into());
    let wanted = match mode {
        DataMode::Copy => Bytes(BUFFERS_MAX.0 / u64::from(depth.max(1))).clamp(IO_MAX_LEAST, IO_MAX),
        _ => IO_MAX,
    };
    let stack = profile.limits.max_sectors.bytes().min(most);
    // Whole pages, as the driver rounds it.
    Bytes(spec.io_max.unwrap_or(wanted.min(stack)).0.next_multiple_of(4096)).min(most)
}

/// A queue, or a part of one, and the reactor that serves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Assignment {
    pub(super) queue: u16,
    pub(super) reactor: usize,
    pub(super) first_tag: u16,
    pub(super) tags: u16,
}

/// Assigns queues to reactors: a queue has one reactor, or is spread over all, each with a share of the tags.
pub(super) fn assignments(queues: u16, depth: u16, reactors: usize, spread: bool) -> Vec<Assignment> {
    let mut all = Vec::new();
    for queue in 0..queues {
        let first = usize::from(queue) % reactors;
        let shares = if spread { reactors.min(depth.into()) as u16 } else { 1 };
        let mut first_tag = 0;
        for share in 0..shares {
            let tags = depth / shares + u16::from(share < depth % shares);
            all.push(Assignment { queue, reactor: (first + usize::from(share)) % reactors, first_tag, tags });
            first_tag += tags;
        }
    }
    all
}

/// Whether the tags of each part fit into a free stretch of its reactor's table. The ring allocates them
/// part by part, in the first stretch that is large enough.
fn fits(assignments: &[Assignment], room: &[Vec<u16>]) -> bool {
    let mut room = room.to_vec();
    assignments.iter().all(|part| {
        let stretches = room.get_mut(part.reactor).into_iter().flatten();
        let fits = stretches.into_iter().find(|stretch| **stretch >= part.tags);
        fits.map(|stretch| *stretch -= part.tags).is_some()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::{Abilities, QueueLimits};

    fn profile() -> Profile {
        let mut limits = QueueLimits { max_hw_sectors: Bytes::mib(32).sectors(), ..QueueLimits::default() };
        limits.max_user_sectors = limits.max_hw_sectors;
        limits.validate().unwrap();
        Profile {
            size: Bytes::mib(1),
            read_only: false,
            abilities: Abilities::MEMORY,
            limits,
            bytewise: true,
            zero_copy_reads: false,
            inline: false,
            sparse: false,
            opaque: true,
        }
    }

    fn plan(text: &str, survives: bool, offered: Option<Features>) -> Result<Plan, UblkError> {
        let room = [vec![u16::MAX], vec![u16::MAX]];
        let stack = StackFacts {
            profile: &profile(),
            survives,
            integrity: None,
            hides_integrity: false,
            room: &room,
        };
        Plan::new(&text.parse().unwrap(), &stack, 128, 2, offered)
    }

    fn error(text: &str, survives: bool, offered: Option<Features>) -> String {
        plan(text, survives, offered).err().unwrap().to_string()
    }

    #[test]
    fn zones_without_append_are_refused_with_a_hint() {
        let mut profile = profile();
        profile.limits.features = block::Features::ZONED;
        let room = [vec![u16::MAX], vec![u16::MAX]];
        let stack = StackFacts {
            profile: &profile,
            survives: true,
            integrity: None,
            hides_integrity: false,
            room: &room,
        };
        let plan = Plan::new(&"".parse().unwrap(), &stack, 128, 2, Some(Features::KNOWN));
        let error = plan.err().unwrap().to_string();
        assert!(error.contains("zone_append_max_sectors=0"), "{error}");
    }

    #[test]
    fn the_newest_driver_gives_zero_copy_and_recovery() {
        let plan = plan("", true, Some(Features::KNOWN)).unwrap();
        assert_eq!(plan.choice.mode, DataMode::AutoZeroCopy);
        let features = plan.new.features;
        assert!(
            features.has(Recovery::Reissue.features().with(Features::QUIESCE).with(Features::UPDATE_SIZE))
        );
        assert!(features.common(Features::ZONED.with(Features::UNPRIVILEGED_DEV)).is_empty());
        assert_eq!((plan.new.queues, plan.new.depth, plan.new.io_bytes_max), (2, 128, 512 << 10));
    }

    #[test]
    fn data_is_copied_where_tags_cannot_be_registered() {
        let with = |text: &str, room: &[&[u16]]| {
            let room: Vec<Vec<u16>> = room.iter().map(|stretches| stretches.to_vec()).collect();
            let stack = StackFacts {
                profile: &profile(),
                survives: true,
                integrity: None,
                hides_integrity: false,
                room: &room,
            };
            Plan::new(&text.parse().unwrap(), &stack, 128, 2, Some(Features::KNOWN)).unwrap().choice.mode
        };
        let (yes, no) = (DataMode::AutoZeroCopy, DataMode::Copy);
        assert_eq!((with("", &[&[128], &[128]]), with("", &[&[128], &[127]])), (yes, no));
        // The first of two threads has two of three queues, each with a region of its own.
        assert_eq!((with("queues=3", &[&[256], &[128]]), with("queues=3", &[&[255], &[255]])), (yes, no));
        assert_eq!(with("queues=3", &[&[100, 128, 130], &[128]]), yes);
        assert_eq!(with("queues=3", &[&[127, 129], &[128]]), no);
        // A thread registers only its share of the tags.
        assert_eq!(with("queues=1,per-io-daemon", &[&[64], &[64]]), yes);
        assert_eq!(with("queues=2,per-io-daemon", &[&[127], &[128]]), no);
        assert_eq!(with("", &[&[]]), no, "a thread that has ended has none");
        assert_eq!(
            with("mode=zero-copy", &[&[], &[]]),
            DataMode::ZeroCopy,
            "an explicit mode is kept and fails with the reason"
        );
    }

    #[test]
    fn batches_are_used_on_request_with_compatible_options_only() {
        let all = Some(Features::KNOWN);
        assert!(!plan("", true, all).unwrap().batch.0);
        let asked = plan("batch=yes", true, all).unwrap();
        assert!(asked.batch.0 && asked.new.features.has(Features::BATCH_IO));
        assert!(!asked.new.features.has(Features::QUIESCE), "they do not go together");
        assert!(error("batch=yes,mode=get-data", true, all).contains("get-data (leave out batch=yes)"));
        assert!(error("batch=yes,per-io-daemon", true, all).contains("leave out batch=yes"));
        let old = Some(Features::KNOWN.without(Features::BATCH_IO));
        assert!(error("batch=yes", true, old).contains("lacks BATCH_IO"));
        assert!(plan("batch=no", true, old).is_ok());
    }

    #[test]
    fn memory_is_shared_by_stacks_that_do_not_access_data() {
        let all = Some(Features::KNOWN);
        assert!(plan("shmem=/dev/shm/x", true, all).unwrap().new.features.has(Features::SHMEM_ZC));
        let refusal = error("shmem=/dev/shm/x,mode=get-data", true, all);
        assert!(refusal.contains("get-data uses memory of its own (leave out shmem=…)"), "{refusal}");
        let old = Some(Features::KNOWN.without(Features::SHMEM_ZC));
        assert!(error("shmem=/dev/shm/x", true, old).contains("lacks SHMEM_ZC"));
        let looks = Profile { opaque: false, ..profile() };
        let spec = "shmem=/dev/shm/x".parse().unwrap();
        let stack = StackFacts {
            profile: &looks,
            survives: true,
            integrity: None,
            hides_integrity: false,
            room: &[],
        };
        let refused = Plan::new(&spec, &stack, 128, 2, all).err().unwrap().to_string();
        assert!(refused.contains("the stack accesses data"), "{refused}");
    }

    #[test]
    fn a_recovered_device_shares_memory_under_the_same_conditions() {
        let take_over = |profile: &Profile, features: Features| {
            let info = DeviceInfo {
                flags: features.0,
                queue_depth: 8,
                nr_hw_queues: 1,
                max_io_buf_bytes: 64 << 10,
                ..DeviceInfo::default()
            };
            let spec = "shmem=/dev/shm/x".parse().unwrap();
            let params = params::of(profile, Bytes(64 << 10)).unwrap();
            Plan::of(&spec, profile, &info, &params, Some(Features::KNOWN))
                .map(|_| ())
                .map_err(|e| e.to_string())
        };
        let sharing = DataMode::UserCopy.features().with(Features::SHMEM_ZC);
        assert_eq!(take_over(&profile(), sharing), Ok(()));
        let why = take_over(&profile(), DataMode::UserCopy.features()).unwrap_err();
        assert!(why.contains("the device was created without it (leave out shmem=…)"), "{why}");
        let why = take_over(&Profile { opaque: false, ..profile() }, sharing).unwrap_err();
        assert!(why.contains("the stack accesses data"), "{why}");
        let why = take_over(&profile(), DataMode::GetData.features().with(Features::SHMEM_ZC)).unwrap_err();
        assert!(why.contains("get-data uses memory of its own"), "{why}");
    }

    #[test]
    fn an_old_driver_gets_only_the_features_of_all_drivers() {
        let plan = plan("", true, None).unwrap();
        assert_eq!(plan.choice.mode, DataMode::Copy);
        assert_eq!(plan.new.io_bytes_max, 128 << 10, "128 buffers of 16 MiB");
        assert_eq!(plan.new.features, Recovery::Reissue.features());
        assert!(plan.check_granted(Features::USER_RECOVERY).is_err());
        assert!(plan.check_granted(Features::NONE).is_err());
        assert!(plan.check_granted(Recovery::Reissue.features()).is_ok());
    }

    #[test]
    fn a_volatile_device_is_not_recovered() {
        let plan = plan("", false, Some(Features::KNOWN)).unwrap();
        assert_eq!(Recovery::of(plan.new.features), Recovery::None);
        assert!(!plan.new.features.has(Features::QUIESCE));
        assert!(error("recovery=requeue", false, None).contains("dies with its process"));
    }

    #[test]
    fn a_missing_feature_is_named_with_its_option() {
        let old =
            Some(Features::KNOWN.without(Features::NO_AUTO_PART_SCAN.with(Features::USER_RECOVERY_FAIL_IO)));
        assert!(
            error("no-part-scan", true, old).contains("lacks NO_AUTO_PART_SCAN (leave out no-part-scan)")
        );
        assert!(error("recovery=fail-io", true, old).contains("lacks USER_RECOVERY_FAIL_IO"));
        assert!(error("mode=user-copy", true, None).contains("USER_COPY"));
    }

    #[test]
    fn an_unprivileged_device_is_copied_and_not_recovered() {
        let plan = plan("unprivileged", true, Some(Features::KNOWN)).unwrap();
        assert_eq!(plan.choice.mode, DataMode::Copy);
        assert_eq!(Recovery::of(plan.new.features), Recovery::None);
        let granted = plan.new.features.without(Features::UNPRIVILEGED_DEV);
        assert!(matches!(plan.check_granted(granted), Err(UblkError::Privileged)), "as root");
        assert!(error("unprivileged,recovery=reissue", true, None).contains("cannot be recovered"));
    }

    #[test]
    fn every_tag_of_every_queue_is_served_once() {
        for (queues, depth, reactors, spread) in
            [(1, 4, 1, false), (3, 5, 2, false), (2, 7, 3, true), (1, 1, 4, true)]
        {
            let assignments = assignments(queues, depth, reactors, spread);
            for queue in 0..queues {
                let mut tags: Vec<u16> = assignments
                    .iter()
                    .filter(|part| part.queue == queue)
                    .flat_map(|part| part.first_tag..part.first_tag + part.tags)
                    .collect();
                tags.sort_unstable();
                assert_eq!(tags, (0..depth).collect::<Vec<_>>());
            }
            assert!(assignments.iter().all(|part| part.reactor < reactors && part.tags > 0));
        }
    }
}
