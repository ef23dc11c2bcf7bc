//! Runs command lines: parses a line, finds its node, executes the command, and collects targetcli's
//! output.

use crate::commands::{self, Command};
use crate::config::{Change, Config};
use crate::edit::Editor;
use crate::prefs::Prefs;
use crate::system::{Applied, System};
use crate::tree::Node;
use crate::words::{self, Arguments, Line};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A command line with its context in the process that read it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Call {
    /// The command line.
    pub line: String,
    /// Path of the current node.
    pub node: String,
    /// The working directory, from which relative paths of files begin.
    pub folder: PathBuf,
    /// The home directory, for `~`.
    pub home: Option<PathBuf>,
    /// The default file of `saveconfig` and `restoreconfig`.
    pub save_file: PathBuf,
    /// Width of the tree in characters.
    pub width: usize,
    /// Whether the tree is shown in colours.
    pub colour: bool,
    /// The user's preferences.
    pub prefs: Prefs,
}

/// A request to the process that serves the tree.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Run a command line. The result is an [`Answer`].
    Run(Call),
    /// Complete a command line. The result is a list of words.
    Complete(Call),
}

/// A part of a command's output.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Item {
    /// Text, printed unchanged.
    Text(String),
    /// A line with a message of level info.
    Info(String),
    /// A line with a message of level warning.
    Warning(String),
}

/// The outcome of a command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The output, in order.
    pub items: Vec<Item>,
    /// The error; `None`: the command succeeded.
    pub error: Option<String>,
    /// Path of the current node after the command.
    pub node: String,
    /// The user's preferences after the command.
    pub prefs: Prefs,
    /// Whether the shell exits.
    pub exits: bool,
    /// Whether the command would change the configuration, which this process cannot; nothing was done.
    pub needs_host: bool,
    /// Whether nothing is configured after the command.
    pub is_empty: bool,
}

/// The reason why a command ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The command failed.
    Failed(String),
    /// Another process must run the command.
    NeedsHost,
}

impl From<String> for Stop {
    fn from(why: String) -> Stop {
        Stop::Failed(why)
    }
}

impl From<&str> for Stop {
    fn from(why: &str) -> Stop {
        Stop::Failed(why.to_owned())
    }
}

pub(crate) type Done = Result<(), Stop>;

/// The state of a running command line.
pub(crate) struct Run<'a, 'b> {
    pub(crate) editor: &'a mut Editor<'b>,
    pub(crate) call: &'a Call,
    pub(crate) prefs: Prefs,
    pub(crate) items: Vec<Item>,
    /// The current node of the shell.
    pub(crate) current: Node,
    pub(crate) exits: bool,
}

/// Runs a command line.
pub fn run(config: &mut Config, system: &mut dyn System, call: &Call) -> Answer {
    let current = Node::Root.find(config, &call.node).unwrap_or(Node::Root);
    let mut editor = Editor { config, system };
    let prefs = call.prefs.clone();
    let mut run = Run { editor: &mut editor, call, prefs, items: Vec::new(), current, exits: false };
    let done = run.line();
    let (error, needs_host) = match done {
        Ok(()) => (None, false),
        Err(Stop::Failed(why)) => (Some(why), false),
        Err(Stop::NeedsHost) => (None, true),
    };
    // The shell's current node may have been deleted.
    let mut node = run.current.clone();
    while !node.exists(run.editor.config) {
        node = node.parent().unwrap_or(Node::Root);
    }
    let Run { mut items, prefs, exits, .. } = run;
    if needs_host {
        items.clear();
    }
    Answer { items, error, node: node.path(), prefs, exits, needs_host, is_empty: editor.config.is_empty() }
}

impl Run<'_, '_> {
    fn line(&mut self) -> Done {
        let line = words::parse(&self.call.line).map_err(|why| why.to_string())?;
        if line == Line::default() {
            return Ok(());
        }
        let target = match &line.path {
            Some(path) => self.find(path)?,
            None => self.current.clone(),
        };
        let Some(name) = &line.command else {
            return match (line.for_children, line.positional.first()) {
                (_, Some(word)) => Err(format!("Command not found {word}").into()),
                (true, None) => self.for_children(&target, &Line { command: Some("ls".into()), ..line }),
                (false, None) => {
                    self.go(target);
                    Ok(())
                }
            };
        };
        if line.for_children {
            return self.for_children(&target, &line);
        }
        self.command(&target, name, &line)
    }

    fn for_children(&mut self, target: &Node, line: &Line) -> Done {
        for child in target.children(self.editor.config) {
            self.print(&format!("[{}]", child.path()));
            self.command(&child, line.command.as_deref().unwrap_or_default(), line)?;
        }
        Ok(())
    }

    fn command(&mut self, target: &Node, name: &str, line: &Line) -> Done {
        let command = commands::find(target, name).ok_or_else(|| format!("Command not found {name}"))?;
        let arguments = words::bind(&command.signature, line)?;
        self.execute(target, &command, &arguments)
    }

    fn execute(&mut self, target: &Node, command: &Command, arguments: &Arguments) -> Done {
        match command.name {
            "cd" => self.cd(target, arguments.get("path")),
            "exit" => {
                self.exits = true;
                Ok(())
            }
            "get" => self.get(target, arguments),
            "help" => self.help(target, arguments.get("topic")),
            "ls" => self.ls(target, arguments),
            "pwd" => {
                self.print(&target.path());
                Ok(())
            }
            "refresh" => Ok(()),
            "set" => self.set(target, arguments),
            "status" => {
                let (summary, _) = target.summary(self.editor.config);
                self.info(format!("Status for {}: {summary}", target.path()));
                Ok(())
            }
            name => self.verb(target, name, arguments),
        }
    }

    /// Prints a line.
    pub(crate) fn print(&mut self, line: &str) {
        self.items.push(Item::Text(format!("{line}\n")));
    }

    pub(crate) fn info(&mut self, message: impl Into<String>) {
        self.items.push(Item::Info(message.into()));
    }

    pub(crate) fn warning(&mut self, message: impl Into<String>) {
        self.items.push(Item::Warning(message.into()));
    }

    /// Finds a node from the current one.
    pub(crate) fn find(&self, path: &str) -> Result<Node, Stop> {
        if path.starts_with('@') {
            let last = self.prefs.last.as_deref().filter(|_| path == "@last");
            let last = last.ok_or_else(|| format!("No such bookmark {}", &path[1..]))?;
            return Ok(Node::Root.find(self.editor.config, last)?);
        }
        Ok(self.current.find(self.editor.config, path)?)
    }

    /// Ends the command unless this process can change the configuration.
    pub(crate) fn changes(&self) -> Done {
        if self.editor.system.can_change() { Ok(()) } else { Err(Stop::NeedsHost) }
    }

    /// Makes a change to the configuration and the system.
    pub(crate) fn change(&mut self, change: Change) -> Result<Applied, Stop> {
        self.changes()?;
        Ok(self.editor.change(change)?)
    }

    fn go(&mut self, node: Node) {
        self.visited(&node);
        self.current = node;
    }

    /// Adds a node to the history of `cd`.
    fn visited(&mut self, node: &Node) {
        const HISTORY_MAX: usize = 100;
        let path = node.path();
        let prefs = &mut self.prefs;
        if prefs.path_history.is_empty() {
            prefs.path_history.push(self.current.path());
            prefs.path_history_index = 0;
        }
        let index = prefs.path_history_index.min(prefs.path_history.len() - 1);
        if prefs.path_history[index] != path {
            prefs.path_history.truncate(index + 1);
            prefs.path_history.push(path);
            let excess = prefs.path_history.len().saturating_sub(HISTORY_MAX);
            prefs.path_history.drain(..excess);
            prefs.path_history_index = prefs.path_history.len() - 1;
        }
    }

    fn cd(&mut self, target: &Node, path: Option<&str>) -> Done {
        match path {
            Some("<") => return self.travel(false),
            Some(">") => return self.travel(true),
            _ => {}
        }
        let path = path.unwrap_or("/");
        let found = match path.starts_with('@') {
            true => self.find(path),
            false => target.find(self.editor.config, path).map_err(Stop::from),
        };
        let node = match found {
            Ok(node) => node,
            Err(why) => self.below_last(target, path).ok_or(why)?,
        };
        self.go(node);
        Ok(())
    }

    /// Finds a path relative to the object that was created last. Older versions of targetcli changed to
    /// that node, so `create` followed by `cd luns` is common.
    fn below_last(&mut self, target: &Node, path: &str) -> Option<Node> {
        if path.starts_with('/') {
            return None;
        }
        let last = Node::Root.find(self.editor.config, self.prefs.last.as_deref()?).ok()?;
        let mut above = last.parent();
        while let Some(node) = above {
            if node == *target {
                let found = last.find(self.editor.config, path).ok()?;
                self.info(format!("Entering {}", found.path()));
                return Some(found);
            }
            above = node.parent();
        }
        None
    }

    /// Moves back or forth in the history, skipping nodes that do not exist any more.
    fn travel(&mut self, forward: bool) -> Done {
        let count = self.prefs.path_history.len();
        let mut index = self.prefs.path_history_index;
        loop {
            let next = if forward { index.checked_add(1) } else { index.checked_sub(1) };
            let Some(next) = next.filter(|next| *next < count) else {
                let end = if forward {
                    "Reached the end of path history."
                } else {
                    "Reached begining of path history."
                };
                self.info(end);
                return Ok(());
            };
            index = next;
            let path = self.prefs.path_history[index].clone();
            if let Ok(node) = Node::Root.find(self.editor.config, &path) {
                self.info(format!("Taking you back to {path}."));
                self.prefs.path_history_index = index;
                self.current = node;
                return Ok(());
            }
        }
    }

    /// Records a created object, and changes to its node if the user prefers that.
    pub(crate) fn created(&mut self, node: Node) -> Done {
        self.prefs.last = Some(node.path());
        if self.prefs.auto_cd_after_create {
            self.info(format!("Entering new node {}", node.path()));
            self.go(node);
        }
        Ok(())
    }

    fn help(&mut self, target: &Node, topic: Option<&str>) -> Done {
        let Some(topic) = topic else {
            let mut text = format!("{}\nAVAILABLE COMMANDS\n==================\n", commands::INTRO);
            for command in commands::of(target) {
                text += &format!("  - {}\n", command.syntax());
            }
            self.items.push(Item::Text(text));
            return Ok(());
        };
        let command =
            commands::find(target, topic).ok_or_else(|| format!("Cannot find help topic {topic}."))?;
        let about = wrapped(command.about, 78);
        let text = format!("SYNTAX\n======\n{}\n\nDESCRIPTION\n===========\n{about}\n", command.syntax());
        self.items.push(Item::Text(text));
        Ok(())
    }

    /// Returns a path of the caller as an absolute one.
    pub(crate) fn file(&self, path: &str) -> String {
        let home = self.call.home.as_deref();
        let expanded = match (path.strip_prefix('~'), home) {
            (Some(""), Some(home)) => home.to_owned(),
            (Some(rest), Some(home)) if rest.starts_with('/') => home.join(rest.trim_start_matches('/')),
            _ => PathBuf::from(path),
        };
        let absolute = self.call.folder.join(expanded);
        clean(&absolute).to_string_lossy().into_owned()
    }
}

/// Removes `.` from a path. `..` is kept, as it may follow a symbolic link.
fn clean(path: &Path) -> PathBuf {
    path.components().collect()
}

/// Breaks a text into lines.
fn wrapped(text: &str, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().filter(|line| line.is_empty() || line.len() + 1 + word.len() <= width);
        match line {
            Some(line) => {
                if !line.is_empty() {
                    line.push(' ');
                }
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}
