//! `man` and `completions`: print the manual page and the shells' completion scripts.

use crate::args::ManArgs;
use crate::failure::{Failure, print};
use crate::help;
use clap_complete::Shell;
use clap_complete::env::Shells;
use std::process::ExitCode;

/// The environment variable that completion scripts set to request completions.
pub(crate) const COMPLETE: &str = "COMPLETE";

/// The script of bash. clap_complete's script requests completions of the words as bash splits them, at each `:`
/// and `=`.
const BASH: &str = include_str!("completion.bash");

/// The script of zsh. clap_complete's script adds a space behind options whose value follows.
const ZSH: &str = include_str!("completion.zsh");

/// Prints the script that a shell sources. The script starts `blockyard` of the user's PATH for each completion.
pub(crate) fn completions(shell: Shell) -> Result<ExitCode, Failure> {
    let own = match shell {
        Shell::Bash => Some(BASH),
        Shell::Zsh => Some(ZSH),
        _ => None,
    };
    if let Some(script) = own {
        print(script);
        return Ok(ExitCode::SUCCESS);
    }
    let shells = Shells::builtins();
    let name = shell.to_string();
    let Some(completer) = shells.completer(&name) else {
        return Err(Failure::usage("completions", name, "no such shell"));
    };
    let mut script = Vec::new();
    completer
        .write_registration(COMPLETE, "blockyard", "blockyard", "blockyard", &mut script)
        .map_err(|why| Failure::new("completions", "", why))?;
    print(&String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}

/// Prints the page of everything, or writes a page for each command and topic into a folder.
pub(crate) fn man(args: &ManArgs) -> Result<ExitCode, Failure> {
    if let Some(folder) = &args.folder {
        let fail = |path: &std::path::Path, why| Failure::new("man", path.display(), why);
        std::fs::create_dir_all(folder).map_err(|why| fail(folder, why))?;
        for (name, text) in help::man::pages().map_err(|why| Failure::new("man", "", why))? {
            let path = folder.join(name);
            std::fs::write(&path, text).map_err(|why| fail(&path, why))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let page = help::man::page().map_err(|why| Failure::new("man", "", why))?;
    print(&page);
    Ok(ExitCode::SUCCESS)
}
