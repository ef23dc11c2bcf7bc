// Latency over time as a heat map: a column a second, a row each quarter of a doubling, darker where more requests
// ended. It shows what percentiles hide: two ways through a cache, a slow path, a queue that fills up.

import { Read, TimePicture, colours, cursor, gridline, sampleAt } from './canvas.js';
import { el, put } from './dom.js';
import { clock, count, short, time } from './format.js';

/** Rows begin at 2^10 ns; four make a doubling. */
const floor = (row) => 2 ** (10 + row / 4);
/** So many rows are shown at least. */
const ROWS_MIN = 20;

class Cells extends TimePicture {
  constructor(heat, height) {
    super('Latency heat map', height);
    this.heat = heat;
    this.row = null;
  }

  /** Which rows there are, and the most in one of them. */
  range(samples) {
    let [low, high, most] = [Infinity, -Infinity, 1];
    for (const { heat } of samples) {
      for (const [row, number] of heat) {
        low = Math.min(low, row);
        high = Math.max(high, row);
        most = Math.max(most, number);
      }
    }
    if (low > high) return { low: 12, high: 52, most };
    const spare = Math.max(ROWS_MIN - (high - low + 1), 2);
    low = Math.max(low - Math.ceil(spare / 2), 0);
    return { low, high: Math.max(high + Math.ceil(spare / 2), low + ROWS_MIN), most };
  }

  shade(part) {
    const steps = 5;
    return colours[`heat-${Math.min(steps, 1 + Math.floor(part * steps))}`];
  }

  paint(context, area) {
    const samples = this.heat.samples.filter((sample) => sample.t >= this.end - this.span);
    const { low, high, most } = this.range(samples);
    this.rows = { low, high };
    const height = area.height / (high - low + 1);
    const y = (row) => area.y + area.height - (row - low + 1) * height;
    const width = (area.width * 1000) / this.span;
    for (const sample of samples) {
      const x = this.at(sample.t, area) - width;
      for (const [row, number] of sample.heat) {
        context.fillStyle = this.shade(Math.log(number + 1) / Math.log(most + 1) - 1e-9);
        context.fillRect(x, y(row), width + 0.6, height + 0.3);
      }
    }
    for (let power = 3; power <= 10; power += 1) {
      const row = (Math.log2(10 ** power) - 10) * 4;
      if (row >= low && row <= high) gridline(context, area, y(row) + height, short(time(10 ** power)), colours);
    }
    this.times(context, area, colours);
    this.mark(context, area, colours);
    if (this.row !== null && cursor.t !== null) {
      context.strokeStyle = colours.faint;
      context.strokeRect(area.x + 0.5, Math.round(y(this.row)) + 0.5, area.width - 1, Math.max(height, 2));
    }
  }

  point(event) {
    const area = this.area();
    const { low, high } = this.rows ?? { low: 0, high: 0 };
    const part = 1 - (event.offsetY - area.y) / area.height;
    this.row = part < 0 || part >= 1 ? null : low + Math.floor(part * (high - low + 1));
    super.point(event);
    this.heat.read();
    this.draw();
  }

  leave() {
    this.row = null;
    super.leave();
    this.heat.read();
  }

  key(event) {
    const step = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (step && this.rows) {
      event.preventDefault();
      event.stopPropagation();
      const { low, high } = this.rows;
      this.row = Math.min(Math.max((this.row ?? Math.round((low + high) / 2)) + step, low), high);
      if (cursor.t === null) cursor.set(this.end);
      this.heat.read();
      this.draw();
      return;
    }
    super.key(event);
  }
}

/** The heat map with its title and read-out. */
export class Heat extends Read {
  constructor(height = 150) {
    super();
    this.told = el('span', { class: 'when num' });
    this.picture = new Cells(this, height);
    const scale = [1, 2, 3, 4, 5].map((step) => el('i', { class: `step heat-step-${step}` }));
    this.node = el('section', { class: 'card chart wide', 'aria-label': 'Latency heat map' },
      el('header', {},
        el('h3', {}, 'Latency heat map', el('span', { class: 'note' }, 'requests by latency, each second')),
        this.told,
        el('div', { class: 'legend', 'aria-hidden': 'true' }, el('span', { class: 'key' }, 'few ', el('span', { class: 'steps' }, scale), ' many'))),
      this.picture.canvas);
  }

  read() {
    const { row } = this.picture;
    const sample = cursor.t === null ? null : sampleAt(this.samples, cursor.t);
    if (!sample) {
      put(this.told, '');
      return;
    }
    const cell = row === null ? null : sample.heat.find(([number]) => number === row);
    const all = sample.heat.reduce((sum, [, number]) => sum + number, 0);
    const text = row === null
      ? `${clock(sample.t)}  ${count(all)} requests`
      : `${clock(sample.t)}  ${time(floor(row))} – ${time(floor(row + 1))}: ${count(cell?.[1] ?? 0)} of ${count(all)}`;
    put(this.told, text);
    this.picture.canvas.setAttribute('aria-label', `Latency heat map: ${text}`);
  }
}
