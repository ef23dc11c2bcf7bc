//! Fuzzes `blockyard_images::fuzzing::image`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| blockyard_images::fuzzing::image(data));
