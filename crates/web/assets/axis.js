// Ticks at round numbers: of time, of counts, of bytes, of latencies. Each function returns the values of the
// ticks.

const SECOND = 1000;
const MINUTE = 60 * SECOND;
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600].map((seconds) => seconds * SECOND);
/** Space that the label of a time and of a value needs, in pixels. */
const TIME_ROOM = 72;
const VALUE_ROOM = 30;

/** Times of a window `[from, to]` that are round on the clock of the reader, and how far apart they are. */
export function times(from, to, width) {
  const step = TIMES.find((one) => (one * width) / (to - from) >= TIME_ROOM) ?? TIMES.at(-1);
  const zone = new Date(to).getTimezoneOffset() * MINUTE;
  const ticks = [];
  for (let t = Math.ceil((from - zone) / step) * step + zone; t <= to; t += step) ticks.push(t);
  return { ticks, step };
}

/** The name of a time on the clock of the reader; with seconds where ticks are less than a minute apart. */
export const timeName = (t, step) =>
  new Date(t).toLocaleTimeString([], { hour12: false, hour: '2-digit', minute: '2-digit', ...(step < MINUTE && { second: '2-digit' }) });

/** Steps on a vertical axis: two at least, and no more than can be read at a glance. */
const room = (height) => Math.min(Math.max(Math.floor(height / VALUE_ROOM), 2), 8);

/** From 0 to the first multiple of a step of 1, 2 or 5 times a power of ten that is not below `most`. */
export function counts(most, height) {
  const raw = most / room(height);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.9999);
  return upTo(most, step);
}

/** From 0 to the first multiple of a step that is not below `most`; steps are powers of two. */
export function binary(most, height) {
  return upTo(most, 2 ** Math.ceil(Math.log2(most / room(height)) - 1e-9));
}

function upTo(most, step) {
  const ticks = [0];
  while (ticks.at(-1) < most * 0.9999) ticks.push(ticks.length * step);
  return ticks;
}

/** Multiples of a power of two within `[low, high]`, and how far apart they are. */
export function places(low, high, height) {
  const step = 2 ** Math.ceil(Math.log2((high - low) / room(height)) - 1e-9);
  const ticks = [];
  for (let at = Math.ceil(low / step); at * step <= high; at += 1) ticks.push(at * step);
  return { ticks, step };
}

/** Powers of ten within whole decades; also 2 and 5 times those if there is space. */
export function decades(low, high, height) {
  const each = height / Math.max(Math.log10(high / low), 1);
  const parts = each >= 4 * VALUE_ROOM ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = 10 ** Math.floor(Math.log10(low) + 1e-9); power <= high * 1.0001; power *= 10) {
    for (const part of parts) {
      const value = power * part;
      if (value >= low * 0.9999 && value <= high * 1.0001) ticks.push(value);
    }
  }
  return ticks;
}
