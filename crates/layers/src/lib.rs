//! Layers: nodes that change I/O on its way to a backend.
