// Addresses of requests: a dot for each sampled request, by its time of arrival and its offset on the device.
// Sequential work is a slope, random work a cloud, a hot spot a line. The server samples requests only while
// this view is shown.

import { places } from './axis.js';
import { TimePicture, colours, gridline } from './canvas.js';
import { el, put } from './dom.js';
import { bytes, clock, count, inUnitOf } from './format.js';
import { range } from './range.js';

/** A minute: long enough to see a pattern, short enough that dots stay apart. */
const SPAN = 60_000;
/** Kinds of requests, by the number that a dot has for its kind. Others are block-status requests, flushes
 * and discards. They are hidden at first, because a client that asks for the block status of every range that
 * it reads would cover all reads with them. */
const KINDS = [['Reads', 'read', true], ['Writes', 'write', true], ['Others', 'other', false]];
/** Kinds in the order in which they are drawn: reads and writes over others. */
const ORDER = [2, 0, 1];

class Dots extends TimePicture {
  constructor(addresses, height) {
    super('Where requests go', height);
    this.addresses = addresses;
  }

  paint(context, area) {
    const { dots, extent, shown } = this.addresses;
    const [low, high] = extent;
    const y = (offset) => area.y + area.height * (1 - (offset - low) / (high - low));
    this.times(context, area);
    const { ticks, step } = places(low, high, area.height);
    for (const offset of ticks) gridline(context, area, y(offset), inUnitOf(offset, step));
    context.globalAlpha = 0.75;
    for (const kind of ORDER) {
      if (!shown[kind]) continue;
      context.fillStyle = colours[KINDS[kind][1]];
      for (const [t, offset, , of] of dots) {
        if (of !== kind || t < this.from || t > this.to) continue;
        context.fillRect(this.at(t, area) - 1, y(offset) - 1, 2, 2);
      }
    }
    context.globalAlpha = 1;
    const { near } = this.addresses;
    if (near) {
      context.strokeStyle = colours.ink;
      context.lineWidth = 1.25;
      context.beginPath();
      context.arc(this.at(near[0], area), y(near[1]), 5, 0, 7);
      context.stroke();
    }
  }

  point(event) {
    const area = this.area();
    const [low, high] = this.addresses.extent;
    const { dots, shown } = this.addresses;
    let best = 12 * 12;
    let near = null;
    for (const dot of dots) {
      const x = this.at(dot[0], area) - event.offsetX;
      const y = area.y + area.height * (1 - (dot[1] - low) / (high - low)) - event.offsetY;
      if (shown[dot[3]] && x * x + y * y < best) {
        best = x * x + y * y;
        near = dot;
      }
    }
    this.addresses.look(near);
  }

  leave() {
    this.addresses.look(null);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const dots = this.addresses.dots.filter((dot) => this.addresses.shown[dot[3]]);
    const { near } = this.addresses;
    const at = near ? dots.indexOf(near) : dots.length - (step > 0 ? 1 : 0);
    this.addresses.look(dots[Math.min(Math.max(at + step, 0), dots.length - 1)] ?? null);
  }
}

/** The picture with its title, its filter and its read-out. */
export class Addresses {
  constructor(height = 360) {
    Object.assign(this, { dots: [], late: [], extent: [0, 1], shown: KINDS.map(([, , shown]) => shown), near: null, every: 1 });
    this.when = el('span', { class: 'when num' });
    this.note = el('span', { class: 'note' }, 'waiting for requests …');
    const toggle = ([name, tone, shown], kind) => el('button', {
      type: 'button', class: 'toggle', 'aria-pressed': String(shown),
      title: kind === 2 ? 'Block-status requests, flushes and discards' : null,
      onclick: (event) => {
        this.shown[kind] = !this.shown[kind];
        event.currentTarget.setAttribute('aria-pressed', this.shown[kind]);
        this.fit();
        this.picture.draw();
      },
    }, el('i', { class: `swatch swatch-${tone}` }), name);
    this.picture = new Dots(this, height);
    this.node = el('section', { class: 'card chart', 'aria-label': 'Where requests go' },
      el('header', {}, el('h3', {}, 'Address over time', this.note), this.when,
        el('div', { class: 'legend', role: 'group', 'aria-label': 'Show' }, KINDS.map(toggle))),
      this.picture.node);
  }

  /** Adds the dots of the last second. While the window of time stands still, they are kept back. */
  update({ t, dots, every }) {
    this.late = this.late.filter((dot) => dot[0] > t - SPAN).concat(dots);
    if (range.isFixed) return;
    this.dots = this.dots.filter((dot) => dot[0] > t - SPAN).concat(this.late);
    this.late = [];
    this.every = every;
    Object.assign(this.picture, { from: t - SPAN, to: t });
    this.fit();
    const some = every > 1 ? `one of ${count(every)} requests` : 'every request';
    put(this.note, this.dots.length === 0 ? 'no requests in the last minute' : some);
    this.picture.draw();
  }

  /** Shows the used part of the device with a margin, or the whole device if that is most of it. */
  fit() {
    const shown = this.dots.filter((dot) => this.shown[dot[3]]);
    if (shown.length === 0) {
      this.extent = [0, this.size || 1];
      return;
    }
    let [low, high] = [Infinity, 0];
    for (const [, offset, length] of shown) {
      low = Math.min(low, offset);
      high = Math.max(high, offset + length);
    }
    const all = this.size ?? high;
    if (high - low > all / 2) [low, high] = [0, Math.max(all, high)];
    else {
      const room = Math.max((high - low) * 0.05, 4096);
      [low, high] = [Math.max(low - room, 0), high + room];
    }
    this.extent = [low, high];
  }

  look(dot) {
    this.near = dot;
    const text = dot
      ? `${clock(dot[0])}  ${KINDS[dot[3]][0].slice(0, -1).toLowerCase()} of ${bytes(dot[2])} at sector ${(dot[1] / 512).toLocaleString('en')}`
      : '';
    put(this.when, text);
    this.picture.canvas.setAttribute('aria-label', text || 'Where requests go');
    this.picture.draw();
  }

  destroy() {
    this.picture.destroy();
  }
}
