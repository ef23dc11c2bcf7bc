//! Topology, device trees, threads, life cycle and the control API.
