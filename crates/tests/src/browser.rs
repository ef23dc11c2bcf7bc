//! A real browser without a window: Chromium, controlled over two pipes by its DevTools protocol.
//!
//! It has a profile of its own in the sandbox, and no name resolution: a page that needs anything but the
//! given address fails. Errors of its console are kept.
//!
//! *Invariant:* every wait is bounded, and the browser ends with its handle.

use crate::server::Sandbox;
use crate::tools::{PATIENCE, missing, until, wait_within};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Terminator of messages.
const END: u8 = 0;

/// One page in a browser of its own.
pub struct Browser {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<Value>,
    number: u64,
    session: Option<String>,
    complaints: Vec<String>,
}

impl Browser {
    /// Starts a browser. Returns `None` if there is no Chromium; then the calling test must return.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(sandbox: &Sandbox) -> Option<Browser> {
        if missing(&["chromium"]) {
            return None;
        }
        let profile = sandbox.path("chromium");
        // It listens on descriptor 3 and answers on 4.
        let line = "exec chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
                    --no-first-run --disable-background-networking --disable-component-update --disable-sync \
                    --host-resolver-rules='MAP * ~NOTFOUND, EXCLUDE 127.0.0.1' --user-data-dir=\"$0\" --remote-debugging-pipe \
                    about:blank 3<&0 4>&1 </dev/null >/dev/null 2>&1";
        let mut command = sandbox.command("/bin/sh");
        command.args(["-c", line]).arg(&profile).env("HOME", sandbox.path("home"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("a shell");
        let orders = child.stdin.take().expect("stdin is a pipe");
        let stdout = child.stdout.take().expect("stdout is a pipe");
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            let mut text = Vec::new();
            while reader.read_until(END, &mut text).is_ok_and(|count| count > 0) {
                let message = serde_json::from_slice(text.strip_suffix(&[END]).unwrap_or(&text));
                if message.is_ok_and(|message: Value| sender.send(message).is_err()) {
                    break;
                }
                text.clear();
            }
        });
        let mut browser =
            Browser { child, orders, answers, number: 0, session: None, complaints: Vec::new() };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", attach);
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Sends a command of the protocol and returns its result.
    ///
    /// # Panics
    /// If it is refused, or not answered.
    #[track_caller]
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.number += 1;
        let mut order = json!({ "id": self.number, "method": method, "params": params });
        if let Some(session) = &self.session {
            order["sessionId"] = session.as_str().into();
        }
        let mut text = order.to_string().into_bytes();
        text.push(END);
        self.orders.write_all(&text).expect("the browser runs");
        loop {
            let answer = self.answers.recv_timeout(PATIENCE);
            let mut answer = answer.unwrap_or_else(|why| panic!("{method}: {why}"));
            if answer["id"] == self.number {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].take();
            }
            self.note(&answer);
        }
    }

    /// Records uncaught errors and the browser's own complaints about the page.
    fn note(&mut self, event: &Value) {
        let details = &event["params"];
        match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => self.complaints.push(details["exceptionDetails"].to_string()),
            Some("Log.entryAdded") if details["entry"]["level"] == "error" => {
                self.complaints.push(details["entry"].to_string());
            }
            _ => {}
        }
    }

    /// Returns the complaints since the last call.
    pub fn complaints(&mut self) -> Vec<String> {
        self.eval("0");
        std::mem::take(&mut self.complaints)
    }

    /// Opens an address.
    ///
    /// # Panics
    /// If nothing is served there.
    #[track_caller]
    pub fn open(&mut self, url: &str) {
        let went = self.call("Page.navigate", json!({ "url": url }));
        assert!(went.get("errorText").is_none(), "{url}: {went}");
        self.wait_for("document.readyState === 'complete'");
    }

    /// Returns the value of an expression in the page.
    ///
    /// # Panics
    /// If it throws.
    #[track_caller]
    pub fn eval(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let mut done = self.call("Runtime.evaluate", params);
        assert!(done.get("exceptionDetails").is_none(), "{expression}: {done}");
        done["result"]["value"].take()
    }

    /// Waits until an expression is true.
    ///
    /// # Panics
    /// If it does not become true.
    #[track_caller]
    pub fn wait_for(&mut self, expression: &str) {
        let came = until(PATIENCE, || {
            std::thread::sleep(Duration::from_millis(20));
            // While the page is being replaced the expression may fail.
            (self.eval(&format!("Boolean({expression})")) == true).then_some(())
        });
        if came.is_none() {
            let text = self.eval("document.body.innerText");
            panic!("not in {PATIENCE:?}: {expression}\n{text}\n{:?}", self.complaints());
        }
    }

    /// Clicks on the first element that matches a selector, at its place on the screen.
    ///
    /// # Panics
    /// If no element matches.
    #[track_caller]
    pub fn click(&mut self, selector: &str) {
        let place = self.eval(&format!(
            "(() => {{ const one = document.querySelector({selector:?}); one.scrollIntoView({{ block: 'center' }}); \
             const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; }})()"
        ));
        for kind in ["mousePressed", "mouseReleased"] {
            let params =
                json!({ "type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", params);
        }
    }

    /// Drags across the first element that matches a selector, in its middle, from one part of its width to
    /// another.
    ///
    /// # Panics
    /// If no element matches.
    #[track_caller]
    pub fn drag(&mut self, selector: &str, from: f64, to: f64) {
        let place = self.eval(&format!(
            "(() => {{ const one = document.querySelector({selector:?}); one.scrollIntoView({{ block: 'center' }}); \
             const box = one.getBoundingClientRect(); return [box.x, box.width, box.y + box.height / 2]; }})()"
        ));
        let [left, width, y] = [0, 1, 2].map(|at| place[at].as_f64().expect("a place on the screen"));
        let middle = f64::midpoint(from, to);
        let steps = [
            ("mousePressed", from, 1),
            ("mouseMoved", middle, 1),
            ("mouseMoved", to, 1),
            ("mouseReleased", to, 0),
        ];
        for (kind, part, buttons) in steps {
            let params = json!({
                "type": kind, "x": left + part * width, "y": y, "button": "left", "buttons": buttons, "clickCount": 1,
            });
            self.call("Input.dispatchMouseEvent", params);
        }
    }

    /// Presses and releases a key, by its name in `KeyboardEvent.key`.
    ///
    /// # Panics
    /// If the browser has ended.
    pub fn press(&mut self, key: &str) {
        // A letter is its own name; other keys need their number.
        let number = match key {
            "Enter" => 13,
            "Escape" => 27,
            "Tab" => 9,
            "ArrowLeft" => 37,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => 0,
        };
        let text = if key == "Enter" { "\r" } else { key };
        let mut down = json!({ "type": "keyDown", "key": key, "windowsVirtualKeyCode": number });
        if text.chars().count() == 1 {
            down["text"] = text.into();
        }
        self.call("Input.dispatchKeyEvent", down);
        self.call(
            "Input.dispatchKeyEvent",
            json!({ "type": "keyUp", "key": key, "windowsVirtualKeyCode": number }),
        );
    }

    /// Sets the size of the window, and a light or dark theme.
    ///
    /// # Panics
    /// If the browser has ended.
    pub fn set_window(&mut self, width: u32, height: u32, theme: &str) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let features = json!([{ "name": "prefers-color-scheme", "value": theme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features }));
    }

    /// Writes a screenshot as PNG.
    ///
    /// # Panics
    /// If the browser returns no screenshot, or it cannot be written.
    pub fn screenshot(&mut self, path: &Path) {
        let shot = self.call("Page.captureScreenshot", json!({ "format": "png" }));
        let png = decoded(shot["data"].as_str().unwrap_or_default());
        assert!(png.starts_with(b"\x89PNG"), "{}", path.display());
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).expect("a folder for pictures");
        }
        std::fs::write(path, png).expect("a picture");
    }
}

/// Decodes Base64.
fn decoded(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u32> = text.bytes().filter_map(digit).map(u32::from).collect();
    let mut bytes = Vec::new();
    for four in digits.chunks(4) {
        let bits = four.iter().fold(0, |bits, digit| bits << 6 | digit) << (6 * (4 - four.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..four.len().max(1)]);
    }
    bytes
}

impl Drop for Browser {
    fn drop(&mut self) {
        // On this command the browser ends with its child processes.
        let _ = self.orders.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        wait_within(&mut self.child, Duration::from_secs(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read_with_any_end() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYg==", "foob")]
        {
            assert_eq!(decoded(text), bytes.as_bytes());
        }
    }
}
