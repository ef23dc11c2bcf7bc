//! Records of a device's requests: slow requests, timeouts, a trace, samples. Nothing here uses devices or
//! hosts; the readers of these records are in the folder `control`.

pub mod sample;
pub mod slow;
pub mod timeouts;
pub mod trace;
