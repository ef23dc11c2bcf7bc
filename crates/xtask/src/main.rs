//! Chores of the project, run as `./x CHORE`.

fn main() {}
