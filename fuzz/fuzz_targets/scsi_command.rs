//! Fuzzes `blockyard_scsi::fuzzing::commands`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    blockyard_scsi::fuzzing::commands(data);
});
