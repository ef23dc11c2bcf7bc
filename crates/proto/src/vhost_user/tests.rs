use super::message::*;
use super::session::*;
use super::wire::*;

const OFFER: Offer = Offer {
    features: 1 << 32 | feature::RING_PACKED,
    protocol: protocol::ALL,
    queues: 2,
    queue_size_max: 256,
    regions_max: 3,
};

fn parse(bytes: &[u8], fds: usize) -> Result<Request<'_>, Malformed> {
    let (head, payload) = bytes.split_first_chunk::<HEADER_LEN>().unwrap();
    Request::parse(&Header::parse(head)?, payload, fds)
}

fn region(guest_address: u64, len: u64) -> MemoryRegion {
    MemoryRegion { guest_address, len, user_address: guest_address + (1 << 40), mmap_offset: 0 }
}

fn state(index: u32, num: u32) -> VringState {
    VringState { index, num }
}

/// Returns a session whose ring 0 is started but not enabled.
fn started() -> Session {
    let mut session = Session::new(OFFER);
    for request in [
        Request::SetProtocolFeatures(protocol::ALL),
        Request::SetFeatures(1 << 32 | feature::PROTOCOL_FEATURES),
        Request::SetVringNum(state(0, 128)),
        Request::SetVringAddr(VringAddress::default()),
        Request::SetVringKick(VringFile { index: 0, has_fd: true }),
    ] {
        session.receive(&request).unwrap();
    }
    session
}

#[test]
fn every_request_parses_as_it_was_encoded() {
    let file = VringFile { index: 3, has_fd: true };
    let area = InflightArea { len: 4096, offset: 0, queues: 2, queue_size: 128 };
    let config = Config { offset: 32, kind: ConfigKind::Migration, content: &[1] };
    let requests = [
        Request::GetFeatures,
        Request::SetFeatures(5),
        Request::SetMemTable(vec![region(0, 4096), region(8192, 4096)]),
        Request::SetLogBase(LogArea { len: 64, offset: 4096 }),
        Request::SetVringNum(state(1, 256)),
        Request::SetVringAddr(VringAddress {
            index: 1,
            flags: 1,
            descriptors: 2,
            used: 3,
            available: 4,
            log: 5,
        }),
        Request::SetVringKick(file),
        Request::SetVringCall(VringFile { has_fd: false, ..file }),
        Request::GetConfig(config),
        Request::SetConfig(config),
        Request::SetInflightFd(area),
        Request::AddMemReg(region(4096, 4096)),
        Request::SetStatus(15),
    ];
    for request in requests {
        assert_eq!(parse(&request.encode(false), request.fds()), Ok(request.clone()));
    }
}

#[test]
fn the_reply_with_inflight_memory_has_the_padding_that_qemu_requires() {
    let area = InflightArea { len: 4096, offset: 0, queues: 2, queue_size: 128 };
    let reply = put_inflight(&area);
    assert_eq!(reply[8..12], 24_u32.to_ne_bytes());
    assert_eq!(InflightArea::parse(&reply[12..]), Some(area));
}

#[test]
fn a_payload_or_descriptors_of_the_wrong_number_are_malformed() {
    let request = Request::SetFeatures(1);
    assert!(matches!(parse(&request.encode(false), 1), Err(Malformed::Descriptors { count: 1, .. })));
    let mut bytes = request.encode(false);
    bytes.truncate(HEADER_LEN + 4);
    assert!(matches!(parse(&bytes, 0), Err(Malformed::Length { len: 4, .. })));
    let table = Request::SetMemTable(vec![region(0, 4096)]);
    assert!(parse(&table.encode(false), 0).is_err());
    bytes[4] = 2;
    assert_eq!(parse(&bytes, 0), Err(Malformed::Version(2)));
    bytes[4] = 5;
    assert_eq!(parse(&bytes, 0), Err(Malformed::Direction));
    bytes[8..12].copy_from_slice(&513u32.to_ne_bytes());
    assert_eq!(parse(&bytes, 0), Err(Malformed::TooLong(513)));
}

#[test]
fn a_ring_is_active_when_it_is_started_and_enabled() {
    let mut session = started();
    assert!(session.vrings()[0].is_started() && !session.is_active(0));
    assert_eq!(session.receive(&Request::SetVringEnable(state(0, 1))), Ok(Action::Ring(0)));
    assert!(session.is_active(0));
    assert_eq!(session.receive(&Request::GetVringBase(state(0, 0))), Ok(Action::StopRing(0)));
    assert!(!session.is_active(0) && !session.vrings()[0].is_started());
}

#[test]
fn without_protocol_features_a_ring_needs_no_enabling() {
    let mut session = Session::new(OFFER);
    session.receive(&Request::SetFeatures(1 << 32)).unwrap();
    session.receive(&Request::SetVringNum(state(1, 128))).unwrap();
    session.receive(&Request::SetVringAddr(VringAddress { index: 1, ..Default::default() })).unwrap();
    assert!(!session.is_active(1));
    session.receive(&Request::SetVringKick(VringFile { index: 1, has_fd: true })).unwrap();
    assert!(session.is_active(1));
}

#[test]
fn a_started_ring_keeps_its_size_its_place_and_its_base_but_may_be_logged() {
    let mut session = started();
    assert!(session.receive(&Request::SetVringNum(state(0, 64))).is_err());
    assert!(session.receive(&Request::SetVringBase(state(0, 1))).is_err());
    assert!(session.receive(&Request::SetFeatures(0)).is_err());
    let moved = VringAddress { used: 64, ..VringAddress::default() };
    assert!(session.receive(&Request::SetVringAddr(moved)).is_err());
    let logged = VringAddress { flags: VRING_LOG, log: 4096, ..VringAddress::default() };
    assert_eq!(session.receive(&Request::SetVringAddr(logged)), Ok(Action::Ring(0)));
    let features = session.features() | feature::LOG_ALL;
    assert_eq!(session.receive(&Request::SetFeatures(features)), Ok(Action::LogSwitched));
    assert!(session.logs());
}

#[test]
fn what_was_not_offered_is_refused() {
    let mut session = Session::new(OFFER);
    assert!(session.receive(&Request::SetFeatures(1 << 33)).is_err());
    assert!(session.receive(&Request::SetProtocolFeatures(1 << 14)).is_err());
    assert!(session.receive(&Request::SetVringNum(state(2, 128))).is_err(), "the device has two rings");
    assert!(session.receive(&Request::SetVringNum(state(0, 512))).is_err());
    assert!(session.receive(&Request::SetVringNum(state(0, 100))).is_err(), "no power of two");
    assert!(session.receive(&Request::Unknown(19)).is_err());
    session.receive(&Request::SetFeatures(feature::RING_PACKED)).unwrap();
    assert!(session.receive(&Request::SetVringNum(state(0, 100))).is_ok(), "packed rings have any size");
    let inflight = InflightArea { queues: 3, queue_size: 128, ..InflightArea::default() };
    assert!(session.receive(&Request::GetInflightFd(inflight)).is_err());
}

#[test]
fn regions_of_guest_memory_neither_overlap_nor_wrap() {
    let mut session = Session::new(OFFER);
    let add = |session: &mut Session, region| session.receive(&Request::AddMemReg(region));
    assert_eq!(add(&mut session, region(0, 8192)), Ok(Action::AddMemory));
    assert!(add(&mut session, region(4096, 4096)).is_err());
    assert!(add(&mut session, region(u64::MAX - 4095 - (1 << 40), 8192)).is_err());
    assert!(add(&mut session, region(16384, 0)).is_err());
    assert_eq!(session.regions().len(), 1, "a refusal changes nothing");
    add(&mut session, region(8192, 4096)).unwrap();
    add(&mut session, region(12288, 4096)).unwrap();
    assert!(add(&mut session, region(16384, 4096)).is_err(), "there are three slots");
    let moved = MemoryRegion { mmap_offset: 77, ..region(8192, 4096) };
    assert_eq!(session.receive(&Request::RemMemReg(moved)), Ok(Action::RemoveMemory(1)));
    assert!(session.receive(&Request::RemMemReg(moved)).is_err());
    let table = vec![region(0, 4096), region(0, 4096)];
    assert!(session.receive(&Request::SetMemTable(table)).is_err());
}

#[test]
fn a_reset_forgets_the_driver_and_keeps_the_connection() {
    let mut session = started();
    session.receive(&Request::AddMemReg(region(0, 4096))).unwrap();
    session.receive(&Request::SetStatus(15)).unwrap();
    session.needs_reset();
    assert_eq!(session.receive(&Request::GetStatus), Ok(Action::Number(15 | 64)));
    assert_eq!(session.receive(&Request::SetStatus(0)), Ok(Action::Reset));
    assert_eq!(session.receive(&Request::GetStatus), Ok(Action::Number(0)));
    assert_eq!((session.features(), session.protocol()), (0, protocol::ALL));
    assert_eq!(session.regions().len(), 1);
    assert!(!session.vrings()[0].is_started());
    assert_eq!(session.receive(&Request::ResetDevice), Ok(Action::Reset));
}

#[test]
fn a_refusal_is_acknowledged_or_ends_the_session() {
    let mut session = Session::new(OFFER);
    let header = |flags| Header { request: request::SET_FEATURES, flags: flag::VERSION | flags, len: 8 };
    let no = || Err(Refused("no".to_owned()));
    assert!(session.acknowledge(&header(flag::NEED_REPLY), no()).is_err(), "REPLY_ACK is not negotiated");
    session.receive(&Request::SetProtocolFeatures(protocol::REPLY_ACK)).unwrap();
    let reply = session.acknowledge(&header(flag::NEED_REPLY), no()).unwrap().unwrap();
    assert_eq!(reply, put_number(request::SET_FEATURES, 1));
    let reply = session.acknowledge(&header(flag::NEED_REPLY), Ok(())).unwrap().unwrap();
    assert_eq!(reply, put_number(request::SET_FEATURES, 0));
    assert_eq!(session.acknowledge(&header(0), Ok(())), Ok(None));
    assert!(session.acknowledge(&header(0), no()).is_err());
}
