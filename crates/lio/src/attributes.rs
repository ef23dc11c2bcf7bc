//! The attributes and parameters of LIO's objects: names, defaults, permitted values.
//!
//! Source: `target_core_configfs.c` (`attrib/` of a device), `iscsi_target_configfs.c` (portal groups, ACLs), RFC 7143
//! section 13 (parameters). Values that LIO accepts for features that are missing here (T10 protection, error recovery
//! levels 1 and 2) are refused.

/// The rule for values of an attribute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// The attribute is read-only.
    ReadOnly,
    /// 0 or 1.
    Flag,
    /// A number in this range.
    Range(i64, i64),
    /// One of these numbers.
    OneOf(&'static [i64]),
    /// Any value is accepted, and nothing changes: LIO deprecated the attribute.
    Deprecated,
    /// `emulate_write_cache`: 0 or 1. A block device reports its own cache, whatever the value.
    WriteCache,
    /// 0 or 1; 1 only if the backstore can deallocate blocks.
    Unmap,
    /// At most `hw_max_sectors`.
    OptimalSectors,
    /// 1 to `hw_queue_depth`.
    QueueDepth,
}

/// An attribute: a number with a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttributeRow {
    /// LIO's name.
    pub name: &'static str,
    /// The purpose, in a few words.
    pub about: &'static str,
    /// The default, unless the backstore has one of its own.
    pub default: i64,
    /// The permitted values.
    pub rule: Rule,
    /// Whether it can be changed only while no LUN refers to the storage object.
    pub unexported_only: bool,
}

const fn row(name: &'static str, default: i64, rule: Rule, about: &'static str) -> AttributeRow {
    AttributeRow { name, about, default, rule, unexported_only: false }
}

const fn fixed(name: &'static str, default: i64, rule: Rule, about: &'static str) -> AttributeRow {
    AttributeRow { name, about, default, rule, unexported_only: true }
}

const U32: Rule = Rule::Range(0, u32::MAX as i64);

/// The attributes of a storage object, sorted by name.
pub const STORAGE: &[AttributeRow] = &[
    row("alua_support", 1, Rule::Flag, "1: target port groups are reported."),
    row("atomic_alignment", 0, Rule::ReadOnly, "Alignment of atomic writes in blocks; 0: any."),
    row("atomic_granularity", 0, Rule::ReadOnly, "Granularity of atomic writes in blocks; 0: any."),
    row(
        "atomic_max_boundary",
        0,
        Rule::ReadOnly,
        "Boundary that atomic writes cannot cross, in blocks; 0: none.",
    ),
    row("atomic_max_len", 0, Rule::ReadOnly, "Longest atomic write in blocks; 0: there are none."),
    row("atomic_max_with_boundary", 0, Rule::ReadOnly, "Longest atomic write with a boundary, in blocks."),
    fixed("block_size", 512, Rule::OneOf(&[512, 1024, 2048, 4096]), "Size of a logical block in bytes."),
    row("emulate_3pc", 1, Rule::Flag, "1: third-party copy (EXTENDED COPY)."),
    row("emulate_caw", 1, Rule::Flag, "1: COMPARE AND WRITE."),
    row("emulate_dpo", 1, Rule::Deprecated, "Deprecated: DPO is always accepted."),
    row("emulate_fua_read", 1, Rule::Deprecated, "Deprecated: FUA of reads is always accepted."),
    row("emulate_fua_write", 1, Rule::Flag, "1: FUA of writes."),
    fixed("emulate_model_alias", 0, Rule::Flag, "1: the product of INQUIRY is the storage object's name."),
    row("emulate_pr", 1, Rule::Flag, "1: reservations."),
    row("emulate_rest_reord", 0, Rule::Range(0, 0), "0: commands may be reordered without restriction."),
    row("emulate_rsoc", 1, Rule::Flag, "1: REPORT SUPPORTED OPERATION CODES."),
    fixed("emulate_tas", 1, Rule::Flag, "1: commands aborted for another initiator end with TASK ABORTED."),
    row("emulate_tpu", 0, Rule::Unmap, "1: UNMAP."),
    row("emulate_tpws", 0, Rule::Unmap, "1: WRITE SAME with its UNMAP bit."),
    fixed("emulate_ua_intlck_ctrl", 0, Rule::Range(0, 2), "Interlock of unit attentions: 0 to 2."),
    row("emulate_write_cache", 0, Rule::WriteCache, "1: a volatile write cache is reported."),
    row("enforce_pr_isids", 1, Rule::Flag, "1: a registration belongs to an initiator port with its ISID."),
    fixed("force_pr_aptpl", 0, Rule::Flag, "1: every registration persists through power loss."),
    row("hw_block_size", 512, Rule::ReadOnly, "Block size of the backstore in bytes."),
    row("hw_max_sectors", 16384, Rule::ReadOnly, "Largest request of the backstore in blocks."),
    row("hw_pi_prot_type", 0, Rule::ReadOnly, "Protection type of the backstore's hardware."),
    row("hw_queue_depth", 128, Rule::ReadOnly, "Queue depth of the backstore."),
    row("is_nonrot", 0, Rule::Flag, "1: the medium does not rotate."),
    row("max_unmap_block_desc_count", 1, U32, "Most descriptors of an UNMAP."),
    row("max_unmap_lba_count", 8192, U32, "Most blocks of an UNMAP."),
    row("max_write_same_len", 4096, U32, "Most blocks of a WRITE SAME."),
    fixed("optimal_sectors", 16384, Rule::OptimalSectors, "Optimal transfer length in blocks."),
    row("pgr_support", 1, Rule::Flag, "1: persistent reservations."),
    fixed("pi_prot_format", 0, Rule::Range(0, 0), "Formats protection information; there is none here."),
    fixed("pi_prot_type", 0, Rule::Range(0, 0), "Protection type; only 0, none."),
    fixed(
        "pi_prot_verify",
        0,
        Rule::Range(0, 0),
        "1: protection information is verified; there is none here.",
    ),
    fixed("queue_depth", 128, Rule::QueueDepth, "Queue depth of the logical unit."),
    row(
        "submit_type",
        0,
        Rule::Range(0, 2),
        "How commands are submitted; here always by the session's thread.",
    ),
    row("unmap_granularity", 1, U32, "Granularity of UNMAP in blocks."),
    row("unmap_granularity_alignment", 0, U32, "Alignment of the granularity of UNMAP in blocks."),
    row("unmap_zeroes_data", 0, Rule::Flag, "1: unmapped blocks read as zeroes."),
];

/// The attributes of an iSCSI target portal group, sorted by name.
pub const GROUP: &[AttributeRow] = &[
    row("authentication", 1, Rule::Flag, "1: initiators must authenticate."),
    row("cache_dynamic_acls", 0, Rule::Flag, "1: ACLs of demo mode are kept for later sessions."),
    row("default_cmdsn_depth", 64, Rule::Range(1, 512), "Commands that a session of demo mode may queue."),
    row("default_erl", 0, Rule::Range(0, 0), "Error recovery level; only 0."),
    row("demo_mode_discovery", 1, Rule::Flag, "1: initiators without an ACL discover the target."),
    row("demo_mode_write_protect", 1, Rule::Flag, "1: LUNs are read-only in demo mode."),
    row("fabric_prot_type", 0, Rule::Range(0, 0), "Protection type of the fabric; only 0, none."),
    row("generate_node_acls", 0, Rule::Flag, "1: demo mode: any initiator may log in."),
    row("login_keys_workaround", 1, Rule::Flag, "1: login keys are answered as some initiators need it."),
    row("login_timeout", 15, Rule::Range(5, 30), "Time for a login in seconds."),
    row("prod_mode_write_protect", 0, Rule::Flag, "1: LUNs are read-only outside demo mode."),
    row("t10_pi", 0, Rule::Range(0, 0), "1: T10 protection information; there is none here."),
    row("tpg_enabled_sendtargets", 1, Rule::Flag, "1: only enabled portal groups are discovered."),
];

/// The attributes of a loopback target.
pub const LOOPBACK: &[AttributeRow] =
    &[row("fabric_prot_type", 0, Rule::Range(0, 0), "Protection type of the fabric; only 0, none.")];

/// The attributes of an ACL, sorted by name.
pub const ACL: &[AttributeRow] = &[
    row(
        "authentication",
        -1,
        Rule::Range(-1, 1),
        "1: must authenticate, 0: need not, -1: as the portal group.",
    ),
    row("dataout_timeout", 3, Rule::Range(2, 60), "Time for Data-Out in seconds, before recovery."),
    row("dataout_timeout_retries", 5, Rule::Range(1, 15), "Attempts to recover Data-Out."),
    row("default_erl", 0, Rule::Range(0, 0), "Error recovery level; only 0."),
    row("nopin_response_timeout", 30, Rule::Range(3, 60), "Time for the answer to a NOP-In in seconds."),
    row("nopin_timeout", 15, Rule::Range(0, 60), "Seconds of silence before a NOP-In: 3 to 60, 0: never."),
    row("random_datain_pdu_offsets", 0, Rule::Flag, "1: Data-In PDUs in random order."),
    row("random_datain_seq_offsets", 0, Rule::Flag, "1: Data-In sequences in random order."),
    row("random_r2t_offsets", 0, Rule::Flag, "1: R2Ts in random order."),
];

/// Attributes of portal groups that older kernels had and never used. Restoring a file ignores them.
pub const GROUP_FORMER: &[&str] = &["netif_timeout"];

/// Returns the row of an attribute.
pub fn find(rows: &'static [AttributeRow], name: &str) -> Option<&'static AttributeRow> {
    rows.iter().find(|row| row.name == name)
}

/// Properties of a storage object that limit the values of its attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Context {
    /// Whether a LUN refers to the storage object.
    pub is_exported: bool,
    /// Whether the backstore reports a write cache of its own (block).
    pub has_own_cache: bool,
    /// Whether the backstore can deallocate blocks.
    pub can_unmap: bool,
    /// Largest request in blocks.
    pub hw_max_sectors: i64,
    /// Queue depth of the backstore.
    pub hw_queue_depth: i64,
}

const INVALID: &str = "[Errno 22] Invalid argument";
const MISSING: &str = "[Errno 38] Function not implemented";

/// Checks whether a value is permitted. Returns whether it changes the attribute.
///
/// # Errors
/// The message of the kernel's error, with the reason in parentheses.
pub fn check(row: &AttributeRow, value: i64, context: Option<&Context>) -> Result<bool, String> {
    let invalid = |why: String| Err(format!("{INVALID} ({why})"));
    if row.unexported_only && context.is_some_and(|context| context.is_exported) {
        return invalid("a LUN refers to the storage object: delete it first".to_owned());
    }
    let in_range = |low: i64, high: i64| {
        if (low..=high).contains(&value) {
            return Ok(true);
        }
        let range = if low == high { format!("only {low}") } else { format!("{low} to {high}") };
        invalid(range)
    };
    match row.rule {
        Rule::ReadOnly => Err("[Errno 13] Permission denied".to_owned()),
        Rule::Flag => in_range(0, 1),
        Rule::Deprecated => Ok(false),
        Rule::OneOf(values) if values.contains(&value) => Ok(true),
        Rule::OneOf(values) => {
            let values: Vec<String> = values.iter().map(i64::to_string).collect();
            invalid(format!("one of {}", values.join(", ")))
        }
        Rule::Range(0, 60) if value == 1 || value == 2 => invalid("0, or 3 to 60".to_owned()),
        Rule::Range(low, high) => in_range(low, high),
        Rule::WriteCache => match context {
            Some(context) if context.has_own_cache && value != 0 => {
                invalid("the block device reports its own cache".to_owned())
            }
            _ => in_range(0, 1),
        },
        Rule::Unmap => match context {
            Some(context) if !context.can_unmap && value != 0 => {
                Err(format!("{MISSING} (the backstore cannot deallocate blocks)"))
            }
            _ => in_range(0, 1),
        },
        Rule::OptimalSectors => in_range(0, context.map_or(i64::MAX, |context| context.hw_max_sectors)),
        Rule::QueueDepth => in_range(1, context.map_or(i64::MAX, |context| context.hw_queue_depth)),
    }
}

/// The type of a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParameterRule {
    /// `Yes` or `No`.
    YesNo,
    /// Only `No`: RFC 7143 removed the feature.
    No,
    /// A number in this range.
    Number(u32, u32),
    /// A list of these values.
    List(&'static [&'static str]),
    /// `Reject` only.
    Reject,
    /// Any text.
    Text,
}

/// A negotiated parameter of a portal group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParameterRow {
    /// The key of RFC 7143.
    pub name: &'static str,
    /// The purpose, in a few words.
    pub about: &'static str,
    /// The default.
    pub default: &'static str,
    /// The type of its values.
    pub rule: ParameterRule,
}

const fn parameter(
    name: &'static str,
    default: &'static str,
    rule: ParameterRule,
    about: &'static str,
) -> ParameterRow {
    ParameterRow { name, about, default, rule }
}

const LENGTH: ParameterRule = ParameterRule::Number(512, (1 << 24) - 1);
const TIME: ParameterRule = ParameterRule::Number(0, 3600);
const COUNT: ParameterRule = ParameterRule::Number(1, 65535);
const DIGEST: ParameterRule = ParameterRule::List(&["CRC32C", "None"]);

/// The parameters of an iSCSI target portal group, sorted by name.
pub const PARAMETERS: &[ParameterRow] = &[
    parameter(
        "AuthMethod",
        "CHAP",
        ParameterRule::List(&["CHAP", "None"]),
        "Authentication methods, best first.",
    ),
    parameter("DataDigest", "CRC32C,None", DIGEST, "Digests of data, best first."),
    parameter(
        "DataPDUInOrder",
        "Yes",
        ParameterRule::YesNo,
        "Yes: the data PDUs of a sequence are in order.",
    ),
    parameter("DataSequenceInOrder", "Yes", ParameterRule::YesNo, "Yes: data sequences are in order."),
    parameter("DefaultTime2Retain", "20", TIME, "Seconds for which a lost connection's state is kept."),
    parameter("DefaultTime2Wait", "2", TIME, "Seconds to wait before a new connection."),
    parameter("ErrorRecoveryLevel", "0", ParameterRule::Number(0, 0), "Error recovery level; only 0."),
    parameter("FirstBurstLength", "65536", LENGTH, "Most unsolicited data of a command in bytes."),
    parameter("HeaderDigest", "CRC32C,None", DIGEST, "Digests of headers, best first."),
    parameter("IFMarkInt", "Reject", ParameterRule::Reject, "Removed by RFC 7143."),
    parameter("IFMarker", "No", ParameterRule::No, "Removed by RFC 7143."),
    parameter("ImmediateData", "Yes", ParameterRule::YesNo, "Yes: commands may carry data."),
    parameter("InitialR2T", "Yes", ParameterRule::YesNo, "No: data may follow a command without an R2T."),
    parameter("MaxBurstLength", "262144", LENGTH, "Most data of a sequence in bytes."),
    parameter("MaxConnections", "1", COUNT, "Most connections of a session."),
    parameter("MaxOutstandingR2T", "1", COUNT, "Most R2Ts of a command at a time."),
    parameter("MaxRecvDataSegmentLength", "8192", LENGTH, "Most data of a PDU to the target in bytes."),
    parameter("MaxXmitDataSegmentLength", "262144", LENGTH, "Most data of a PDU from the target in bytes."),
    parameter("OFMarkInt", "Reject", ParameterRule::Reject, "Removed by RFC 7143."),
    parameter("OFMarker", "No", ParameterRule::No, "Removed by RFC 7143."),
    parameter("TargetAlias", "LIO Target", ParameterRule::Text, "A description of the target for people."),
];

/// Checks the value of a parameter.
///
/// # Errors
/// The message of the kernel's error, with the reason in parentheses.
pub fn check_parameter(row: &ParameterRow, value: &str) -> Result<(), String> {
    let (is_right, expected) = match row.rule {
        ParameterRule::YesNo => (matches!(value, "Yes" | "No"), "Yes or No".to_owned()),
        ParameterRule::No => (value == "No", "only No".to_owned()),
        ParameterRule::Reject => (value == "Reject", "only Reject".to_owned()),
        ParameterRule::Number(low, high) => (
            value.parse::<u32>().is_ok_and(|number| (low..=high).contains(&number)),
            if low == high { format!("only {low}") } else { format!("{low} to {high}") },
        ),
        ParameterRule::List(values) => {
            (value.split(',').all(|one| values.contains(&one)), format!("a list of {}", values.join(", ")))
        }
        ParameterRule::Text => (
            !value.is_empty() && value.len() <= 255 && !value.contains(char::is_control),
            "1 to 255 bytes".to_owned(),
        ),
    };
    if is_right { Ok(()) } else { Err(format!("{INVALID} ({expected})")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: Context = Context {
        is_exported: false,
        has_own_cache: false,
        can_unmap: true,
        hw_max_sectors: 16384,
        hw_queue_depth: 128,
    };

    #[test]
    fn rows_are_sorted_and_their_defaults_may_be_stored() {
        for rows in [STORAGE, GROUP, LOOPBACK, ACL] {
            assert!(rows.is_sorted_by(|a, b| a.name < b.name));
            for row in rows.iter().filter(|row| row.rule != Rule::ReadOnly) {
                assert!(check(row, row.default, Some(&CONTEXT)).is_ok(), "{}", row.name);
            }
        }
        assert!(PARAMETERS.is_sorted_by(|a, b| a.name < b.name));
        for row in PARAMETERS {
            assert_eq!(check_parameter(row, row.default), Ok(()), "{}", row.name);
        }
    }

    #[test]
    fn lio_block_size_is_one_of_four_and_fixed_while_exported() {
        let row = find(STORAGE, "block_size").expect("there is one");
        assert_eq!(check(row, 4096, Some(&CONTEXT)), Ok(true));
        let why = check(row, 8192, Some(&CONTEXT)).expect_err("refused");
        assert_eq!(why, "[Errno 22] Invalid argument (one of 512, 1024, 2048, 4096)");
        let exported = Context { is_exported: true, ..CONTEXT };
        assert!(check(row, 4096, Some(&exported)).is_err());
    }

    #[test]
    fn lio_emulate_tpu_needs_a_backstore_that_can_unmap() {
        let row = find(STORAGE, "emulate_tpu").expect("there is one");
        let cannot = Context { can_unmap: false, ..CONTEXT };
        assert!(check(row, 1, Some(&cannot)).expect_err("refused").starts_with("[Errno 38]"));
        assert_eq!((check(row, 0, Some(&cannot)), check(row, 1, Some(&CONTEXT))), (Ok(true), Ok(true)));
    }

    #[test]
    fn lio_deprecated_attributes_accept_any_value_and_keep_theirs() {
        let row = find(STORAGE, "emulate_dpo").expect("there is one");
        assert_eq!(check(row, 0, Some(&CONTEXT)), Ok(false));
    }

    #[test]
    fn lio_nopin_timeout_is_off_or_at_least_3() {
        let row = find(ACL, "nopin_timeout").expect("there is one");
        assert_eq!(
            [0, 1, 2, 3, 60, 61].map(|value| check(row, value, None).is_ok()),
            [true, false, false, true, true, false]
        );
    }

    #[test]
    fn parameters_keep_to_their_ranges() {
        let of = |name: &str| PARAMETERS.iter().find(|row| row.name == name).expect("there is one");
        assert!(check_parameter(of("MaxBurstLength"), "511").is_err());
        assert!(check_parameter(of("MaxBurstLength"), "16777215").is_ok());
        assert!(check_parameter(of("HeaderDigest"), "None,CRC32C").is_ok());
        assert!(check_parameter(of("HeaderDigest"), "MD5").is_err());
        assert!(check_parameter(of("InitialR2T"), "yes").is_err());
    }
}
