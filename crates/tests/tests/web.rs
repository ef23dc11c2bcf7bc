//! The page, in a real browser and by hand: who sees it, what it shows, what it does, and what it survives.
//!
//! Pictures of it are left in `target/web`, for people.

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

/// A multipath device of two paths with a page, and where that is.
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

/// What the canvas that a selector names holds of the style sheet's colours of these names, in pixels.
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

/// Reads and writes all over the device until it is told to end.
fn load(socket: &Path, end: &AtomicBool) {
    let mut peer = Peer::connect(socket, "m");
    let block = [7; 4096];
    let mut random = fastrand::Rng::with_seed(1);
    while !end.load(Relaxed) {
        let offset = random.u64(..64 << 8) * 4096;
        if random.bool() {
            peer.read(offset, 4096).unwrap();
        } else {
            peer.write(offset, &block, CommandFlags::NONE).unwrap();
        }
    }
    peer.disconnect();
}

#[test]
fn the_page_lives_in_a_real_browser() {
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
            it_opens_with_its_token_only(&mut browser, &page);
            charts_get_their_data(&mut browser, &pictures);
            it_is_used_by_keys(&mut browser);
            a_path_is_failed_after_a_question(&sandbox, &mut browser, &pictures);
            a_new_size_is_asked_for_or_not(&mut browser);
            it_is_dark_and_narrow_where_that_is_wanted(&mut browser, &pictures);
        }));
        end.store(true, Relaxed);
        loading.join().unwrap();
        if let Err(why) = done {
            std::panic::resume_unwind(why);
        }
    });
    // What was refused on purpose, once each, is said on the console, maybe late; and nothing else.
    let mut complaints = browser.complaints();
    for (status, place) in [("401", "/events"), ("422", "/devices/m/actions")] {
        let words = [format!("a status of {status} "), format!("{place}\"")];
        let is_that = |why: &String| words.iter().all(|words| why.contains(words));
        if let Some(found) = complaints.iter().position(is_that) {
            complaints.remove(found);
        }
    }
    assert_eq!(complaints, Vec::<String>::new());
    who_lost_the_token_is_told_so(&mut browser);
    server.terminate();
    browser.wait_for("['lost', 'gone'].includes(document.querySelector('#link').dataset.state)");
    browser.wait_for("!document.querySelector('#banner').hidden");
}

fn it_opens_with_its_token_only(browser: &mut Browser, page: &str) {
    let (bare, _) = page.split_once('?').unwrap();
    browser.look(1280, 800, "light");
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

fn charts_get_their_data(browser: &mut Browser, pictures: &Path) {
    browser.wait_for("document.querySelector('.rows .row .what').textContent.includes('multipath')");
    browser.wait_for(&format!("{} > 10", pixels(".spark", &["read", "write"])));
    browser.screenshot(&pictures.join("devices.png"));
    browser.click(".rows a.name");
    browser.wait_for(&format!("{} > 20", pixels("[aria-label=Requests] canvas", &["read", "write"])));
    browser.wait_for(&format!("{} > 20", pixels("[aria-label=Throughput] canvas", &["read", "write"])));
    browser.wait_for(&format!("{} > 20", pixels("[aria-label=Latency] canvas", &["p-1", "p-3", "p-4"])));
    browser.wait_for(&format!(
        "{} > 50",
        pixels("[aria-label='Latency heat map'] canvas", &["heat-1", "heat-2", "heat-3", "heat-4", "heat-5"])
    ));
    // All is on one screen, but for what fonts that are higher than others need.
    browser.wait_for("document.documentElement.scrollHeight <= 1000");
    browser.screenshot(&pictures.join("activity.png"));
}

fn it_is_used_by_keys(browser: &mut Browser) {
    browser.press("?");
    browser.wait_for("document.querySelector('#help').open");
    browser.press("Escape");
    browser.wait_for("!document.querySelector('#help').open");
    browser.press("2");
    browser.wait_for("document.querySelector('#tab-addresses').ariaSelected === 'true'");
    browser.wait_for(&format!("{} > 20", pixels("#panel-addresses canvas", &["read", "write"])));
    browser.eval("document.querySelector('#tab-addresses').focus()");
    browser.press("ArrowRight");
    browser.wait_for("document.activeElement.id === 'tab-stack'");
    let tab = "document.querySelector('#tab-stack')";
    browser.eval("location.hash = '#/%'");
    browser.wait_for(&format!("!{tab} && document.querySelector('.rows a.name')"));
    browser.click(".rows a.name");
    browser.wait_for(tab);
    browser.eval(&format!("{tab}.click()"));
}

fn a_path_is_failed_after_a_question(sandbox: &Sandbox, browser: &mut Browser, pictures: &Path) {
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
    assert!(status().contains("ram:64M F 1"), "{}", status());
    browser.screenshot(&pictures.join("stack.png"));
    browser.click("button[aria-label='Reinstate path ram:64M']");
    browser.wait_for("document.querySelector('#confirm').open");
    browser.click("#confirm-yes");
    browser.wait_for("!document.querySelector('.path .chip.bad')");
    assert!(status().contains("ram:64M A 1"), "{}", status());
}

fn a_new_size_is_asked_for_or_not(browser: &mut Browser) {
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

fn who_lost_the_token_is_told_so(browser: &mut Browser) {
    browser.eval("sessionStorage.clear()");
    // Another view opens another stream.
    browser.eval("location.hash = location.hash === '#/' ? '#/m' : '#/'");
    browser.wait_for("document.querySelector('#link').dataset.state === 'stranger'");
    browser.wait_for("document.querySelector('#banner a')?.getAttribute('href') === '/entry'");
}

fn it_is_dark_and_narrow_where_that_is_wanted(browser: &mut Browser, pictures: &Path) {
    let back = "getComputedStyle(document.body).backgroundColor";
    let light = browser.eval(back);
    browser.look(1280, 800, "dark");
    browser.wait_for(&format!("{back} !== {light}"));
    browser.eval("document.querySelector('#tab-activity').click()");
    browser.wait_for(&format!("{} > 20", pixels("[aria-label=Requests] canvas", &["read", "write"])));
    browser.screenshot(&pictures.join("activity-dark.png"));
    browser.look(400, 860, "dark");
    for tab in ["details", "stack", "addresses", "activity"] {
        browser.eval(&format!("document.querySelector('#tab-{tab}').click()"));
        browser.wait_for("document.documentElement.scrollWidth <= 400");
    }
    browser.screenshot(&pictures.join("activity-narrow.png"));
}

/// One request by hand; the whole answer.
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
    // It may have heard enough before it has heard all of it; then its answer is there, and what it closes is reset.
    let _ = stream.write_all(text.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn host_of(page: &str) -> &str {
    page.strip_prefix("http://").unwrap().split('/').next().unwrap()
}

#[test]
fn strangers_and_other_pages_get_nothing_and_nothing_is_changed_unless_that_was_allowed() {
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
        // A cookie may have been seen by the server of another port: it is worth nothing.
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
fn what_is_allowed_is_done_for_this_page_alone() {
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
        refused.starts_with("HTTP/1.1 422 ") && refused.contains("No such file or directory"),
        "{refused}"
    );
    assert!(act(&own, r#"{"action":"delete"}"#).starts_with("HTTP/1.1 400 "));
    assert!(act(&own, &" ".repeat(1 << 16)).starts_with("HTTP/1.1 400 "));
}

#[test]
fn the_page_makes_devices_smaller_only_where_that_is_allowed() {
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

/// Connections on which nothing useful is said are as many as anybody opens, and hide the page from nobody.
#[test]
fn idle_connections_do_not_hide_the_page() {
    raise_file_limit();
    let sandbox = Sandbox::default();
    let (server, page) = serve(&sandbox, &[]);
    let bearer = format!("Authorization: Bearer {}", page.split_once("token=").unwrap().1);
    let host = host_of(&page);
    let (before, mut crowd) = (server.descriptors(), Vec::new());
    for number in 0..900 {
        let mut stream = TcpStream::connect(host).unwrap();
        // Some have begun a request, and some ask without the token for what everybody gets.
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
    // They are closed by themselves, too.
    let gone = until(PATIENCE, || (server.descriptors() <= before + 8).then_some(()));
    assert!(gone.is_some(), "{} descriptors", server.descriptors());
}

/// The same for the control socket, which only the server's own user reaches.
#[test]
fn idle_connections_do_not_hide_the_control_socket() {
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
fn what_makes_no_sense_is_refused_before_anything_is_served() {
    let sandbox = Sandbox::default();
    let refused = |words: &[&str], status: i32| {
        let all = [&["serve", "ram:1M", "--name", "d"], words].concat();
        sandbox.run(&all).failed_with(status)
    };
    assert!(refused(&["--web", "example.org:80"], 2).contains("write 127.0.0.1:PORT"));
    assert!(refused(&["--web-token", "none"], 2).contains("--web <ADDRESS>"));
    let open = refused(&["--web", "0.0.0.0:0", "--web-token", "none"], 1);
    assert!(open.contains("can be reached from the network"), "{open}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    assert!(refused(&["--web", &address], 1).contains("choose another port"));
    assert_eq!(sandbox.run(&["list", "--json"]).ok().trim(), "[]");
}
