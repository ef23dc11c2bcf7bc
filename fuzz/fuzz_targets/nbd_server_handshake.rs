//! Fuzzes `blockyard_proto::nbd::fuzzing::server_handshake`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::nbd::fuzzing::server_handshake(data));
