//! Fuzzes `blockyard_proto::vhost_user::fuzzing::session`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::vhost_user::fuzzing::session(data));
