//! Exports: what a host attaches to.
