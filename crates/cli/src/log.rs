//! What the engine says while it serves, as lines on stderr: `blockyard: error: message, key value`.

use std::fmt::{Debug, Write};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Everything down to this level is said; nothing on the I/O path says anything.
struct Stderr(Level);

/// From now on. `verbose`: also what is merely good to know.
pub(crate) fn start(verbose: bool) {
    let level = if verbose { Level::INFO } else { Level::WARN };
    // Only tests could have started another one before, and theirs is as good.
    let _ = tracing::subscriber::set_global_default(Stderr(level));
}

impl Subscriber for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Libraries have their say only when it is serious.
        let own = metadata.target().starts_with("blockyard");
        *metadata.level() <= if own { self.0 } else { Level::WARN }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let level = match *event.metadata().level() {
            Level::ERROR => "error: ",
            Level::WARN => "warning: ",
            _ => "",
        };
        eprintln!("blockyard: {level}{}{}", line.message, line.fields);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string does not fail.
        if field.name() == "message" {
            let _ = write!(self.message, "{value:?}");
        } else {
            let _ = write!(self.fields, ", {} {value:?}", field.name());
        }
    }
}
