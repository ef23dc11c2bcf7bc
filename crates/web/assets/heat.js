// Latency over time as a heat map: a column a sample, a row each quarter of a doubling, darker where more
// requests ended. It shows what percentiles hide: two ways through a cache, a slow path, a queue that fills
// up.

import { RangePicture, Read, colours, cursor, gridline, lengthOf, sampleAt } from './canvas.js';
import { el, put } from './dom.js';
import { clock, count, short, time } from './format.js';

/** Rows begin at 2^10 ns; four make a doubling. */
const floor = (row) => 2 ** (10 + row / 4);
/** Smallest number of rows that are shown. */
const ROWS_MIN = 20;
/** Number of shades. */
const SHADES = 5;
/** The part of the shades at which a number of requests a second is, where `most` is the largest: by their
 * logarithms. */
const partOf = (number, most) => Math.log(number + 1) / Math.log(most + 1);
/** The largest number of a shade, from 1 on. */
const ceiling = (shade, most) => (most + 1) ** (shade / SHADES) - 1;

class Cells extends RangePicture {
  constructor(heat, height) {
    super('Latency heat map', height);
    this.heat = heat;
    this.row = null;
    this.most = 1;
  }

  /** The rows that are shown, and the most requests a second in a cell. */
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

  shade(number) {
    return colours[`heat-${Math.min(SHADES, 1 + Math.floor((partOf(number, this.most) - 1e-9) * SHADES))}`];
  }

  paint(context, area) {
    const samples = this.heat.samples.filter((sample) => sample.t >= this.from && sample.t - lengthOf(sample) <= this.to);
    const { low, high, most } = this.range(samples);
    this.rows = { low, high };
    this.most = most;
    const height = area.height / (high - low + 1);
    const y = (row) => area.y + area.height - (row - low + 1) * height;
    context.save();
    context.beginPath();
    context.rect(area.x, area.y, area.width, area.height);
    context.clip();
    for (const sample of samples) {
      const [x, end] = [this.at(sample.t - lengthOf(sample), area), this.at(sample.t, area)];
      for (const [row, number] of sample.heat) {
        context.fillStyle = this.shade(number);
        context.fillRect(x, y(row), end - x + 0.6, height + 0.3);
      }
    }
    context.restore();
    for (let power = 3; power <= 10; power += 1) {
      const row = (Math.log2(10 ** power) - 10) * 4;
      if (row >= low && row <= high) gridline(context, area, y(row) + height, short(time(10 ** power)));
    }
    this.times(context, area);
    this.mark(context, area);
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
      if (cursor.t === null) cursor.set(this.to);
      this.heat.read();
      this.draw();
      return;
    }
    super.key(event);
  }
}

/** The heat map with its title, its scale and its read-out. */
export class Heat extends Read {
  constructor(height = 96) {
    super();
    this.when = el('span', { class: 'when num' });
    this.picture = new Cells(this, height);
    this.ceilings = [];
    const scale = [];
    for (let shade = 1; shade <= SHADES; shade += 1) {
      const number = el('b', { class: 'num' });
      this.ceilings.push(number);
      scale.push(el('span', { class: 'step' }, el('i', { class: `heat-step-${shade}` }), number));
    }
    this.node = el('section', { class: 'card chart', 'aria-label': 'Latency heat map' },
      el('header', {},
        el('h3', {}, 'Latency heat map', el('span', { class: 'note' }, 'requests per second')),
        this.when,
        el('div', { class: 'legend', title: 'Requests per second, up to' }, el('span', { class: 'faint' }, '≤'), el('span', { class: 'steps' }, scale))),
      this.picture.node);
  }

  update(samples) {
    super.update(samples);
    this.ceilings.forEach((node, index) => put(node, count(Math.max(Math.round(ceiling(index + 1, this.picture.most)), index + 1))));
  }

  read() {
    const { row } = this.picture;
    const sample = cursor.t === null ? null : sampleAt(this.samples, cursor.t);
    if (!sample) {
      put(this.when, '');
      return;
    }
    const cell = row === null ? null : sample.heat.find(([number]) => number === row);
    const all = sample.heat.reduce((sum, [, number]) => sum + number, 0);
    const text = row === null
      ? [clock(sample.t), `${count(all)} requests a second`, ...this.picture.marksAt()].join(' · ')
      : `${clock(sample.t)} · ${time(floor(row))} – ${time(floor(row + 1))}: ${count(cell?.[1] ?? 0)} of ${count(all)} a second`;
    put(this.when, text);
    this.picture.canvas.setAttribute('aria-label', `Latency heat map: ${text}`);
  }
}
