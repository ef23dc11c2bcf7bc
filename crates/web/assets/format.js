// Formats numbers for people, with at most three significant digits, so that columns stay narrow.

const trimmed = (value, digits) => value.toFixed(digits);

function scaled(value, units, step) {
  let unit = 0;
  while (Math.abs(value) >= step * 0.9995 && unit < units.length - 1) {
    value /= step;
    unit += 1;
  }
  const digits = value >= 99.95 || (unit === 0 && Number.isInteger(value)) ? 0 : value >= 9.995 ? 1 : 2;
  return [trimmed(value, digits), units[unit]];
}

/** A count: 950, 1.25 k, 3.10 M. */
export function count(value) {
  if (!(value > 0)) return '0';
  if (value < 10) return Number.isInteger(value) ? String(value) : value.toFixed(1);
  if (value < 999.5) return Math.round(value).toString();
  const [text, unit] = scaled(value, ['', 'k', 'M', 'G'], 1000);
  return `${text} ${unit}`.trim();
}

/** Bytes, in binary units. */
export function bytes(value) {
  if (!(value > 0)) return '0 B';
  const [text, unit] = scaled(value, ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'], 1024);
  return `${text} ${unit}`;
}

/** A place on an axis whose ticks are `step` bytes apart, in the unit of that: 1028 MiB, not 1.00 GiB again
 * and again. */
export function inUnitOf(value, step) {
  if (value === 0) return '0';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  const unit = Math.min(Math.max(Math.floor(Math.log2(step) / 10), 0), units.length - 1);
  return `${value / 1024 ** unit} ${units[unit]}`;
}

/** Removes zeros after the point, for an axis: 2 MiB/s, not 2.00 MiB/s. */
export const short = (text) => text.replace(/\.0+(?= |$)/, '').replace(/(\.\d)0(?= |$)/, '$1');

/** A size of a device: 250 GiB, not 250.0 GiB. */
export const size = (value) => bytes(value).replace(/\.0+ /, ' ');

export const rate = (value) => `${bytes(value)}/s`;

/** A time in nanoseconds; 0 is none. */
export function time(ns) {
  if (!(ns > 0)) return '–';
  const [text, unit] = scaled(ns, ['ns', 'µs', 'ms', 's'], 1000);
  return `${text} ${unit}`;
}

/** A share, from 0 to 1, as a percentage. */
export function percent(part) {
  const value = part * 100;
  if (value <= 0) return '0 %';
  if (value < 1) return '< 1 %';
  return `${Math.round(value)} %`;
}

/** A duration in milliseconds, in its two largest units. */
export function age(ms) {
  const s = Math.floor(ms / 1000);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** The time of day. */
export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false });
