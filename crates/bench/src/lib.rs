//! The harness of docs/benchmarks.
