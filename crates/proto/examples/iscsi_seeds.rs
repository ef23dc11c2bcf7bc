//! Writes the seeds of the iSCSI fuzz corpora: `cargo run -p blockyard-proto --example iscsi_seeds`.
//!
//! The seeds are logins of our own initiator to our own target, and PDUs of both directions, so each target
//! starts from bytes that reach deep into its parser. Run it again when the protocol code gains a feature; it
//! overwrites its own files only and keeps what a fuzzer has found.

use std::path::Path;

use blockyard_proto::iscsi::chap::NONCE_LEN;
use blockyard_proto::iscsi::discovery::{Record, put_record};
use blockyard_proto::iscsi::fuzzing::{Portal, options};
use blockyard_proto::iscsi::login::{self, Target};
use blockyard_proto::iscsi::pdu::{
    Ahs, AsyncEvent, AsyncMessage, BHS_LEN, Bhs, DataIn, DataOut, Header, Logout, LogoutReason,
    LogoutResponse, LogoutResult, NopIn, NopOut, Numbers, R2t, RESERVED_TAG, Reject, RejectReason, Request,
    Residual, Response, ScsiCommand, ScsiResponse, ServiceResponse, Snack, TaskAttribute, TaskFunction,
    TaskManagement, TaskManagementResponse, TaskResult, Text, TextResponse,
};
use blockyard_proto::iscsi::{initiator, stream};

/// Each login's name, the target's settings byte, and the initiator's settings byte (see `fuzzing`).
const LOGINS: [(&str, u8, u8); 10] = [
    ("plain", 0, 0),
    ("discovery", 0, 1),
    ("operational", 0, 2),
    ("security", 0, 4),
    ("chap", 2, 8),
    ("mutual", 2, 24),
    ("optional", 1, 8),
    ("refused", 2, 0),
    ("reinstate", 8, 0),
    ("digest", 4, 2),
];

const NUMBERS: Numbers = Numbers { stat_sn: 9, exp_cmd_sn: 1, max_cmd_sn: 70 };

fn main() -> std::io::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let write = |target: &str, name: &str, bytes: &[u8]| {
        let folder = root.join(target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(format!("seed-{name}")), bytes)
    };
    for (name, policy, wanted) in LOGINS {
        let (sent, answered) = log_in(policy, wanted);
        write("iscsi_login", name, &[&[policy, 255][..], &sent, &text_request()].concat())?;
        write("iscsi_initiator", name, &[&[wanted, 255][..], &answered, &text_response()].concat())?;
    }
    write("iscsi_pdu", "write", requests(&write_command()).as_flattened())?;
    let mut rest = Vec::new();
    Ahs::put_extended_cdb(&mut rest, &[1; 16]);
    write("iscsi_pdu", "commands", &[requests(&commands()).as_flattened(), &rest].concat())?;
    write("iscsi_pdu", "responses", responses().as_flattened())
}

/// Runs a login, and returns the bytes of both directions.
fn log_in(policy: u8, wanted: u8) -> (Vec<u8>, Vec<u8>) {
    let portal = Portal(policy);
    let mut initiator = initiator::Login::new(options(wanted), [7; NONCE_LEN]);
    let mut target = Target::new(std::array::from_fn(|index| index as u8));
    let (mut sent, mut answered) = (Vec::new(), Vec::new());
    while initiator.poll() == initiator::Step::NeedInput && target.poll() == login::Step::NeedInput {
        let requests = std::mem::take(initiator.output());
        let mut left = requests.as_slice();
        while !left.is_empty() {
            left = &left[target.input(left, &portal)..];
        }
        let responses = std::mem::take(target.output());
        let mut left = responses.as_slice();
        while !left.is_empty() {
            left = &left[initiator.input(left)..];
        }
        sent.extend(requests);
        answered.extend(responses);
    }
    (sent, answered)
}

fn text_request() -> Vec<u8> {
    let text = b"SendTargets=All\0";
    let pdu = Text {
        is_final: true,
        continues: false,
        lun: 0,
        itt: 1,
        ttt: RESERVED_TAG,
        cmd_sn: 1,
        exp_stat_sn: 5,
    };
    let bhs = request(Request::Text(pdu), text.len() as u32);
    let mut out = Vec::new();
    stream::put(&mut out, &bhs, &[], text, false, false);
    out
}

fn text_response() -> Vec<u8> {
    let portals = vec![(([192, 0, 2, 1], 3260).into(), 1)];
    let mut text = Vec::new();
    put_record(&mut text, &Record { target: "iqn.2026-11.io.blockyard:disk".to_owned(), portals });
    let mut bhs = [0; BHS_LEN];
    TextResponse { is_final: true, continues: false, lun: 0, itt: 1, ttt: RESERVED_TAG, numbers: NUMBERS }
        .encode(&mut bhs, text.len() as u32);
    let mut out = Vec::new();
    stream::put(&mut out, &bhs, &[], &text, false, false);
    out
}

fn request(pdu: Request, data_len: u32) -> Bhs {
    let mut bhs = [0; BHS_LEN];
    Header { pdu, immediate: false, ahs_len: 0, data_len }.encode(&mut bhs);
    bhs
}

fn requests(pdus: &[(Request, u32)]) -> Vec<Bhs> {
    pdus.iter().map(|(pdu, data_len)| request(*pdu, *data_len)).collect()
}

fn command(cmd_sn: u32, expected_len: u32, write: bool, is_final: bool) -> Request {
    Request::ScsiCommand(ScsiCommand {
        is_final,
        read: !write,
        write,
        attribute: TaskAttribute::Simple,
        lun: 0,
        itt: cmd_sn,
        expected_len,
        cmd_sn,
        exp_stat_sn: 1,
        cdb: [0x2a; 16],
    })
}

/// A write with immediate, unsolicited and solicited data.
fn write_command() -> Vec<(Request, u32)> {
    let data = |ttt, offset| {
        Request::DataOut(DataOut { is_final: true, lun: 0, itt: 0, ttt, exp_stat_sn: 1, data_sn: 0, offset })
    };
    vec![(command(0, 8192, true, false), 512), (data(RESERVED_TAG, 512), 512), (data(1, 1024), 3072)]
}

/// Returns one request of each remaining kind; the commands arrive out of order.
fn commands() -> Vec<(Request, u32)> {
    let (lun, exp_stat_sn) = (0, 1);
    let abort = TaskManagement {
        function: TaskFunction::AbortTask,
        lun,
        itt: 9,
        referenced_itt: 1,
        cmd_sn: 4,
        exp_stat_sn,
        ref_cmd_sn: 1,
        exp_data_sn: 0,
    };
    let reads = [2, 1, 0, 3].map(|cmd_sn| (command(cmd_sn, 512, false, true), 0));
    let others = [
        (Request::TaskManagement(abort), 0),
        (Request::NopOut(NopOut { lun, itt: 8, ttt: RESERVED_TAG, cmd_sn: 5, exp_stat_sn }), 4),
        (
            Request::Logout(Logout {
                reason: LogoutReason::CloseSession,
                itt: 7,
                cid: 0,
                cmd_sn: 6,
                exp_stat_sn,
            }),
            0,
        ),
        (
            Request::Snack(Snack {
                kind: 1,
                lun,
                itt: 1,
                ttt: RESERVED_TAG,
                exp_stat_sn,
                first: 0,
                count: 0,
            }),
            0,
        ),
    ];
    [&reads[..], &others].concat()
}

/// Returns one response of each kind.
fn responses() -> Vec<Bhs> {
    let (lun, itt, numbers) = (0, 1, NUMBERS);
    let pdus = [
        (
            Response::DataIn(DataIn {
                is_final: true,
                acknowledge: false,
                status: Some(0),
                residual: Residual::Underflow(5),
                lun,
                itt,
                ttt: RESERVED_TAG,
                numbers,
                data_sn: 0,
                offset: 0,
            }),
            512,
        ),
        (Response::R2t(R2t { lun, itt, ttt: 1, numbers, r2t_sn: 0, offset: 0, desired_len: 512 }), 0),
        (
            Response::ScsiResponse(ScsiResponse {
                response: ServiceResponse::Completed,
                status: 2,
                status_qualifier: 0,
                itt,
                numbers,
                exp_data_sn: 1,
                residual: Residual::Overflow(1),
            }),
            20,
        ),
        (
            Response::TaskManagement(TaskManagementResponse {
                result: TaskResult::Complete,
                additional: [0; 3],
                itt,
                numbers,
            }),
            0,
        ),
        (
            Response::Logout(LogoutResponse {
                result: LogoutResult::Closed,
                itt,
                numbers,
                time2wait: 2,
                time2retain: 20,
            }),
            0,
        ),
        (Response::Reject(Reject { reason: RejectReason::ProtocolError, numbers, data_sn: 0 }), 48),
        (
            Response::AsyncMessage(AsyncMessage {
                event: AsyncEvent::RequestLogout { within: 5 },
                lun,
                numbers,
            }),
            0,
        ),
        (Response::NopIn(NopIn { lun, itt: RESERVED_TAG, ttt: 5, numbers }), 0),
    ];
    let encode = |(pdu, data_len): &(Response, u32)| {
        let mut bhs = [0; BHS_LEN];
        Header { pdu: *pdu, immediate: false, ahs_len: 0, data_len: *data_len }.encode(&mut bhs);
        bhs
    };
    pdus.iter().map(encode).collect()
}
