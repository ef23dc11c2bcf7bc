//! The page, in a real browser and by plain requests: access, content, actions, and restarts.
//!
//! Screenshots are left in `target/web`.

use blockyard_tests::browser::Browser;
use blockyard_tests::peer::Peer;
use blockyard_tests::server::{Sandbox, Server};
use blockyard_tests::tools::{PATIENCE, raise_file_limit, until};
use proto::nbd::CommandFlags;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Serves a multipath device of two paths with a page; returns its address.
fn serve(sandbox: &Sandbox, more: &[&str]) -> (Server, String) {
    let line = "0 131072 multipath 1 queue_if_no_path 0 1 1 queue-length 0 2 1 ram:64M 1 zero:64M 1";
    let table = sandbox.text("m.table", line);
    let export = format!("unix:{}", sandbox.path("m.sock").display());
    let table = table.to_string_lossy();
    let mut words = vec!["serve", "--table", &*table, "--name", "m", "--nbd", &export];
    words.extend(["--layer", "delay,read=1ms", "--multipath", "checker=off", "--web", "127.0.0.1:0"]);
    words.extend(more);
    let server = sandbox.start(&mut sandbox.blockyard(&words), 2);
    let page = server.uri_of(1).to_owned();
    assert!(server.ready()[1].starts_with("* web http://127.0.0.1:"), "{:?}", server.ready());
    (server, page)
}

/// Returns an expression: the number of pixels of these style sheet colours on the selected canvas.
fn pixels(selector: &str, colours: &[&str]) -> String {
    format!(
        "(() => {{ const canvas = document.querySelector({selector:?}); if (!canvas?.width) return 0; \
         const probe = document.body.appendChild(document.createElement('i')); \
         const wanted = {colours:?}.map((name) => {{ probe.style.color = `var(--${{name}})`; \
           return getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number); }}); probe.remove(); \
         const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data; let count = 0; \
         for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 100 && wanted.some(([r, g, b]) => \
           Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b) < 24)) count += 1; \
         return count; }})()"
    )
}

/// Reads and writes all over the device until `end` is set.
fn load(socket: &Path, end: &AtomicBool) {
    let mut peer = Peer::connect(socket, "m");
    let block = [7; 4096];
    let mut random = fastrand::Rng::with_seed(1);
    while !end.load(Relaxed) {
        let offset = random.u64(..64 << 8) * 4096;
        if random.bool() {
            peer.read(offset, 4096).unwrap();
        } else {
            peer.write(offset, &block, CommandFlags::empty()).unwrap();
        }
    }
    peer.disconnect();
}

#[test]
fn the_page_works_in_a_real_browser() {
    let sandbox = Sandbox::default();
    let (mut server, page) = serve(&sandbox, &["--web-allow", "actions"]);
    let Some(mut browser) = Browser::start(&sandbox) else { return };
    let pictures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/web");
    let end = AtomicBool::new(false);
    let socket = server.socket();
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| load(&socket, &end));
        // Whatever fails below, the load ends.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            the_page_requires_its_token(&mut browser, &page);
            the_pages_charts_get_their_data(&mut browser, &pictures);
            charts_use_the_screen_that_there_is(&mut browser, &pictures);
            time_is_zoomed_into_and_paused(&mut browser);
            the_page_is_used_by_keys(&mut browser);
            the_page_fails_a_path_after_a_confirmation(&sandbox, &mut browser, &pictures);
            the_page_asks_for_a_new_size(&mut browser);
            the_page_supports_dark_and_narrow_displays(&mut browser, &pictures);
        }));
        end.store(true, Relaxed);
        loading.join().unwrap();
        if let Err(why) = done {
            std::panic::resume_unwind(why);
        }
    });
    // The console has each refused request once, possibly late, and nothing else.
    let mut complaints = browser.complaints();
    for (status, place) in [("401", "/events"), ("422", "/devices/m/actions")] {
        let words = [format!("a status of {status} "), format!("{place}\"")];
        let is_that = |why: &String| words.iter().all(|words| why.contains(words));
        if let Some(found) = complaints.iter().position(is_that) {
            complaints.remove(found);
        }
    }
    assert_eq!(complaints, Vec::<String>::new());
    a_page_without_a_token_reports_it(&mut browser);
    server.terminate();
    browser.wait_for("['lost', 'gone'].includes(document.querySelector('#link').dataset.state)");
    browser.wait_for("!document.querySelector('#banner').hidden");
}

fn the_page_requires_its_token(browser: &mut Browser, page: &str) {
    let (bare, _) = page.split_once('?').unwrap();
    browser.set_window(1280, 800, "light");
    browser.open(bare);
    browser.wait_for("document.body?.innerText.includes('needs its token')");
    for time in ["first", "second"] {
        browser.open(page);
        browser.wait_for("document.querySelector('#link')?.dataset.state === 'live'");
        let shown = browser.eval("location.href");
        assert_eq!(shown, *bare, "the token does not stay on the screen the {time} time");
    }
    let cookies = browser.call("Network.getCookies", serde_json::json!({}));
    assert_eq!(
        cookies["cookies"],
        serde_json::json!([]),
        "the server behind another port is not sent the token"
    );
}

fn the_pages_charts_get_their_data(browser: &mut Browser, pictures: &Path) {
    browser.wait_for("document.querySelector('.rows .row .what').textContent.includes('multipath')");
    browser.wait_for(&format!("{} > 10", pixels(".spark", &["read", "write"])));
    browser.screenshot(&pictures.join("devices.png"));
    browser.click(".rows a.name");
    browser.wait_for(&format!("{} > 20", pixels("[aria-label=Requests] canvas", &["read", "write"])));
    browser.wait_for(&format!("{} > 20", pixels("[aria-label=Throughput] canvas", &["read", "write"])));
    for kind in ["Read", "Write"] {
        let chart = format!("[aria-label='{kind} latency']");
        for percentile in ["p-1", "p-2", "p-3", "p-4"] {
            browser.wait_for(&format!("{} > 20", pixels(&format!("{chart} canvas"), &[percentile])));
        }
        let names = format!(
            "[...document.querySelectorAll(\"{chart} .key\")].map((key) => key.textContent.split(' ')[0])"
        );
        assert_eq!(browser.eval(&names), serde_json::json!(["p50", "p90", "p99", "p99.9"]));
    }
    let colours = "new Set([1, 2, 3, 4].map((at) => getComputedStyle(document.querySelector(`.swatch-p-${at}`)).backgroundColor)).size";
    assert_eq!(browser.eval(colours), 4);
    // The shades of the heat map have numbers, which grow.
    let numbers = "[...document.querySelectorAll('.steps b')].map((one) => parseFloat(one.textContent))";
    browser.wait_for(&format!(
        "(() => {{ const all = {numbers}; return all.length === 5 && all[0] >= 1 && all[4] > all[0]; }})()"
    ));
    browser.wait_for(&format!(
        "{} > 50",
        pixels("[aria-label='Latency heat map'] canvas", &["heat-1", "heat-2", "heat-3", "heat-4", "heat-5"])
    ));
    // All is on one screen, except for fonts that are higher than others.
    browser.wait_for("document.documentElement.scrollHeight <= 1000");
    browser.screenshot(&pictures.join("activity.png"));
}

fn charts_use_the_screen_that_there_is(browser: &mut Browser, pictures: &Path) {
    let rows = "new Set([...document.querySelectorAll('#panel-activity canvas')].map((one) => one.getBoundingClientRect().y)).size";
    let right = "Math.max(...[...document.querySelectorAll('#panel-activity canvas')].map((one) => one.getBoundingClientRect().right))";
    let height = "document.querySelector('#panel-activity canvas').clientHeight";
    let low = browser.eval(height).as_f64().unwrap();
    assert_eq!(browser.eval(rows), 3, "two columns of six charts");
    browser.set_window(1900, 1200, "light");
    browser.wait_for(&format!("{rows} === 2"));
    browser.wait_for(&format!("{right} > 1840 && {height} > {}", low + 100.0));
    browser.wait_for("document.documentElement.scrollHeight <= 1200");
    browser.screenshot(&pictures.join("activity-wide.png"));
    browser.set_window(1280, 800, "light");
}

fn time_is_zoomed_into_and_paused(browser: &mut Browser) {
    let window = "document.querySelector('#window').textContent";
    let canvas = "[aria-label=Requests] canvas";
    assert_eq!(browser.eval(window), "");
    browser.drag(canvas, 0.5, 0.9);
    browser.wait_for(&format!("{window}.includes(' – ')"));
    let zoomed = browser.eval(window);
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(browser.eval(window), zoomed, "it stands still");
    browser.press("Escape");
    browser.wait_for(&format!("{window} === '' && document.querySelector('.device-view')"));
    browser.press("p");
    browser.wait_for(&format!(
        "{window}.includes(' – ') && document.querySelector('#pause').textContent === 'Go on'"
    ));
    browser.click("#pause");
    browser.wait_for(&format!("{window} === ''"));
    browser.click(".segment:nth-child(3)");
    browser.wait_for("document.querySelector('.segment:nth-child(3)').ariaPressed === 'true'");
    // Labels of the time axis are round: in an hour, at most one per ten minutes.
    browser.wait_for(&format!("{} > 5", pixels(canvas, &["read", "write"])));
    browser.click(".segment:nth-child(1)");
}

fn the_page_is_used_by_keys(browser: &mut Browser) {
    browser.press("?");
    browser.wait_for("document.querySelector('#help').open");
    browser.press("Escape");
    browser.wait_for("!document.querySelector('#help').open");
    browser.press("2");
    browser.wait_for("document.querySelector('#tab-addresses').ariaSelected === 'true'");
    browser.wait_for(&format!("{} > 20", pixels("#panel-addresses canvas", &["read", "write"])));
    assert_eq!(browser.eval("location.hash"), "#/m/addresses");
    let pressed = "[...document.querySelectorAll('#panel-addresses .toggle')].map((one) => one.ariaPressed)";
    assert_eq!(browser.eval(pressed), serde_json::json!(["true", "true", "false"]), "block status is hidden");
    browser.eval("document.querySelector('#tab-addresses').focus()");
    browser.press("ArrowRight");
    browser.wait_for("document.activeElement.id === 'tab-stack'");
    browser.wait_for("location.hash === '#/m/stack'");
    browser.eval("history.back()");
    browser.wait_for("document.querySelector('#tab-addresses').ariaSelected === 'true'");
    let tab = "document.querySelector('#tab-stack')";
    browser.eval("location.hash = '#/%'");
    browser.wait_for(&format!("!{tab} && document.querySelector('.rows a.name')"));
    browser.click(".rows a.name");
    browser.wait_for(tab);
    browser.eval(&format!("{tab}.click()"));
}

fn the_page_fails_a_path_after_a_confirmation(sandbox: &Sandbox, browser: &mut Browser, pictures: &Path) {
    let status = || sandbox.run(&["status", "m"]).ok();
    let fail = "button[aria-label='Fail path ram:64M']";
    browser.wait_for(&format!("document.querySelector({fail:?})"));
    browser.click(fail);
    browser.wait_for("document.querySelector('#confirm').open");
    browser.wait_for("document.activeElement.id === 'confirm-no'"); // Enter alone does nothing.
    let command = browser.eval("document.querySelector('#confirm-command').textContent");
    assert_eq!(command, "blockyard message m 0 fail_path ram:64M");
    browser.press("Enter");
    browser.wait_for("!document.querySelector('#confirm').open");
    assert!(status().contains("ram:64M A "), "{}", status());
    browser.click(fail);
    browser.wait_for("document.querySelector('#confirm').open");
    browser.click("#confirm-yes");
    browser.wait_for("document.querySelector('.path .chip.bad')?.textContent === 'failed'");
    browser.wait_for("document.querySelectorAll('.node.failed').length === 1");
    browser.wait_for("document.querySelector('h1 .chip.bad')?.textContent === '1 of 2 paths'");
    assert!(status().contains("ram:64M F 1"), "{}", status());
    browser.screenshot(&pictures.join("stack.png"));
    browser.click("button[aria-label='Reinstate path ram:64M']");
    browser.wait_for("document.querySelector('#confirm').open");
    browser.click("#confirm-yes");
    browser.wait_for("!document.querySelector('.path .chip.bad')");
    browser.wait_for("document.querySelector('h1 .chip.good')?.textContent === '2 of 2 paths'");
    // Both are marked in the charts, and listed.
    browser.press("4");
    browser.wait_for("['ram:64M failed', 'ram:64M works again'].every((text) => document.querySelector('[aria-label=Events]')?.textContent.includes(text))");
    browser.press("1");
    browser.wait_for(&format!("{} > 5", pixels("[aria-label=Requests] canvas", &["bad"])));
    assert!(status().contains("ram:64M A 1"), "{}", status());
}

fn the_page_asks_for_a_new_size(browser: &mut Browser) {
    let resize =
        "[...document.querySelectorAll('button')].find((one) => one.textContent.startsWith('Resize …'))";
    let asked = |browser: &mut Browser| {
        browser.eval(&format!("{resize}.click()"));
        browser.wait_for("document.querySelector('#confirm').open");
        browser.wait_for("document.activeElement.id === 'confirm-input'");
    };
    asked(browser);
    browser.click("#confirm-no");
    browser.wait_for("!document.querySelector('#confirm').open");
    assert_eq!(browser.eval("document.querySelectorAll('.toast.bad').length"), 0);
    asked(browser);
    browser.eval("document.querySelector('#confirm-input').value = 'huge'");
    browser.press("Enter");
    browser.wait_for("!document.querySelector('#confirm').open");
    browser.wait_for("document.querySelector('.toast.bad')?.textContent.includes('Resize m failed:')");
}

fn a_page_without_a_token_reports_it(browser: &mut Browser) {
    browser.eval("sessionStorage.clear()");
    // Another view opens another stream.
    browser.eval("location.hash = location.hash === '#/' ? '#/m' : '#/'");
    browser.wait_for("document.querySelector('#link').dataset.state === 'stranger'");
    browser.wait_for("document.querySelector('#banner a')?.getAttribute('href') === '/entry'");
}

fn the_page_supports_dark_and_narrow_displays(browser: &mut Browser, pictures: &Path) {
    let back = "getComputedStyle(document.body).backgroundColor";
    let light = browser.eval(back);
    browser.set_window(1280, 800, "dark");
    browser.wait_for(&format!("{back} !== {light}"));
    browser.eval("document.querySelector('#tab-activity').click()");
    browser.wait_for(&format!("{} > 20", pixels("[aria-label=Requests] canvas", &["read", "write"])));
    browser.screenshot(&pictures.join("activity-dark.png"));
    browser.set_window(400, 860, "dark");
    for tab in ["details", "stack", "addresses", "activity"] {
        browser.eval(&format!("document.querySelector('#tab-{tab}').click()"));
        browser.wait_for("document.documentElement.scrollWidth <= 400");
    }
    browser.screenshot(&pictures.join("activity-narrow.png"));
}

#[test]
fn devices_are_sorted_filtered_and_switched() {
    let sandbox = Sandbox::default();
    let golden = sandbox.image("golden.img", 1 << 20);
    let topology = format!(
        "[device.a-small]\nstack = \"ram:1M\"\n[device.b-large]\nstack = \"ram:2M\"\n\
         [device.c-overlay]\nstack = \"file:{}\"\nlayers = [\"cow,file={},create\"]\n",
        golden.display(),
        sandbox.path("mine.cow").display(),
    );
    let file = sandbox.text("three.toml", &topology);
    let words = ["up", &*file.to_string_lossy(), "--web", "127.0.0.1:0"];
    // One line for each export, and one for the page.
    let server = sandbox.start(&mut sandbox.blockyard(&words), 4);
    let Some(mut browser) = Browser::start(&sandbox) else { return };
    browser.set_window(1280, 800, "light");
    browser.open(server.uri_of(3));
    let names = "[...document.querySelectorAll('.rows .row:not([hidden]) a.name')].map((one) => one.textContent).join()";
    browser.wait_for(&format!("{names} === 'a-small,b-large,c-overlay'"));
    browser.click(".heads .cell:nth-child(1) button");
    browser.wait_for(&format!("{names} === 'c-overlay,b-large,a-small'"));
    assert_eq!(browser.eval("document.querySelector('.heads .cell:nth-child(1)').ariaSort"), "descending");
    browser.click(".heads .cell:nth-child(3) button");
    browser.wait_for(&format!("{names} === 'a-small,b-large,c-overlay'"));
    browser.press("/");
    browser.wait_for("document.activeElement.id === 'filter'");
    browser.call("Input.insertText", serde_json::json!({ "text": "mine.cow" }));
    browser.wait_for(&format!("{names} === 'c-overlay'"));
    browser.press("Escape");
    browser.wait_for(&format!("{names} === 'a-small,b-large,c-overlay'"));
    // The overlay's files have their roles and paths.
    browser.eval("location.hash = '#/c-overlay/stack'");
    browser.wait_for("document.querySelectorAll('.node .role').length === 2");
    let files = "[...document.querySelectorAll('.node.backend')].map((one) => `${one.querySelector('.role').textContent} \
                 ${one.querySelector('.label').textContent.split('/').at(-1)}`).join()";
    assert_eq!(browser.eval(files), "origin golden.img,overlay mine.cow");
    browser.screenshot(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/web/overlay.png"));
    // Another device is shown in the same tab.
    browser.press("[");
    browser.wait_for("location.hash === '#/b-large/stack' && document.querySelector('h1').textContent.startsWith('b-large')");
    browser.eval("(() => { const one = document.querySelector('#switch'); one.value = 'a-small'; one.dispatchEvent(new Event('change')); })()");
    browser.wait_for(
        "location.hash === '#/a-small/stack' && document.querySelector('#tab-stack').ariaSelected === 'true'",
    );
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn an_hour_of_history_is_kept_in_steps() {
    let sandbox = Sandbox::default();
    let (_server, page) = serve(&sandbox, &["--web-token", "none"]);
    let history = |query: &str| ask(&page, &format!("GET /history?device=m{query}"), &[], "");
    let steps = until(PATIENCE, || {
        std::thread::sleep(Duration::from_millis(200));
        let answer = history("&span=hour");
        let (_, body) = answer.split_once("\r\n\r\n")?;
        let steps: Vec<serde_json::Value> = serde_json::from_str(body).ok()?;
        (!steps.is_empty()).then_some(steps)
    });
    assert!(steps.expect("one after ten seconds")[0]["read"]["p"].is_array());
    assert!(history("").contains("\"heat\""), "the seconds, too");
    assert!(history("&span=day").starts_with("HTTP/1.1 400"));
}

/// Sends one request; returns the whole answer.
fn ask(page: &str, head: &str, headers: &[&str], body: &str) -> String {
    let host = host_of(page);
    let mut stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut lines: Vec<String> = headers.iter().map(|line| format!("{line}\r\n")).collect();
    if !headers.iter().any(|header| header.starts_with("Host:")) {
        lines.push(format!("Host: {host}\r\n"));
    }
    let headers = lines.concat();
    let length = body.len();
    let text =
        format!("{head} HTTP/1.1\r\n{headers}Connection: close\r\nContent-Length: {length}\r\n\r\n{body}");
    // The server may answer before it has read everything; then its answer has arrived, and the connection is
    // reset.
    let _ = stream.write_all(text.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn host_of(page: &str) -> &str {
    page.strip_prefix("http://").unwrap().split('/').next().unwrap()
}

#[test]
fn requests_without_the_token_or_from_other_pages_are_refused() {
    let sandbox = Sandbox::default();
    let (_server, page) = serve(&sandbox, &[]);
    let token = page.split_once("token=").unwrap().1;
    assert_eq!(token.len(), 32, "128 bits");
    let is =
        |answer: &str, status: u16| assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    let bearer = format!("Authorization: Bearer {token}");
    let cookie = format!("Cookie: blockyard-{}={token}", host_of(&page).split(':').nth(1).unwrap());
    let secret = ["/events", "/devices", "/metrics", "/history?device=m", "/nowhere"].map(|path| (path, 401));
    for (path, status) in secret.into_iter().chain([("/", 200), ("/entry", 200), ("/assets/app.js", 200)]) {
        // A cookie may have been sent to the server of another port: it is not accepted.
        let answer = ask(&page, &format!("GET {path}"), &[&cookie], "");
        is(&answer, status);
        assert!(
            !answer.contains("ram:64M") && answer.contains("content-security-policy: default-src 'none'")
        );
    }
    is(&ask(&page, "GET /devices", &["Host: evil.example", &bearer], ""), 403);
    let devices = until(PATIENCE, || {
        let answer = ask(&page, "GET /devices", &[&bearer], "");
        answer.contains("\"name\":\"m\"").then_some(answer)
    });
    assert!(devices.is_some_and(|answer| answer.contains("cache-control: no-store")));
    let metrics = ask(&page, "GET /metrics", &[&bearer], "");
    assert!(metrics.contains("blockyard_device_size_bytes{device=\"m\"} 67108864.0"), "{metrics}");
    let fail = r#"{"action":"fail-path","path":"ram:64M"}"#;
    let json = "Content-Type: application/json";
    let read_only = ask(&page, "POST /devices/m/actions", &[&bearer, json], fail);
    is(&read_only, 403);
    assert!(read_only.contains("--web-allow actions"), "{read_only}");
    let introduced = ask(&page, &format!("GET /?token={token}"), &[], "");
    is(&introduced, 200);
    assert!(!introduced.to_lowercase().contains("set-cookie"), "{introduced}");
    assert!(sandbox.run(&["status", "m"]).ok().contains("ram:64M A 0"));
}

#[test]
fn allowed_actions_are_executed_only_for_this_page() {
    let sandbox = Sandbox::default();
    let file = sandbox.path("token");
    let file = file.to_string_lossy();
    let (_server, page) = serve(&sandbox, &["--web-allow", "actions", "--web-token", &file]);
    let token = std::fs::read_to_string(&*file).unwrap();
    assert!(page.ends_with(token.trim()), "{page}");
    let bearer = format!("Authorization: Bearer {}", token.trim());
    let (json, fail) = ("Content-Type: application/json", r#"{"action":"fail-path","path":"ram:64M"}"#);
    let act =
        |origin: &str, body: &str| ask(&page, "POST /devices/m/actions", &[&bearer, json, origin], body);
    let evil = act("Origin: http://evil.example", fail);
    assert!(evil.starts_with("HTTP/1.1 403 ") && evil.contains("another page"), "{evil}");
    let own = format!("Origin: http://{}", host_of(&page));
    assert!(sandbox.run(&["status", "m"]).ok().contains("ram:64M A 0"));
    assert!(act(&own, fail).starts_with("HTTP/1.1 200 "));
    assert!(sandbox.run(&["status", "m"]).ok().contains("ram:64M F 1"));
    let refused = act(&own, r#"{"action":"fail-path","path":"none"}"#);
    assert!(
        refused.starts_with("HTTP/1.1 422 ") && refused.contains("in the table (devices: ram:64M"),
        "{refused}"
    );
    assert!(act(&own, r#"{"action":"delete"}"#).starts_with("HTTP/1.1 400 "));
    assert!(act(&own, &" ".repeat(1 << 16)).starts_with("HTTP/1.1 400 "));
}

#[test]
fn the_page_shrinks_devices_only_if_allowed() {
    let sandbox = Sandbox::default();
    let file = sandbox.noise("disk.img", 4 << 20);
    let export = format!("unix:{}", sandbox.path("disk.sock").display());
    let stack = format!("file:{}", file.display());
    let resize = |allow: &str, size: &str, shrink: bool| {
        let words =
            ["serve", &stack, "--name", "d", "--nbd", &export, "--web", "127.0.0.1:0", "--web-allow", allow];
        let mut server = sandbox.start(&mut sandbox.blockyard(&words), 2);
        let page = server.uri_of(1).to_owned();
        let bearer = format!("Authorization: Bearer {}", page.split_once("token=").unwrap().1);
        let body = format!(r#"{{"action":"resize","size":"{size}","shrink":{shrink}}}"#);
        let headers = [&*bearer, "Content-Type: application/json"];
        let answer = ask(&page, "POST /devices/d/actions", &headers, &body);
        server.terminate();
        (answer, std::fs::metadata(&file).unwrap().len())
    };
    let (answer, len) = resize("actions", "1M", true);
    assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains("--web-allow shrink"), "{answer}");
    assert_eq!(len, 4 << 20);
    let (answer, len) = resize("actions", "1M", false);
    assert!(answer.starts_with("HTTP/1.1 422 "), "{answer}");
    assert_eq!(len, 4 << 20);
    let (answer, len) = resize("actions", "8M", false);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(len, 8 << 20);
    let (answer, len) = resize("shrink", "1M", true);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    assert_eq!(len, 1 << 20);
}

/// As many idle connections as a client can open do not block the page.
#[test]
fn idle_connections_do_not_block_the_page() {
    raise_file_limit();
    let sandbox = Sandbox::default();
    let (server, page) = serve(&sandbox, &[]);
    let bearer = format!("Authorization: Bearer {}", page.split_once("token=").unwrap().1);
    let host = host_of(&page);
    let (before, mut crowd) = (server.descriptors(), Vec::new());
    for number in 0..900 {
        let mut stream = TcpStream::connect(host).unwrap();
        // Some have begun a request, and some request public files without the token.
        match number % 3 {
            0 => drop(stream.write_all(b"GET /devices HTTP/1.1\r\nHost: 1")),
            1 => drop(stream.write_all(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes())),
            _ => {}
        }
        crowd.push(stream);
        if number % 100 == 99 {
            let start = std::time::Instant::now();
            let answer = ask(&page, "GET /devices", &[&bearer], "");
            assert!(answer.starts_with("HTTP/1.1 200 "), "beside {number}: {answer}");
            assert!(start.elapsed() < Duration::from_secs(5), "beside {number}: {:?}", start.elapsed());
        }
    }
    let more = server.descriptors().saturating_sub(before);
    assert!(more <= 512 + 8, "{more} descriptors for the crowd");
    // The server closes the idle connections, too.
    let gone = until(PATIENCE, || (server.descriptors() <= before + 8).then_some(()));
    assert!(gone.is_some(), "{} descriptors", server.descriptors());
}

/// The control socket, which only the server's own user reaches.
#[test]
fn idle_connections_do_not_block_the_control_socket() {
    raise_file_limit();
    let sandbox = Sandbox::default();
    let server = sandbox.serve("ram:1M", &[]);
    let socket = sandbox.run_dir().join("disk.control");
    let before = server.descriptors();
    let _crowd: Vec<_> =
        (0..700).map(|_| std::os::unix::net::UnixStream::connect(&socket).unwrap()).collect();
    let start = std::time::Instant::now();
    assert!(sandbox.run(&["show", "disk"]).ok().contains("ram:1M"));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert!(server.descriptors() <= before + 256 + 8, "{} descriptors", server.descriptors());
    let gone = until(PATIENCE, || (server.descriptors() <= before + 8).then_some(()));
    assert!(gone.is_some(), "{} descriptors", server.descriptors());
}

#[test]
fn contradictory_web_options_are_refused_before_serving() {
    let sandbox = Sandbox::default();
    let refused = |arguments: &[&str], status: i32| {
        let all = [&["serve", "ram:1M", "--name", "d"], arguments].concat();
        sandbox.run(&all).failed_with(status)
    };
    assert!(refused(&["--web", "example.org:80"], 2).contains("write PORT, 127.0.0.1:PORT"));
    assert!(refused(&["--web-token", "none"], 2).contains("--web <ADDRESS>"));
    let open = refused(&["--web", "0.0.0.0:0", "--web-token", "none"], 1);
    assert!(open.contains("can be reached from the network"), "{open}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    assert!(refused(&["--web", &address], 1).contains("choose another port"));
    assert_eq!(sandbox.run(&["list", "--json"]).ok().trim(), "[]");
}
