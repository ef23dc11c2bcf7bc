//! `blockyard targetcli`: LIO's tree, served by one process in the background.
//!
//! A command runs in the process that serves the tree, over its control socket. Without such a process, queries run
//! here on an empty tree, and the first command that changes something starts the process. It ends when nothing is
//! configured any more.
//!
//! *Invariant:* no log, no file that others can read, and no process's arguments contain secrets, except
//! for the arguments that the user typed.

mod host;
mod shell;
mod stacks;
mod user;

pub(crate) use host::{Lio, answer};

use crate::add;
use crate::args::RunArgs;
use crate::failure::{FAILED, Failure, print};
use crate::listing::{block_on, run_dir};
use crate::process;
use crate::serving;
use engine::control::{ClientError, ControlClient, ControlError};
use engine::rundir::RunDir;
use lio::config::Config;
use lio::run::{Answer, Call, Item, Request};
use lio::system::Nothing;
use std::io::IsTerminal;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use user::User;

/// The name under which the process that serves the tree is found in the run directory.
pub(crate) const NAME: &str = "targetcli";
const WHAT: &str = "targetcli";
/// Longest wait for a process that is ending, and the interval between attempts.
const ENDING: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(20);

const USAGE: &str = "\
Usage: blockyard targetcli [[PATH] COMMAND [VALUE | KEY=VALUE]...]

Runs a command of targetcli; without one, starts a shell. Commands can come from a pipe, a line each.
  blockyard targetcli help            the commands
  blockyard targetcli --version       the version
See docs/targetcli.md.
";

pub(crate) fn targetcli(arguments: &[String]) -> Result<ExitCode, Failure> {
    match arguments {
        [] => shell::shell(),
        [word] if matches!(word.as_str(), "--help" | "-h") => {
            print(USAGE);
            Ok(ExitCode::SUCCESS)
        }
        [word] if matches!(word.as_str(), "--version" | "-v") => {
            print(&format!("targetcli of blockyard {}\n", env!("CARGO_PKG_VERSION")));
            Ok(ExitCode::SUCCESS)
        }
        arguments => once(arguments),
    }
}

/// Serves the tree, until a signal or until nothing is configured.
pub(crate) fn serve(args: RunArgs) -> Result<ExitCode, Failure> {
    if args.detached {
        process::leave_session(WHAT)?;
    }
    serving::serve_lio(WHAT, args)
}

/// Joins arguments to a line. A single argument is a line already, as in targetcli.
fn line_of(arguments: &[String]) -> String {
    if let [line] = arguments {
        return line.clone();
    }
    let quoted = |text: &str| match text.is_empty()
        || text.contains(|c: char| c.is_whitespace() || "'\"".contains(c))
    {
        true => format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")),
        false => text.to_owned(),
    };
    let word = |word: &String| match word.split_once('=') {
        Some((key, value)) if !key.contains(char::is_whitespace) && !value.is_empty() => {
            format!("{key}={}", quoted(value))
        }
        Some(_) => word.clone(),
        None => quoted(word),
    };
    arguments.iter().map(word).collect::<Vec<_>>().join(" ")
}

fn once(arguments: &[String]) -> Result<ExitCode, Failure> {
    let user = User::load();
    let mut session = Session::new(&user)?;
    let answer = session.run(&line_of(arguments))?;
    show(&answer);
    if let Some(why) = &answer.error {
        eprintln!("{why}");
    }
    user.save(&answer.prefs)?;
    Ok(if answer.error.is_some() { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

/// Prints the output of a command, but not its error.
fn show(answer: &Answer) {
    let stdout = std::io::stdout();
    let colour = answer.prefs.color_mode && stdout.is_terminal() && user::has_colours();
    let paint = |code: &str, line: &str| match colour {
        true => format!("\x1b[{code}m{line}\x1b[0m\n"),
        false => format!("{line}\n"),
    };
    let mut text = String::new();
    for item in &answer.items {
        match item {
            Item::Text(part) => text += part,
            Item::Info(line) if answer.prefs.shows("info") => text += &paint("32", line),
            Item::Warning(line) if answer.prefs.shows("warning") => text += &paint("33", line),
            Item::Info(_) | Item::Warning(_) => {}
        }
    }
    if !text.is_empty() {
        print(&text);
    }
}

/// State that carries over between a user's commands.
struct Session {
    run: RunDir,
    call: Call,
    /// Whether a command was executed by the process that serves the tree.
    has_host: bool,
}

impl Session {
    fn new(user: &User) -> Result<Session, Failure> {
        let run = run_dir(WHAT)?;
        let has_host = is_served(&run);
        Ok(Session { run, call: user.call(), has_host })
    }

    /// Runs a command line, and adopts the current node and the preferences that it returns.
    fn run(&mut self, line: &str) -> Result<Answer, Failure> {
        line.clone_into(&mut self.call.line);
        let answer = match self.remote(&Request::Run(self.call.clone()))? {
            Some(answer) => answer,
            None => {
                let answer = lio::run::run(&mut Config::default(), &mut Nothing, &self.call);
                match answer.needs_host {
                    true => self.started()?,
                    false => answer,
                }
            }
        };
        self.call.node.clone_from(&answer.node);
        self.call.prefs = answer.prefs.clone();
        Ok(answer)
    }

    /// Starts the process that serves the tree, and runs the command there.
    fn started(&mut self) -> Result<Answer, Failure> {
        let fail = |why: &dyn std::fmt::Display| Failure::new(WHAT, "", why);
        self.run.create().map_err(|why| fail(&why))?;
        let begun = Instant::now();
        let started = loop {
            let started = add::start_command("targetcli-host", []).map_err(|why| fail(&why))?;
            // Another command may have started a process meanwhile, or the previous process may still be
            // ending.
            let is_taken = started.stderr.contains("the name is taken");
            if !is_taken || is_served(&self.run) || begun.elapsed() > ENDING {
                break started;
            }
            std::thread::sleep(PAUSE);
        };
        if started.ready.is_empty() && !is_served(&self.run) {
            let why = started.stderr.trim();
            let why = why.strip_prefix("blockyard: targetcli failed: ").unwrap_or(why);
            return Err(fail(&if why.is_empty() { "its process ended" } else { why }));
        }
        let answer = self.remote(&Request::Run(self.call.clone()))?;
        answer.ok_or_else(|| {
            fail(&format!("its process ended (its log: {})", self.run.log_file(NAME).display()))
        })
    }

    /// Sends a request to the process that serves the tree. `None`: no process serves it.
    fn remote<T: serde::de::DeserializeOwned>(&mut self, request: &Request) -> Result<Option<T>, Failure> {
        let fail = |why: &dyn std::fmt::Display| Failure::new(WHAT, "", why);
        let request = serde_json::to_value(request).map_err(|why| fail(&why))?;
        let begun = Instant::now();
        let answer = loop {
            if !is_served(&self.run) {
                return Ok(None);
            }
            let client = ControlClient::new(self.run.control_link(NAME));
            match block_on(WHAT, client.targetcli(&request))? {
                // The process ended between the check and the request.
                Err(ClientError::Connect { .. }) => return Ok(None),
                // The process is ending and closing its devices.
                Err(ClientError::Refused(ControlError::Busy(_))) if begun.elapsed() < ENDING => {
                    std::thread::sleep(PAUSE);
                }
                answer => break answer.map_err(|why| fail(&why))?,
            }
        };
        self.has_host = true;
        serde_json::from_value(answer).map(Some).map_err(|why| fail(&why))
    }

    /// Returns completions of a line.
    fn complete(&mut self, line: &str) -> Vec<String> {
        let call = Call { line: line.to_owned(), ..self.call.clone() };
        let remote = self.remote(&Request::Complete(call.clone())).ok().flatten();
        remote.unwrap_or_else(|| lio::complete::complete(&Config::default(), &call))
    }
}

/// Whether a process serves the tree.
fn is_served(run: &RunDir) -> bool {
    UnixStream::connect(run.control_link(NAME)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_become_one_line_that_is_parsed_into_them() {
        let words = |arguments: &[&str]| arguments.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(line_of(&words(&["/iscsi create iqn.2003-01.a.b:c"])), "/iscsi create iqn.2003-01.a.b:c");
        let line = line_of(&words(&["set", "auth", "password=a \"b", "userid=", "x y"]));
        let line = lio::words::parse(&line).expect("it parses");
        assert_eq!(line.keywords, [("password".into(), "a \"b".into()), ("userid".into(), String::new())]);
        assert_eq!(line.positional, ["auth", "x y"]);
    }
}
