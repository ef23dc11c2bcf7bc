//! `move`: moves the contents of a served device to another stack.

use crate::args::MoveArgs;
use crate::failure::{Failure, print};
use crate::holder;
use crate::listing::{block_on, client_of, run_dir};
use crate::plan;
use engine::change::MoveRequest;
use engine::control::ControlClient;
use engine::spec::Bytes;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// Interval between polls of the progress.
const INTERVAL: Duration = Duration::from_millis(200);

pub(crate) fn move_device(args: &MoveArgs) -> Result<ExitCode, Failure> {
    let run = run_dir("move")?;
    let client = client_of(&run, "move", &args.name)?;
    let failed = |why: String| Failure::new("move", &args.name, why);
    if args.cancel {
        let done = block_on("move", client.move_contents(&args.name, &MoveRequest::CancelMove))?;
        return done.map(|()| ExitCode::SUCCESS).map_err(|why| failed(why.to_string()));
    }
    let Some(target) = &args.target else {
        return Err(Failure::usage("move", &args.name, "it needs the stack to move to, or --cancel"));
    };
    let to = plan::device("move", target, &[])?.stack.to_string();
    let rate = args.rate.as_ref().map(|rate| rate.parse::<Bytes>()).transpose();
    let rate = rate.map_err(|why| Failure::usage("move", "--rate", why))?.map(|rate| rate.0.max(1));
    let change = MoveRequest::Move { to: to.clone(), rate };
    let done = block_on("move", async {
        let moved = with_progress(&client, &args.name, client.move_contents(&args.name, &change)).await;
        match moved {
            Ok(()) => Ok(()),
            Err(why) => Err(holder::with_holder(&run, why.to_string()).await),
        }
    })?;
    done.map_err(failed)?;
    print(&format!("{} moved to {to}\n", args.name));
    Ok(ExitCode::SUCCESS)
}

/// Awaits the move; shows a progress bar if stderr is a terminal.
async fn with_progress<F: Future>(client: &ControlClient, name: &str, moved: F) -> F::Output {
    if !std::io::stderr().is_terminal() {
        return moved.await;
    }
    let template = "move {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(0).with_style(style);
    let mut moved = std::pin::pin!(moved);
    loop {
        if let Ok(done) = tokio::time::timeout(INTERVAL, &mut moved).await {
            bar.finish_and_clear();
            return done;
        }
        let Ok(info) = client.device(name).await else { continue };
        if let Some((done, all)) = info.backend.get("moving").and_then(|text| progress(text)) {
            bar.set_length(all);
            bar.set_position(done);
        }
    }
}

/// Parses `DONE of ALL bytes to STACK`.
fn progress(text: &str) -> Option<(u64, u64)> {
    let (done, rest) = text.split_once(" of ")?;
    let (all, _) = rest.split_once(" bytes to ")?;
    Some((done.parse().ok()?, all.parse().ok()?))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_progress_is_read_from_the_fact_of_show() {
        assert_eq!(super::progress("1048576 of 67108864 bytes to file:/b.img"), Some((1 << 20, 64 << 20)));
        assert_eq!(super::progress("to file:/b.img given up: no space"), None);
    }
}
