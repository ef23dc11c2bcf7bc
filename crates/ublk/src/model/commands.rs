//! Model of the control side: the checks of each command, in the driver's order, and its effect.

use super::device::Device;
use super::{Model, World};
use crate::abi::{
    Attributes, ControlOp, DeviceInfo, Features, ParamIntegrity, ParamTypes, Params, QUEUE_DEPTH_MAX,
    QUEUES_MAX, SEGMENT_SIZE_MIN, ShmemBufferReg, State,
};
use crate::control::{Command, Refusal};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// Maximum number of devices (`UBLK_MINORS`).
const DEVICES_MAX: u32 = 1 << 20;
const PAGE: u32 = 4096;
/// `log2` of the largest physical block, 256 MiB.
const BLOCK_SHIFT_MAX: u8 = 28;
/// Features that every device gets if the driver supports them, requested or not.
const ALWAYS: Features = Features::CMD_IOCTL_ENCODE
    .with(Features::URING_CMD_COMP_IN_TASK)
    .with(Features::PER_IO_DAEMON)
    .with(Features::BUF_REG_OFF_DAEMON)
    .with(Features::SAFE_STOP_DEV);
const RECOVERIES: Features =
    Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE).with(Features::USER_RECOVERY_FAIL_IO);
/// Features with which the server accesses request data itself.
const BY_SERVER: Features =
    Features::USER_COPY.with(Features::SUPPORT_ZERO_COPY).with(Features::AUTO_BUF_REG);

type Answer = Result<(u32, Vec<u8>), Refusal>;

const fn refused(errno: i32) -> Refusal {
    Refusal::Errno(errno)
}

/// Returns the feature without which a driver does not know a command.
fn needs(op: ControlOp) -> Features {
    match op {
        ControlOp::GetDevInfo2 => Features::UNPRIVILEGED_DEV,
        ControlOp::GetFeatures => Features::CMD_IOCTL_ENCODE,
        ControlOp::UpdateSize => Features::UPDATE_SIZE,
        ControlOp::QuiesceDev => Features::QUIESCE,
        ControlOp::TryStopDev => Features::SAFE_STOP_DEV,
        ControlOp::DelDevAsync => Features::USER_COPY,
        ControlOp::RegBuf | ControlOp::UnregBuf => Features::SHMEM_ZC,
        _ => Features::NONE,
    }
}

pub(super) fn execute(model: &Model, command: Command) -> Answer {
    let config = model.world().config;
    if !config.features.has(needs(command.op)) {
        return Err(refused(libc::EOPNOTSUPP));
    }
    match command.op {
        ControlOp::GetFeatures => Ok((0, config.features.0.as_bytes().to_vec())),
        // Where the kernel's driver would hang, the model returns at once without an answer.
        ControlOp::AddDev if config.hangs => Err(Refusal::NoAnswer(command.limit)),
        ControlOp::AddDev => model.change(|world| add(world, &command)),
        ControlOp::DelDev => delete(model, &command),
        ControlOp::StopDev => stop(model, command.device, command.limit, false),
        ControlOp::TryStopDev => stop(model, command.device, command.limit, true),
        ControlOp::StartDev => start(model, &command),
        ControlOp::EndUserRecovery => end_recovery(model, &command),
        ControlOp::QuiesceDev => quiesce(model, &command),
        _ => model.change(|world| at_once(world, command)),
    }
}

/// Returns the device of a command, if the caller has permission.
fn device(world: &mut World, number: u32) -> Result<&mut Device, Refusal> {
    let privileged = world.config.privileged;
    let there = world.devices.get_mut(&number).ok_or(refused(libc::ENODEV))?;
    if !privileged && !there.features().has(Features::UNPRIVILEGED_DEV) {
        return Err(refused(libc::EPERM));
    }
    Ok(there)
}

fn at_once(world: &mut World, command: Command) -> Answer {
    let cpus = world.config.cpus;
    let there = device(world, command.device)?;
    match command.op {
        ControlOp::GetDevInfo | ControlOp::GetDevInfo2 => Ok((0, there.info.as_bytes().to_vec())),
        ControlOp::GetParams => {
            let mut params = there.params;
            params.types |= ParamTypes::DEVT.0;
            params.devt.disk_major = if there.has_disk() { 259 } else { 0 };
            Ok((0, params.as_bytes().to_vec()))
        }
        ControlOp::SetParams => set_params(there, &command.buffer),
        ControlOp::GetQueueAffinity => affinity(cpus, there.info.nr_hw_queues, command),
        ControlOp::DelDevAsync => {
            remove(there);
            world.devices.retain(|_, there| !there.deleted || there.open_by.is_some());
            world.gather(command.device);
            Ok((0, Vec::new()))
        }
        ControlOp::StartUserRecovery => {
            if !there.features().has(Features::USER_RECOVERY) {
                return Err(refused(libc::EINVAL));
            }
            if there.open_by.is_some() || !there.is_recoverable() {
                return Err(refused(libc::EBUSY));
            }
            Ok((0, Vec::new()))
        }
        ControlOp::UpdateSize => {
            if !there.has_disk() {
                return Err(refused(libc::ENODEV));
            }
            there.params.basic.dev_sectors = command.data;
            Ok((0, Vec::new()))
        }
        ControlOp::RegBuf => share(there, &command.buffer),
        ControlOp::UnregBuf => match there.client_memory.get_mut(command.data as usize).map(Option::take) {
            Some(Some(_)) => Ok((0, Vec::new())),
            _ => Err(refused(libc::ENOENT)),
        },
        _ => Err(refused(libc::EOPNOTSUPP)),
    }
}

/// Registers memory shared with clients.
fn share(there: &mut Device, buffer: &[u8]) -> Answer {
    if !there.features().has(Features::SHMEM_ZC) {
        return Err(refused(libc::EOPNOTSUPP));
    }
    let memory = ShmemBufferReg::read_from_bytes(buffer).unwrap_or_default();
    let page = u64::from(PAGE);
    let fits = memory.len > 0 && memory.len <= 1 << 32;
    let whole = memory.addr.is_multiple_of(page) && memory.len.is_multiple_of(page);
    if !fits || !whole || memory.flags & !ShmemBufferReg::READ_ONLY != 0 || memory.reserved != 0 {
        return Err(refused(libc::EINVAL));
    }
    let free = there.client_memory.iter().position(Option::is_none);
    let index = free.unwrap_or(there.client_memory.len());
    there.client_memory.resize(there.client_memory.len().max(index + 1), None);
    there.client_memory[index] = Some((memory.addr, memory.len));
    Ok((index as u32, Vec::new()))
}

fn add(world: &mut World, command: &Command) -> Answer {
    let invalid = Err(refused(libc::EINVAL));
    let config = world.config;
    let Ok(mut info) = DeviceInfo::read_from_bytes(&command.buffer) else { return invalid };
    let sized =
        (1..=QUEUE_DEPTH_MAX).contains(&info.queue_depth) && (1..=QUEUES_MAX).contains(&info.nr_hw_queues);
    if !sized {
        return invalid;
    }
    let mut flags = info.features();
    if config.privileged {
        flags = flags.without(Features::UNPRIVILEGED_DEV);
    } else if !flags.has(Features::UNPRIVILEGED_DEV) {
        return Err(refused(libc::EPERM));
    }
    let recovery = flags.common(RECOVERIES);
    let only_one = !recovery.has(Features::USER_RECOVERY_REISSUE.with(Features::USER_RECOVERY_FAIL_IO));
    if !only_one || !recovery.is_empty() && !recovery.has(Features::USER_RECOVERY) {
        return invalid;
    }
    if flags.has(Features::QUIESCE) && recovery.is_empty() {
        return invalid;
    }
    if flags.has(Features::UNPRIVILEGED_DEV) {
        flags = flags.without(Features::USER_RECOVERY.with(Features::USER_RECOVERY_REISSUE));
        if !flags.common(BY_SERVER).is_empty() {
            return invalid;
        }
    }
    if flags.has(Features::INTEGRITY) && !flags.has(Features::USER_COPY) {
        return invalid;
    }
    if command.device != info.dev_id || command.device != u32::MAX && command.device >= DEVICES_MAX {
        return invalid;
    }
    let number = match command.device {
        u32::MAX => (0..DEVICES_MAX).find(|n| !world.devices.contains_key(n)).unwrap_or(0),
        number if world.devices.contains_key(&number) => return Err(refused(libc::EEXIST)),
        number => number,
    };
    flags = flags.common(config.features).with(ALWAYS.common(config.features));
    if !flags.common(BY_SERVER.with(Features::BATCH_IO)).is_empty() {
        flags = flags.without(Features::NEED_GET_DATA);
    }
    info.flags = flags.0;
    info.dev_id = number;
    info.state = State::Dead as u16;
    info.ublksrv_pid = -1;
    info.nr_hw_queues = info.nr_hw_queues.min(config.cpus);
    info.max_io_buf_bytes = info.max_io_buf_bytes / PAGE * PAGE;
    world.devices.insert(number, Device::new(info));
    Ok((0, info.as_bytes().to_vec()))
}

fn set_params(there: &mut Device, buffer: &[u8]) -> Answer {
    let Ok(params) = Params::read_from_bytes(buffer) else { return Err(refused(libc::EINVAL)) };
    if there.has_disk() {
        return Err(refused(libc::EACCES));
    }
    let granted = !params.types().has(ParamTypes::INTEGRITY) || there.features().has(Features::INTEGRITY);
    if !granted || !valid(&params, there.info.max_io_buf_bytes) {
        there.params = Params { types: 0, ..Params::new() };
        return Err(refused(libc::EINVAL));
    }
    there.params = params;
    Ok((0, Vec::new()))
}

fn valid(params: &Params, io_bytes_max: u32) -> bool {
    let types = params.types();
    let basic = &params.basic;
    let discard = &params.discard;
    let align = params.dma.alignment;
    let boundary = params.seg.seg_boundary_mask.wrapping_add(1);
    let blocks = (9..=12).contains(&basic.logical_bs_shift)
        && basic.physical_bs_shift <= BLOCK_SHIFT_MAX
        && basic.io_min_shift <= BLOCK_SHIFT_MAX
        && basic.io_opt_shift <= BLOCK_SHIFT_MAX
        && basic.logical_bs_shift <= basic.physical_bs_shift;
    let sectors = (PAGE >> 9..=io_bytes_max >> 9).contains(&basic.max_sectors);
    let discards = discard.discard_granularity != 0
        && (discard.max_discard_sectors == 0 || discard.max_discard_segments == 1);
    let aligned = align < PAGE && (align + 1).is_power_of_two();
    let segments = boundary.is_power_of_two()
        && boundary >= SEGMENT_SIZE_MIN.into()
        && params.seg.max_segment_size >= SEGMENT_SIZE_MIN;
    let integrity = &params.integrity;
    let tuple = integrity.tuple_len();
    let guarded = tuple
        .is_some_and(|tuple| integrity.pi_offset.saturating_add(tuple) <= integrity.metadata_size)
        && integrity.metadata_size > 0
        && integrity.flags & !(ParamIntegrity::CAN_GUARD | ParamIntegrity::HAS_REF_TAG) == 0
        && (tuple != Some(0) || integrity.flags & ParamIntegrity::HAS_REF_TAG == 0)
        && (9..=basic.logical_bs_shift).contains(&integrity.interval_exp);
    types.has(ParamTypes::BASIC)
        && (guarded || !types.has(ParamTypes::INTEGRITY))
        && blocks
        && sectors
        && (discards || !types.has(ParamTypes::DISCARD))
        && !types.has(ParamTypes::DEVT)
        && (aligned || !types.has(ParamTypes::DMA_ALIGN))
        && (segments || !types.has(ParamTypes::SEGMENT))
        && params.attributes().0 < 2 * Attributes::FUA.0
}

fn affinity(cpus: u16, queues: u16, command: Command) -> Answer {
    let mut mask = command.buffer;
    if mask.len() * 8 < cpus.into() || !mask.len().is_multiple_of(8) || command.data >= queues.into() {
        return Err(refused(libc::EINVAL));
    }
    mask.fill(0);
    for cpu in (0..cpus).filter(|cpu| u64::from(cpu % queues) == command.data) {
        mask[usize::from(cpu / 8)] |= 1 << (cpu % 8);
    }
    Ok((0, mask))
}

/// Performs the checks that START_DEV and END_USER_RECOVERY have in common.
fn server_of(there: &Device, pid: u64) -> Result<u32, Refusal> {
    match there.open_by {
        Some(process) if u64::from(process) == pid => Ok(process),
        _ => Err(refused(libc::EINVAL)),
    }
}

fn start(model: &Model, command: &Command) -> Answer {
    {
        let mut world = model.world();
        let there = device(&mut world, command.device)?;
        if command.data as i32 <= 0 || !there.params.types().has(ParamTypes::BASIC) {
            return Err(refused(libc::EINVAL));
        }
    }
    model.wait(command.limit, |world| {
        let there = match device(world, command.device) {
            Ok(there) if there.is_ready() => there,
            Ok(_) => return None,
            Err(refusal) => return Some(Err(refusal)),
        };
        if there.has_disk() {
            return Some(Err(refused(libc::EEXIST)));
        }
        Some(server_of(there, command.data).map(|server| {
            there.info.ublksrv_pid = server as i32;
            there.set_state(State::Live);
            (0, Vec::new())
        }))
    })?
}

fn end_recovery(model: &Model, command: &Command) -> Answer {
    model.wait(command.limit, |world| {
        let there = match device(world, command.device) {
            Ok(there) if there.is_ready() => there,
            Ok(_) => return None,
            Err(refusal) => return Some(Err(refusal)),
        };
        let server = match server_of(there, command.data) {
            Ok(server) => server,
            Err(refusal) => return Some(Err(refusal)),
        };
        if !there.features().has(Features::USER_RECOVERY) {
            return Some(Err(refused(libc::EINVAL)));
        }
        if !there.is_recoverable() {
            return Some(Err(refused(libc::EBUSY)));
        }
        there.info.ublksrv_pid = server as i32;
        there.set_state(State::Live);
        there.kick();
        world.gather(command.device);
        Some(Ok((0, Vec::new())))
    })?
}

fn quiesce(model: &Model, command: &Command) -> Answer {
    {
        let mut world = model.world();
        let there = device(&mut world, command.device)?;
        if !there.features().has(Features::QUIESCE) {
            return Err(refused(libc::EOPNOTSUPP));
        }
        match there.state() {
            State::Dead => return Err(refused(libc::ENODEV)),
            State::Quiesced | State::FailIo => return Ok((0, Vec::new())),
            State::Live => there.set_canceling(true),
        }
    }
    let limit = Duration::from_millis(command.data);
    let idle = model.wait(limit, |world| {
        let there = world.devices.get_mut(&command.device)?;
        let idle = |queue: &super::device::Queue| {
            queue.slots.iter().any(|slot| slot.active.is_none() && slot.is_ready())
        };
        there.queues.iter().all(idle).then(|| there.cancel_commands())
    });
    idle.map(|()| (0, Vec::new())).map_err(|_| refused(libc::EBUSY))
}

/// Waits until requests in flight have completed, and removes the block device.
fn stop(model: &Model, number: u32, limit: Duration, only_unused: bool) -> Answer {
    {
        let mut world = model.world();
        let there = device(&mut world, number)?;
        if only_unused {
            if !there.has_disk() {
                return Err(refused(libc::ENODEV));
            }
            if there.openers > 0 {
                return Err(refused(libc::EBUSY));
            }
            there.closed_to_openers = true;
        }
    }
    model.wait(limit, |world| {
        let there = world.devices.get_mut(&number)?;
        if there.is_busy() {
            return None;
        }
        remove_disk(there);
        world.gather(number);
        Some((0, Vec::new()))
    })
}

fn remove_disk(there: &mut Device) {
    if there.has_disk() {
        there.detach();
    }
    there.cancel_commands();
}

fn remove(there: &mut Device) {
    remove_disk(there);
    there.deleted = true;
}

fn delete(model: &Model, command: &Command) -> Answer {
    stop(model, command.device, command.limit, false)?;
    model.change(|world| {
        if let Some(there) = world.devices.get_mut(&command.device) {
            remove(there);
        }
        world.devices.retain(|_, there| !there.deleted || there.open_by.is_some());
    });
    // The number stays in use while the character device is open.
    model.wait(command.limit, |world| {
        (!world.devices.contains_key(&command.device)).then_some((0, Vec::new()))
    })
}
