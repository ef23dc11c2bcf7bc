//! A virtual clock, a simulated ring and disk, and the sector model they are checked against.
