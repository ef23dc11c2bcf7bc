// Where requests go: a dot for each of a sample, by the time it came and its place on the device. Sequential work is a
// slope, random work a cloud, a hot spot a line. Only while this is looked at does the server listen for it.

import { TimePicture, colours, gridline } from './canvas.js';
import { el, put } from './dom.js';
import { bytes, clock, count, short, size } from './format.js';

/** A minute: long enough to see a pattern, short enough that dots stay apart. */
const SPAN = 60_000;
const KINDS = [['Reads', 'read'], ['Writes', 'write'], ['Others', 'other']];

class Dots extends TimePicture {
  constructor(addresses, height) {
    super('Where requests go', height, SPAN);
    this.addresses = addresses;
  }

  paint(context, area) {
    const { dots, extent, shown } = this.addresses;
    const [low, high] = extent;
    const y = (offset) => area.y + area.height * (1 - (offset - low) / (high - low));
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const offset = low + part * (high - low);
      gridline(context, area, y(offset), offset === 0 ? '0' : short(size(offset)), colours);
    }
    this.times(context, area, colours);
    context.globalAlpha = 0.75;
    KINDS.forEach(([, name], kind) => {
      if (!shown[kind]) return;
      context.fillStyle = colours[name];
      for (const [t, offset, , of] of dots) {
        if (of !== kind || t < this.end - SPAN) continue;
        context.fillRect(this.at(t, area) - 1, y(offset) - 1, 2, 2);
      }
    });
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
    const { dots, near } = this.addresses;
    const at = near ? dots.indexOf(near) : dots.length - (step > 0 ? 1 : 0);
    this.addresses.look(dots[Math.min(Math.max(at + step, 0), dots.length - 1)] ?? null);
  }
}

/** The picture with its title, its filter and its read-out. */
export class Addresses {
  constructor(height = 420) {
    Object.assign(this, { dots: [], extent: [0, 1], shown: [true, true, true], near: null, every: 1 });
    this.told = el('span', { class: 'when num' });
    this.note = el('span', { class: 'note' }, 'listening …');
    const toggle = ([name, tone], kind) => el('button', {
      type: 'button', class: 'toggle', 'aria-pressed': 'true',
      onclick: (event) => {
        this.shown[kind] = !this.shown[kind];
        event.currentTarget.setAttribute('aria-pressed', this.shown[kind]);
        this.picture.draw();
      },
    }, el('i', { class: `swatch swatch-${tone}` }), name);
    this.picture = new Dots(this, height);
    this.node = el('section', { class: 'card chart wide', 'aria-label': 'Where requests go' },
      el('header', {}, el('h3', {}, 'Address over time', this.note), this.told,
        el('div', { class: 'legend', role: 'group', 'aria-label': 'Show' }, KINDS.map(toggle))),
      this.picture.canvas);
  }

  /** What came in the last second. */
  update({ t, dots, every }) {
    this.dots = this.dots.filter((dot) => dot[0] > t - SPAN).concat(dots);
    this.every = every;
    this.picture.end = t;
    this.fit();
    const note = this.dots.length === 0 ? 'nothing came in the last minute' : every > 1 ? `one of ${count(every)} requests` : 'every request';
    put(this.note, note);
    this.picture.draw();
  }

  /** The part of the device that is used, with some room, and all of it when that is most of it. */
  fit() {
    if (this.dots.length === 0) {
      this.extent = [0, this.size ?? 1];
      return;
    }
    let [low, high] = [Infinity, 0];
    for (const [, offset, length] of this.dots) {
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
    put(this.told, text);
    this.picture.canvas.setAttribute('aria-label', text || 'Where requests go');
    this.picture.draw();
  }

  destroy() {
    this.picture.destroy();
  }
}
