//! Protocols as codecs and sessions without I/O or clock.
