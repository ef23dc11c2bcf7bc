//! Fuzzes `blockyard_proto::nbd::fuzzing::client_handshake`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_proto::nbd::fuzzing::client_handshake(data));
