// The stream of events and its state. A stream that breaks is opened again, soon at first and then less
// often.

import { ask } from './token.js';

/** Waits in milliseconds before each new attempt; the last one repeats. */
const PAUSES = [500, 1000, 2000, 4000];
/** Milliseconds without an event after which the server counts as lost: it sends one each second. */
const SILENCE = 10_000;
/** States by the status of an answer that is no stream. */
const REFUSALS = { 401: 'stranger', 503: 'crowded' };

/** Reads server-sent events with fetch: EventSource cannot send the token as a header. */
class Stream {
  /** `tell(name, text)` is called for each event, and `ended(status)` in the end, with the status of a
   * refusal. */
  constructor(path, tell, ended) {
    this.control = new AbortController();
    this.read(path, tell).then(ended, () => ended());
  }

  close() {
    this.control.abort();
  }

  async read(path, tell) {
    const response = await ask(path, { signal: this.control.signal });
    if (!response.ok) return response.status;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = '';
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return undefined;
      const events = (rest + value).split('\n\n');
      rest = events.pop();
      for (const event of events) {
        const [, name, text] = /^event: (.*)\ndata: (.*)$/.exec(event) ?? [];
        if (name) tell(name, text);
      }
    }
  }
}

export class Live {
  /** `tell(name, data)` is called for each event, and with `state`: `live`, `lost`, `gone`, `stranger`,
   * `crowded`. */
  constructor(tell) {
    this.tell = tell;
    this.failures = 0;
    this.query = '';
    this.watchdog = setInterval(() => this.watch(), 1000);
  }

  /** Opens the stream of the list of devices, with the details of a device and the addresses of its requests
   * if asked for. */
  open(device, addresses = false) {
    this.query = device ? `?device=${device}${addresses ? '&addresses' : ''}` : '';
    this.connect();
  }

  connect() {
    clearTimeout(this.timer);
    this.source?.close();
    this.heard = Date.now();
    const source = new Stream(`/events${this.query}`, (name, text) => {
      if (source !== this.source) return;
      this.heard = Date.now();
      if (name === 'hello') {
        this.failures = 0;
        this.tell('state', 'live');
      }
      this.tell(name, JSON.parse(text));
    }, (status) => source === this.source && this.lost(status));
    this.source = source;
  }

  /** Closes the stream while the page is hidden: browsers have few connections to a server, and other pages
   * may need them. */
  pause() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  lost(status) {
    this.source?.close();
    this.source = null;
    this.failures += 1;
    this.tell('state', REFUSALS[status] ?? (this.failures > 3 ? 'gone' : 'lost'));
    const pause = PAUSES[Math.min(this.failures, PAUSES.length) - 1];
    this.timer = setTimeout(() => this.connect(), pause);
  }

  watch() {
    if (this.source && Date.now() - this.heard > SILENCE) this.lost();
  }
}

/** Fetches JSON from this server. */
export async function fetched(path) {
  const response = await ask(path);
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}
