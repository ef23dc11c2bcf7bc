// What all pictures share: a canvas as sharp as the screen, the colours of the style sheet, one cursor in time.

/** Five minutes, a sample a second. */
export const SPAN = 300_000;
/** By the length of a picture's time: how far apart its names are, in a wide picture and in a narrow one. */
const STEPS = [[60_000, 10_000, 20_000], [120_000, 20_000, 40_000], [Infinity, 60_000, 120_000]];
/** Room for the names of the vertical axis, and for those of the horizontal one. */
export const LEFT = 62;
export const BOTTOM = 18;
const TOP = 8;
const RIGHT = 8;

/** Where the pointer, or the keyboard, is in time: the same in all charts. `null`: nowhere. */
export const cursor = {
  t: null,
  listeners: new Set(),
  set(t) {
    if (t === this.t) return;
    this.t = t;
    for (const listener of this.listeners) listener();
  },
};

/** The style sheet's colours, by name, as they are now. */
export const colours = {};
const NAMES = ['line', 'faint', 'ink', 'read', 'write', 'other', 'p-1', 'p-2', 'p-3', 'p-4',
  'heat-1', 'heat-2', 'heat-3', 'heat-4', 'heat-5'];

/** Look them up: at the start, and when light becomes dark. */
export function refreshColours() {
  const probe = document.createElement('i');
  document.body.append(probe);
  for (const name of NAMES) {
    // The style sheet gives one for light and one for dark: what it comes to is asked of an element.
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

/** A picture on a canvas: `paint(context, area)` draws it whole. */
export class Picture {
  constructor(label, height) {
    this.canvas = document.createElement('canvas');
    this.canvas.className = 'picture';
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute('role', 'img');
    this.canvas.setAttribute('aria-label', label);
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext('2d');
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.canvas);
    this.canvas.addEventListener('pointermove', (event) => this.point(event));
    this.canvas.addEventListener('pointerleave', () => this.leave());
    this.canvas.addEventListener('blur', () => this.leave());
    this.canvas.addEventListener('keydown', (event) => this.key(event));
  }

  /** The part of the canvas in which things are drawn. */
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

/** A picture whose horizontal axis is time. The end of time is the newest sample. */
export class TimePicture extends Picture {
  constructor(label, height, span = SPAN) {
    super(label, height);
    this.span = span;
    this.end = 0;
    this.redraw = () => this.draw();
    cursor.listeners.add(this.redraw);
  }

  destroy() {
    super.destroy();
    cursor.listeners.delete(this.redraw);
  }

  /** As much time as there is something of: a page that was just opened is no empty one. */
  stretch(samples) {
    this.end = samples.at(-1)?.t ?? Date.now();
    const length = this.end - (samples[0]?.t ?? this.end);
    this.span = [60_000, 120_000].find((span) => length <= span) ?? SPAN;
  }

  /** Where a time is. */
  at(t, area) {
    return area.x + area.width * (1 - (this.end - t) / this.span);
  }

  point(event) {
    const area = this.area();
    const x = event.offsetX - area.x;
    cursor.set(x < 0 || x > area.width ? null : this.end - this.span * (1 - x / area.width));
  }

  leave() {
    cursor.set(null);
  }

  key(event) {
    const step = { ArrowLeft: -1000, ArrowRight: 1000, PageUp: -30_000, PageDown: 30_000 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const t = (cursor.t ?? this.end) + step;
    cursor.set(Math.min(Math.max(t, this.end - this.span), this.end));
  }

  /** Lines and names of the horizontal axis. */
  times(context, area, colours) {
    const [wide, narrow] = STEPS.find(([longest]) => this.span <= longest).slice(1);
    const step = area.width > 400 ? wide : narrow;
    context.textBaseline = 'bottom';
    context.fillStyle = colours.faint;
    for (let back = 0; back <= this.span; back += step) {
      const x = this.at(this.end - back, area);
      const text = back === 0 ? 'now' : back % 60_000 ? `−${back / 1000} s` : `−${back / 60_000} min`;
      context.textAlign = back === 0 ? 'right' : x - area.x < 24 ? 'left' : 'center';
      context.fillText(text, x, area.y + area.height + BOTTOM);
    }
  }

  /** The line where the cursor is. */
  mark(context, area, colours) {
    if (cursor.t === null || cursor.t < this.end - this.span || cursor.t > this.end) return;
    const x = Math.round(this.at(cursor.t, area)) + 0.5;
    context.strokeStyle = colours.faint;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, area.y);
    context.lineTo(x, area.y + area.height);
    context.stroke();
  }
}

/** A name of the vertical axis, and its line. */
export function gridline(context, area, y, text, colours) {
  const line = Math.round(y) + 0.5;
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(area.x, line);
  context.lineTo(area.x + area.width, line);
  context.stroke();
  context.fillStyle = colours.faint;
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  context.fillText(text, area.x - 8, line);
}

/** The sample of a moment: the nearest, unless that is far away. */
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
  return near[0] && Math.abs(near[0].t - t) < 3000 ? near[0] : null;
}

/** A picture over time with its title and a read-out that follows the cursor: `read` is the part of whoever it is. */
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

  destroy() {
    this.picture.destroy();
    cursor.listeners.delete(this.moved);
  }
}
