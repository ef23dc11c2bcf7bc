//! `ls`: the tree as configshell draws it.

use crate::run::{Done, Item, Run};
use crate::tree::Node;
use crate::words::Arguments;

const BOLD: &str = "1";
const UNDERLINE: &str = "4";
const RED: &str = "31";
const GREEN: &str = "32";
const BLUE: &str = "34";
const MAGENTA: &str = "35";

struct Style {
    colour: bool,
    width: usize,
    status: bool,
    node: char,
}

impl Style {
    fn paint(&self, text: &str, codes: &[&str]) -> String {
        if !self.colour || codes.is_empty() {
            return text.to_owned();
        }
        let start: String = codes.iter().map(|code| format!("\x1b[{code}m")).collect();
        format!("{start}{text}\x1b[0m")
    }
}

impl Run<'_, '_> {
    pub(crate) fn ls(&mut self, target: &Node, arguments: &Arguments) -> Done {
        let root = match arguments.get("path") {
            Some(path) if path.starts_with('@') => self.find(path)?,
            Some(path) => target.find(self.editor.config, path)?,
            None => target.clone(),
        };
        let depth = match arguments.get("depth") {
            Some(depth) => depth.parse().map_err(|_| "The tree depth must be a number.")?,
            None => self.prefs.tree_max_depth,
        };
        let style = Style {
            colour: self.call.colour && self.prefs.color_mode,
            width: self.call.width,
            status: self.prefs.tree_status_mode,
            node: if self.prefs.tree_round_nodes { 'o' } else { '+' },
        };
        let mut text = String::new();
        let depth = (depth > 0).then_some(depth);
        if self.prefs.tree_show_root {
            self.draw(&mut text, &style, &root, &mut Vec::new(), depth);
        } else {
            for child in root.children(self.editor.config) {
                self.draw(&mut text, &style, &child, &mut Vec::new(), depth);
            }
        }
        self.items.push(Item::Text(text));
        Ok(())
    }

    /// Draws a node and the nodes below it. `pipes`: for each level above, whether a sibling follows.
    fn draw(&self, text: &mut String, style: &Style, node: &Node, pipes: &mut Vec<bool>, depth: Option<u32>) {
        let (name, path) = (node.name(), node.path());
        let (mut description, health) = node.summary(self.editor.config);
        if description.is_empty() {
            description = match health {
                Some(true) => "OK",
                Some(false) => "ERROR",
                None => "...",
            }
            .to_owned();
        }
        let level = path.trim_end_matches('/').matches('/').count();
        let colour: &[&str] = match level % 3 {
            0 => &[],
            1 => &[BLUE],
            _ => &[MAGENTA],
        };
        let mut margin = String::new();
        for pipe in pipes.iter().take(pipes.len().saturating_sub(1)) {
            margin.push_str(if *pipe { "| " } else { "  " });
        }
        // configshell indents the children of the root, too.
        let margin = if pipes.is_empty() { margin } else { format!("  {margin}") };
        let margin = format!("{margin}{}- ", style.node);
        let styles: Vec<&str> = match pipes.is_empty() {
            true => [colour, &[BOLD, UNDERLINE]].concat(),
            false => [colour, &[BOLD]].concat(),
        };
        text.push_str(&margin);
        text.push_str(&style.paint(&name, &styles));
        if style.status {
            let used = margin.len() + name.chars().count() + description.chars().count() + 3 + 1;
            let pad = ".".repeat(style.width.saturating_sub(used));
            let shown = match health {
                Some(true) => style.paint(&description, &[GREEN]),
                Some(false) => style.paint(&description, &[RED, BOLD]),
                None => description,
            };
            let (open, close) = (style.paint(" [", &[BOLD]), style.paint("]", &[BOLD]));
            text.push_str(&format!(" {}{open}{shown}{close}", style.paint(&pad, colour)));
        }
        text.push('\n');
        if depth == Some(0) {
            return;
        }
        let children = node.children(self.editor.config);
        for (index, child) in children.iter().enumerate() {
            pipes.push(index + 1 < children.len());
            self.draw(text, style, child, pipes, depth.map(|depth| depth - 1));
            pipes.pop();
        }
    }
}
