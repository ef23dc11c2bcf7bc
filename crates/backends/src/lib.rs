//! Backends: nodes that hold blocks.
