//! The shell: a prompt with completion and history on a terminal, lines from a pipe otherwise.

use super::user::User;
use super::{Session, show};
use crate::failure::{FAILED, Failure};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::MemHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Context, Editor, Helper};
use std::cell::RefCell;
use std::io::{BufRead, IsTerminal};
use std::process::ExitCode;
use std::rc::Rc;

struct Completion(Rc<RefCell<Session>>);

impl Completer for Completion {
    type Candidate = String;

    fn complete(&self, line: &str, place: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let before = line.get(..place).unwrap_or(line);
        let start = before.rfind(char::is_whitespace).map_or(0, |space| space + 1);
        Ok((start, self.0.borrow_mut().complete(before)))
    }
}

impl Hinter for Completion {
    type Hint = String;
}

impl Highlighter for Completion {}
impl Validator for Completion {}
impl Helper for Completion {}

/// The state of a shell.
struct Shell {
    session: Rc<RefCell<Session>>,
    has_failed: bool,
    /// Whether the shell exits after the last command.
    exits: bool,
}

pub(super) fn shell() -> Result<ExitCode, Failure> {
    let user = User::load();
    let session = Rc::new(RefCell::new(Session::new(&user)?));
    let mut shell = Shell { session, has_failed: false, exits: false };
    let is_terminal = std::io::stdin().is_terminal();
    if is_terminal {
        shell.interactive(&user)?
    } else {
        shell.piped()?
    }
    shell.save()?;
    user.save(&shell.session.borrow().call.prefs)?;
    // A script gets the status of failed commands; a person has seen the messages.
    Ok(if shell.has_failed && !is_terminal { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

impl Shell {
    fn line(&mut self, line: &str) -> Result<(), Failure> {
        let answer = self.session.borrow_mut().run(line)?;
        show(&answer);
        if let Some(why) = &answer.error {
            eprintln!("{why}");
            self.has_failed = true;
        }
        self.exits = answer.exits;
        Ok(())
    }

    fn piped(&mut self) -> Result<(), Failure> {
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|why| Failure::new("targetcli", "stdin", why))?;
            self.line(line.trim())?;
            if self.exits {
                break;
            }
        }
        Ok(())
    }

    fn interactive(&mut self, user: &User) -> Result<(), Failure> {
        let fail = |why: ReadlineError| Failure::new("targetcli", "terminal", why);
        crate::failure::print(&format!(
            "targetcli shell of blockyard {}\nFor help on commands, type 'help'.\n\n",
            env!("CARGO_PKG_VERSION")
        ));
        let config = Config::builder().completion_type(rustyline::CompletionType::List).build();
        let mut editor: Editor<Completion, MemHistory> =
            Editor::with_history(config, MemHistory::new()).map_err(fail)?;
        editor.set_helper(Some(Completion(self.session.clone())));
        let mut history = user.history();
        for line in &history {
            let _ = editor.add_history_entry(line);
        }
        while !self.exits {
            let prompt = self.prompt();
            match editor.readline(&prompt) {
                Ok(line) => {
                    let line = line.trim().to_owned();
                    if line.is_empty() {
                        continue;
                    }
                    // Lines with passwords are not stored in the history.
                    if !line.contains("password") {
                        let _ = editor.add_history_entry(&line);
                        history.push(line.clone());
                    }
                    if let Err(why) = self.line(&line) {
                        why.report();
                    }
                }
                Err(ReadlineError::Interrupted) => {}
                Err(ReadlineError::Eof) => break,
                Err(why) => return Err(fail(why)),
            }
        }
        user.save_history(&history);
        Ok(())
    }

    /// Returns the prompt: the path, shortened in the middle as in configshell.
    fn prompt(&self) -> String {
        let session = self.session.borrow();
        let path: Vec<char> = session.call.node.chars().collect();
        let length = session.call.prefs.prompt_length as usize;
        if length > 3 && length < path.len() {
            let half = (length - 3) / 2;
            let (start, end) = (&path[..half], &path[path.len() - half..]);
            return format!("{}...{}> ", String::from_iter(start), String::from_iter(end));
        }
        format!("{}> ", String::from_iter(path))
    }

    /// Saves the configuration when the shell ends, if the user prefers that. Without a process that serves
    /// the tree nothing is saved, since an empty configuration must not replace an earlier file.
    fn save(&mut self) -> Result<(), Failure> {
        let (wants, has_host) = {
            let session = self.session.borrow();
            (session.call.prefs.auto_save_on_exit, session.has_host)
        };
        if !wants || !has_host {
            return Ok(());
        }
        if self.session.borrow().call.prefs.shows("info") {
            crate::failure::print("Global pref auto_save_on_exit=true\n");
        }
        "/".clone_into(&mut self.session.borrow_mut().call.node);
        self.line("saveconfig")
    }
}
