// The stream of events, and whether there is one. A stream that breaks is opened again, soon and then less often.

/** Waits in milliseconds before each new attempt; the last one again and again. */
const PAUSES = [500, 1000, 2000, 4000];
/** Without a word for so long the server is as good as gone: it says something each second. */
const SILENCE = 10_000;

export class Live {
  /** `tell(name, data)` is called for each event, and with `state` for `live`, `lost` and `gone`. */
  constructor(tell) {
    this.tell = tell;
    this.failures = 0;
    this.query = '';
    this.watchdog = setInterval(() => this.watch(), 1000);
  }

  /** Watch something: a device, and also where its requests go; or only the list of all. */
  open(device, addresses = false) {
    this.query = device ? `?device=${device}${addresses ? '&addresses' : ''}` : '';
    this.connect();
  }

  connect() {
    clearTimeout(this.timer);
    this.source?.close();
    const source = new EventSource(`/events${this.query}`);
    this.source = source;
    this.heard = Date.now();
    for (const name of ['hello', 'tick', 'device', 'addresses']) {
      source.addEventListener(name, (event) => {
        if (source !== this.source) return;
        this.heard = Date.now();
        if (name === 'hello') {
          this.failures = 0;
          this.tell('state', 'live');
        }
        this.tell(name, JSON.parse(event.data));
      });
    }
    source.addEventListener('error', () => source === this.source && this.lost());
  }

  /** Nobody looks: browsers have few connections to a server, and other pages may want them. */
  pause() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  lost() {
    this.source?.close();
    this.source = null;
    this.failures += 1;
    this.tell('state', this.failures > 3 ? 'gone' : 'lost');
    const pause = PAUSES[Math.min(this.failures, PAUSES.length) - 1];
    this.timer = setTimeout(() => this.connect(), pause);
  }

  watch() {
    if (this.source && Date.now() - this.heard > SILENCE) this.lost();
  }
}

/** JSON of this server. */
export async function fetched(path) {
  const response = await fetch(path, { credentials: 'same-origin' });
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}
