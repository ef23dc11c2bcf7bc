//! Finds the users that listen on a port, from `/proc/net/tcp` and `/proc/net/tcp6`.

use rustix::process::geteuid;

/// State of a listening socket, as the kernel prints it.
const LISTEN: &str = "0A";

/// Returns whether at least one socket of this machine listens on the port, and all that do belong to the
/// user of this process.
pub fn is_ours(port: u16) -> bool {
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];
    let read = |table: &str| std::fs::read_to_string(table).unwrap_or_default();
    all_are_of(geteuid().as_raw(), port, &tables.map(read))
}

/// Decides [`is_ours`] for the given tables and user id.
fn all_are_of(user: u32, port: u16, tables: &[String]) -> bool {
    let mut owners =
        tables.iter().flat_map(|table| table.lines()).filter_map(|line| owner(line, port)).peekable();
    owners.peek().is_some() && owners.all(|owner| owner == user)
}

/// Returns the user id of the socket of a line, if that socket listens on the port.
fn owner(line: &str, port: u16) -> Option<u32> {
    // sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid ...
    let words: Vec<&str> = line.split_ascii_whitespace().take(8).collect();
    let [_, local, _, LISTEN, .., user] = words[..] else { return None };
    let (_, of_it) = local.rsplit_once(':')?;
    (u16::from_str_radix(of_it, 16) == Ok(port)).then(|| user.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    const FOUR: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
        0: 0100007F:1B9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 3350 1 0 100 0 0 10 0\n   \
        1: 0100007F:1B9F 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 3351 1 0 100 0 0 10 0\n   \
        2: 0100007F:1B9F 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 3352 1 0 20 4 30 10 -1\n";
    const SIX: &str = "  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
        0: 00000000000000000000000001000000:1B9E 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 7 1 0 100 0 0 10 0\n";

    #[test]
    fn a_port_is_of_a_user_if_no_other_user_listens_on_it() {
        let (four, both) = ([FOUR.to_owned()], [FOUR.to_owned(), SIX.to_owned()]);
        assert!(all_are_of(1000, 7070, &four) && !all_are_of(0, 7070, &four));
        // A connection of another user to the port does not listen.
        assert!(all_are_of(0, 7071, &four) && !all_are_of(1000, 7071, &four));
        assert!(!all_are_of(1000, 7070, &both) && !all_are_of(0, 7070, &both), "there are two");
        assert!(!all_are_of(0, 7072, &both) && !all_are_of(0, 7070, &[]), "there is none");
    }

    #[test]
    fn a_listener_of_this_process_is_ours() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                eprintln!("skipped: this machine does not have the address {address}");
                continue;
            };
            assert!(is_ours(listener.local_addr().unwrap().port()), "{address}");
        }
    }
}
