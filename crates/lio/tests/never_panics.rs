//! Any command line and any saved configuration ends with an answer.

use blockyard_lio::config::{Config, Selection};
use blockyard_lio::edit::Editor;
use blockyard_lio::memory::Memory;
use blockyard_lio::prefs::Prefs;
use blockyard_lio::run::{Call, run};
use proptest::prelude::*;
use serde_json::{Value, json};

fn call(line: String) -> Call {
    Call {
        line,
        node: "/".to_owned(),
        folder: "/nonexistent".into(),
        home: None,
        save_file: "/nonexistent/saveconfig.json".into(),
        width: 40,
        colour: true,
        prefs: Prefs::default(),
    }
}

fn word() -> impl Strategy<Value = String> {
    const KNOWN: &[&str] = &[
        "/",
        "/iscsi",
        "/backstores/ramdisk",
        "/loopback",
        "..",
        "*",
        "create",
        "delete",
        "ls",
        "cd",
        "<",
        "set",
        "get",
        "attribute",
        "global",
        "parameter",
        "auth",
        "a",
        "b",
        "1M",
        "lun0",
        "0",
        "iqn.2003-01.org.a:b",
        "luns",
        "tpg1",
        "tag",
        "info",
        "status",
        "enable",
        "name=a",
        "size=1M",
        "=",
        "'",
        "é",
        "@last",
        "65536",
        "-1",
        "/iscsi/iqn.2003-01.org.a:b/tpg1/luns",
        "/backstores/ramdisk/a",
        "sessions",
        "help",
        "pwd",
        "depth=1",
    ];
    prop_oneof![9 => proptest::sample::select(KNOWN).prop_map(str::to_owned), 1 => "\\PC{0,8}"]
}

fn value() -> impl Strategy<Value = Value> {
    const KEYS: &[&str] = &[
        "name",
        "plugin",
        "wwn",
        "fabric",
        "tpgs",
        "tag",
        "luns",
        "index",
        "storage_object",
        "portals",
        "ip_address",
        "port",
        "node_acls",
        "node_wwn",
        "mapped_luns",
        "tpg_lun",
        "attributes",
        "parameters",
        "alua_tpgs",
        "tg_pt_gp_id",
        "storage_objects",
        "targets",
        "fabric_modules",
        "size",
        "dev",
        "enable",
        "block_size",
        "x",
    ];
    const TEXTS: &[&str] = &[
        "a",
        "fileio",
        "ramdisk",
        "iscsi",
        "loopback",
        "iqn.2003-01.org.a:b",
        "naa.5001405a1b2c3d4e",
        "/backstores/ramdisk/a",
        "0.0.0.0",
        "[::0]",
        "",
        "/x",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0i64..70000).prop_map(Value::from),
        proptest::sample::select(TEXTS).prop_map(Value::from),
    ];
    leaf.prop_recursive(8, 64, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(proptest::sample::select(KEYS), inner, 0..8)
                .prop_map(|map| json!(map)),
        ]
    })
}

proptest! {
    #[test]
    fn command_lines_are_answered(lines in proptest::collection::vec(proptest::collection::vec(word(), 0..6), 1..12)) {
        let (mut config, mut system) = (Config::default(), Memory::default());
        let mut node = "/".to_owned();
        let mut prefs = Prefs::default();
        for words in lines {
            let mut call = call(words.join(" "));
            call.node = node;
            call.prefs = prefs;
            blockyard_lio::complete::complete(&config, &call);
            let answer = run(&mut config, &mut system, &call);
            node = answer.node;
            prefs = answer.prefs;
        }
        // Every configuration that commands can create can be saved and restored.
        let saved = config.dump();
        let mut again = Config::default();
        let mut editor = Editor { config: &mut again, system: &mut system };
        let restored = editor.restore(&saved, false, Selection::default()).expect("nothing exists");
        prop_assert!(restored.errors.is_empty(), "{:?}", restored.errors);
        prop_assert_eq!(again.dump(), saved);
    }

    #[test]
    fn saved_configurations_are_restored_or_reported(saved in value()) {
        let (mut config, mut system) = (Config::default(), Memory::default());
        let mut editor = Editor { config: &mut config, system: &mut system };
        let _ = editor.restore(&saved, false, Selection::default());
        let _ = config.dump();
    }
}
