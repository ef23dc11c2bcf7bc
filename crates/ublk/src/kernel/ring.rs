//! A ring for a single control command at a time, with 128-byte submissions for its payload.
#![allow(unsafe_code)]

use crate::control::{Command, Refusal};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

type Ring = IoUring<squeue::Entry128, cqueue::Entry>;

/// Result and buffer of a command, or the reason why it failed.
pub(super) type Answer = Result<(u32, Vec<u8>), Refusal>;

/// A ring without a command in flight.
pub(super) struct CommandRing(Ring);

impl std::fmt::Debug for CommandRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CommandRing")
    }
}

impl CommandRing {
    pub(super) fn new() -> io::Result<CommandRing> {
        IoUring::builder().build(2).map(CommandRing)
    }

    /// Executes the command. Also returns the ring, unless the command is still in flight.
    pub(super) fn execute(
        self,
        device: &File,
        code: u32,
        command: &Command,
    ) -> (Option<CommandRing>, Answer) {
        let CommandRing(mut ring) = self;
        let (mut payload, mut buffer) = command.encoded();
        if !buffer.is_empty() {
            payload.addr = buffer.as_mut_ptr() as u64;
        }
        let mut bytes = [0; 80];
        bytes[..size_of_val(&payload)].copy_from_slice(payload.as_bytes());
        let entry = opcode::UringCmd80::new(types::Fd(device.as_raw_fd()), code).cmd(bytes).build();
        // SAFETY: the buffer that the payload refers to lives until the command has completed: it is returned
        // only after its completion was seen, and leaked otherwise. Nobody uses it meanwhile. The descriptor
        // is the control device's, and the kernel holds its file from the submission on.
        let pushed = unsafe { ring.submission().push(&entry) };
        if pushed.is_err() {
            return (Some(CommandRing(ring)), Err(Refusal::Errno(libc::EAGAIN)));
        }
        match wait(&mut ring, command.limit) {
            Some(result) if result >= 0 => {
                let answer = buffer.split_off(payload.dev_path_len.into());
                (Some(CommandRing(ring)), Ok((result as u32, answer)))
            }
            Some(result) => (Some(CommandRing(ring)), Err(Refusal::Errno(-result))),
            None => {
                // The kernel may still write to the buffer, and waits for the command when the ring is
                // closed.
                std::mem::forget((ring, buffer));
                (None, Err(Refusal::NoAnswer(command.limit)))
            }
        }
    }
}

/// Returns the command's result, or `None` if it did not arrive in time.
fn wait(ring: &mut Ring, limit: Duration) -> Option<i32> {
    let started = Instant::now();
    loop {
        if let Some(completion) = ring.completion().next() {
            return Some(completion.result());
        }
        let left = limit.checked_sub(started.elapsed())?;
        let timeout = types::Timespec::from(left);
        let arguments = types::SubmitArgs::new().timespec(&timeout);
        match ring.submitter().submit_with_args(1, &arguments) {
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EAGAIN)) => {}
            // The submission itself failed, so no command is in flight.
            Err(error) => return Some(-error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::ControlOp;

    fn command(limit: Duration) -> Command {
        Command { op: ControlOp::GetFeatures, device: 0, data: 0, buffer: vec![0; 8], path: None, limit }
    }

    #[test]
    fn a_file_that_takes_no_commands_refuses_them_and_the_ring_is_kept() {
        let ring = match CommandRing::new() {
            Ok(ring) => ring,
            Err(why) => {
                println!("skipped a_file_that_takes_no_commands_refuses_them: no io_uring: {why}");
                return;
            }
        };
        let null = File::open("/dev/zero").unwrap();
        let (ring, answer) =
            ring.execute(&null, ControlOp::GetFeatures.code(), &command(Duration::from_secs(5)));
        let Err(Refusal::Errno(errno)) = answer else { panic!("{answer:?}") };
        assert!(matches!(errno, libc::EOPNOTSUPP | libc::EINVAL | libc::ENOTTY), "{errno}");
        assert!(ring.is_some());
    }
}
