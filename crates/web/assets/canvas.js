// What all charts share: a canvas as sharp as the screen, the colours of the style sheet, one cursor in time,
// one window of time (range.js), and marks of events of the device.

import { times, timeName } from './axis.js';
import { el } from './dom.js';
import { range } from './range.js';

/** Space for the labels of the vertical axis, and for those of the horizontal one, in pixels. */
export const LEFT = 66;
export const BOTTOM = 18;
const TOP = 8;
const RIGHT = 10;
/** A drag of fewer pixels is a click. */
const DRAG_MIN = 6;
/** Distance in pixels from a mark within which the pointer shows its text. */
const MARK_NEAR = 5;
/** Colours of marks by their kind. */
const MARKS = { suspension: 'warn', path: 'bad', change: 'mark' };

/** The time that the pointer or the keyboard selects, shared by all charts; `null`: none. */
export const cursor = {
  t: null,
  listeners: new Set(),
  set(t) {
    if (t === this.t) return;
    this.t = t;
    for (const listener of this.listeners) listener();
  },
};

/** Marks of the device that is shown: `{ t, kind, text }`, oldest first. */
export const marks = { all: [] };

/** The current colours of the style sheet, by name. */
export const colours = {};
const NAMES = ['line', 'faint', 'ink', 'accent', 'warn', 'bad', 'mark', 'read', 'write', 'other', 'p-1', 'p-2', 'p-3', 'p-4',
  'heat-1', 'heat-2', 'heat-3', 'heat-4', 'heat-5'];

/** Reads the colours: at the start, and when the theme changes between light and dark. */
export function refreshColours() {
  const probe = document.createElement('i');
  document.body.append(probe);
  for (const name of NAMES) {
    // The style sheet has one for light and one for dark: an element knows which of them applies.
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

/** A picture on a canvas: `paint(context, area)` draws it whole. It fills `node`, which grows with the
 * screen. */
export class Picture {
  constructor(label, height) {
    this.canvas = el('canvas', { class: 'picture', role: 'img', 'aria-label': label, tabIndex: 0 });
    this.node = el('div', { class: 'plot' }, this.canvas);
    this.node.style.minHeight = `${height}px`;
    this.context = this.canvas.getContext('2d');
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.canvas);
    for (const [event, act] of [['pointermove', 'point'], ['pointerleave', 'leave'], ['blur', 'leave'], ['keydown', 'key']]) {
      this.canvas.addEventListener(event, (happened) => this[act](happened));
    }
  }

  /** The part of the canvas in which values are drawn. */
  area() {
    const { clientWidth, clientHeight } = this.canvas;
    return {
      x: LEFT, y: TOP, width: Math.max(clientWidth - LEFT - RIGHT, 1), height: Math.max(clientHeight - TOP - BOTTOM, 1),
    };
  }

  draw() {
    const { canvas, context } = this;
    if (canvas.clientWidth === 0) return;
    const scale = window.devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * scale);
    const height = Math.round(canvas.clientHeight * scale);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    context.font = `11px ${getComputedStyle(canvas).fontFamily}`;
    this.paint(context, this.area());
  }

  point() {}

  leave() {}

  key() {}

  destroy() {
    this.sizes.disconnect();
  }
}

/** A picture whose horizontal axis is time: `from` and `to` are its window. */
export class TimePicture extends Picture {
  constructor(label, height) {
    super(label, height);
    Object.assign(this, { from: 0, to: 1 });
    this.redraw = () => this.draw();
    cursor.listeners.add(this.redraw);
  }

  destroy() {
    super.destroy();
    cursor.listeners.delete(this.redraw);
  }

  /** The x of a time, and the time of an x. */
  at(t, area) {
    return area.x + (area.width * (t - this.from)) / (this.to - this.from);
  }

  timeAt(x, area) {
    return this.from + ((this.to - this.from) * (x - area.x)) / area.width;
  }

  point(event) {
    const area = this.area();
    const x = event.offsetX - area.x;
    cursor.set(x < 0 || x > area.width ? null : this.timeAt(event.offsetX, area));
  }

  leave() {
    cursor.set(null);
  }

  key(event) {
    const step = { ArrowLeft: -1000, ArrowRight: 1000, PageUp: -30_000, PageDown: 30_000 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const t = (cursor.t ?? this.to) + step;
    cursor.set(Math.min(Math.max(t, this.from), this.to));
  }

  /** Lines and names of the horizontal axis. */
  times(context, area) {
    const { ticks, step } = times(this.from, this.to, area.width);
    context.textBaseline = 'bottom';
    context.textAlign = 'center';
    for (const t of ticks) {
      const x = Math.round(this.at(t, area)) + 0.5;
      line(context, colours.line, x, area.y, x, area.y + area.height);
      // A label that the edge would cut is omitted.
      if (x < area.x + 12 || x > area.x + area.width - 18) continue;
      context.fillStyle = colours.faint;
      context.fillText(timeName(t, step), x, area.y + area.height + BOTTOM);
    }
  }

  /** The line at the cursor. */
  mark(context, area) {
    if (cursor.t === null || cursor.t < this.from || cursor.t > this.to) return;
    const x = Math.round(this.at(cursor.t, area)) + 0.5;
    line(context, colours.faint, x, area.y, x, area.y + area.height);
  }
}

/** A picture of the device's window of time: what is dragged across it is zoomed into, and it shows the
 * device's marks. */
export class RangePicture extends TimePicture {
  constructor(label, height) {
    super(label, height);
    this.canvas.addEventListener('pointerdown', (event) => this.press(event));
    this.canvas.addEventListener('pointerup', (event) => this.release(event));
    this.canvas.addEventListener('pointercancel', () => this.release(null));
    this.canvas.addEventListener('dblclick', () => range.follow());
  }

  /** Shows the window over these samples. */
  stretch(samples) {
    [this.from, this.to] = range.over(samples);
    this.newest = samples.at(-1)?.t ?? this.to;
  }

  press(event) {
    if (event.button !== 0 || event.pointerType === 'touch') return;
    const area = this.area();
    if (event.offsetX < area.x) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pressed = { x: event.offsetX, t: this.timeAt(event.offsetX, area) };
  }

  point(event) {
    super.point(event);
    if (!this.pressed || Math.abs(event.offsetX - this.pressed.x) < DRAG_MIN) return;
    range.select([this.pressed.t, this.within(event)]);
  }

  /** The time at the pointer, or at the edge across which the pointer left the picture. */
  within(event) {
    return Math.min(Math.max(this.timeAt(event.offsetX, this.area()), this.from), this.to);
  }

  release(event) {
    const { pressed } = this;
    this.pressed = null;
    if (!pressed) return;
    if (event && Math.abs(event.offsetX - pressed.x) >= DRAG_MIN) range.zoom(pressed.t, this.within(event), this.newest);
    else if (range.selection) range.select(null);
  }

  key(event) {
    const factor = { '+': 0.5, '=': 0.5, '-': 2, _: 2 }[event.key];
    if (!factor) return super.key(event);
    event.preventDefault();
    event.stopPropagation();
    const middle = cursor.t ?? (this.from + this.to) / 2;
    range.zoom(middle - (middle - this.from) * factor, middle + (this.to - middle) * factor, this.newest);
    return undefined;
  }

  /** Draws lines for the device's marks and the cursor, and the range that the pointer selects. */
  mark(context, area) {
    for (const { t, kind } of marks.all) {
      if (t < this.from || t > this.to) continue;
      const x = Math.round(this.at(t, area)) + 0.5;
      const colour = colours[MARKS[kind]] ?? colours.faint;
      context.setLineDash([3, 3]);
      line(context, colour, x, area.y, x, area.y + area.height);
      context.setLineDash([]);
      context.fillStyle = colour;
      context.beginPath();
      context.moveTo(x - 4.5, area.y - 6);
      context.lineTo(x + 4.5, area.y - 6);
      context.lineTo(x, area.y + 1);
      context.fill();
    }
    if (range.selection) {
      const [one, other] = range.selection.map((t) => this.at(t, area));
      context.fillStyle = colours.accent;
      context.globalAlpha = 0.14;
      context.fillRect(Math.min(one, other), area.y, Math.abs(other - one), area.height);
      context.globalAlpha = 1;
    }
    super.mark(context, area);
  }

  /** Texts of the marks at the cursor. */
  marksAt() {
    if (cursor.t === null) return [];
    const near = (MARK_NEAR * (this.to - this.from)) / this.area().width;
    return marks.all.filter(({ t }) => Math.abs(t - cursor.t) <= near).map(({ text }) => text);
  }
}

function line(context, colour, fromX, fromY, toX, toY) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(fromX, fromY);
  context.lineTo(toX, toY);
  context.stroke();
}

/** Draws a label of the vertical axis, and its line. */
export function gridline(context, area, y, text) {
  const at = Math.round(y) + 0.5;
  line(context, colours.line, area.x, at, area.x + area.width, at);
  context.fillStyle = colours.faint;
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  context.fillText(text, area.x - 8, at);
}

/** Length of a sample in milliseconds. */
export const lengthOf = (sample) => sample.step ?? 1000;

/** The sample at a time: the nearest one, unless it is far away. */
export function sampleAt(samples, t) {
  let low = 0;
  let high = samples.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (samples[middle].t < t) low = middle + 1;
    else high = middle;
  }
  const near = [samples[low - 1], samples[low]].filter(Boolean);
  near.sort((a, b) => Math.abs(a.t - t) - Math.abs(b.t - t));
  return near[0] && Math.abs(near[0].t - t) < 2000 + lengthOf(near[0]) ? near[0] : null;
}

/** A picture of the device's window with its title and a read-out that follows the cursor; `read` fills that. */
export class Read {
  constructor() {
    this.samples = [];
    this.moved = () => this.read();
    cursor.listeners.add(this.moved);
  }

  update(samples) {
    this.samples = samples;
    this.picture.stretch(samples);
    this.picture.draw();
    this.read();
  }

  /** The newest sample of the window. */
  newest() {
    const { from, to } = this.picture;
    return this.samples.findLast((sample) => sample.t <= to && sample.t >= from);
  }

  destroy() {
    this.picture.destroy();
    cursor.listeners.delete(this.moved);
  }
}
