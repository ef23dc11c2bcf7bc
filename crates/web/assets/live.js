// The stream of events, and whether there is one. A stream that breaks is opened again, soon and then less often.

/** Waits in milliseconds before each new attempt; the last one again and again. */
const PAUSES = [500, 1000, 2000, 4000];
/** Without a word for so long the server is as good as gone: it says something each second. */
const SILENCE = 10_000;
/** How long to wait for a word on why there is no stream. */
const ASKING = 2000;
/** What an answer other than a stream means. */
const REFUSALS = { 401: 'stranger', 503: 'crowded' };

export class Live {
  /** `tell(name, data)` is called for each event, and with `state`: `live`, `lost`, `gone`, `stranger`, `crowded`. */
  constructor(tell) {
    this.tell = tell;
    this.failures = 0;
    /** Counts what was begun: whoever waited for something older says nothing. */
    this.turn = 0;
    this.query = '';
    this.watchdog = setInterval(() => this.watch(), 1000);
  }

  /** Watch something: a device, and also where its requests go; or only the list of all. */
  open(device, addresses = false) {
    this.query = device ? `?device=${device}${addresses ? '&addresses' : ''}` : '';
    this.connect();
  }

  connect() {
    this.turn += 1;
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
    this.turn += 1;
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  async lost() {
    this.source?.close();
    this.source = null;
    this.failures += 1;
    const turn = this.turn;
    const refusal = await refused(`/events${this.query}`);
    if (turn !== this.turn) return;
    this.tell('state', refusal ?? (this.failures > 3 ? 'gone' : 'lost'));
    const pause = PAUSES[Math.min(this.failures, PAUSES.length) - 1];
    this.timer = setTimeout(() => this.connect(), pause);
  }

  watch() {
    if (this.source && Date.now() - this.heard > SILENCE) this.lost();
  }
}

/** Why a stream is refused, which it does not say itself; `undefined`: it is not, or nobody answers. */
async function refused(path) {
  const asking = new AbortController();
  const timer = setTimeout(() => asking.abort(), ASKING);
  try {
    const { status } = await fetch(path, { credentials: 'same-origin', signal: asking.signal });
    return REFUSALS[status];
  } catch {
    return undefined;
  } finally {
    clearTimeout(timer);
    asking.abort();
  }
}

/** JSON of this server. */
export async function fetched(path) {
  const response = await fetch(path, { credentials: 'same-origin' });
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}
