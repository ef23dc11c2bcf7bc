//! The only door to the kernel: io_uring, its fallback, registered memory, timers, sockets.
