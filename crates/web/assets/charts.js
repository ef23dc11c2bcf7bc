// Lines over time: requests, bytes, latencies, depth. The legend beside the title is also the read-out: it shows the
// newest values, or those where the cursor is.

import { Read, TimePicture, colours, cursor, gridline, sampleAt } from './canvas.js';
import { el, put } from './dom.js';
import { clock, short } from './format.js';

/** A gap of more than so many milliseconds is one: nothing is drawn across it. */
const GAP = 3500;

/** The next number of 1, 2, 5, 10, … that is not smaller. */
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

/** The same for bytes: the next power of two, or one and a half of it. */
function niceBytes(value) {
  if (!(value > 0)) return 1024;
  const power = 2 ** Math.floor(Math.log2(value));
  return [1, 1.5, 2].map((step) => step * power).find((step) => step >= value * 0.9999);
}

class Lines extends TimePicture {
  constructor(chart, height) {
    super(chart.title, height);
    this.chart = chart;
  }

  /** From a value to its height, and which values have lines. */
  scale(area) {
    const { chart } = this;
    const values = chart.samples.filter((s) => s.t >= this.end - this.span).flatMap((s) => chart.series.map((x) => x.of(s)));
    if (chart.log) {
      const some = values.filter((value) => value > 0);
      const low = Math.floor(Math.log10(some.reduce((a, b) => Math.min(a, b), Infinity)));
      const high = Math.ceil(Math.log10(some.reduce((a, b) => Math.max(a, b), 0) * 1.0001));
      const [from, to] = some.length ? [low, Math.max(high, low + 1)] : [3, 6];
      const lines = [];
      for (let power = from; power <= to; power += 1) lines.push(10 ** power);
      const y = (value) => area.y + area.height * (1 - (Math.log10(value) - from) / (to - from));
      return { y: (value) => (value > 0 ? y(value) : area.y + area.height), lines };
    }
    const most = values.reduce((a, b) => Math.max(a, b), 0);
    const top = Math.max(chart.binary ? niceBytes(most) : nice(most), chart.least ?? 0);
    const lines = [0, 0.5, 1].map((part) => part * top);
    return { y: (value) => area.y + area.height * (1 - value / top), lines };
  }

  paint(context, area) {
    const { chart } = this;
    const { y, lines } = this.scale(area);
    for (const value of lines) gridline(context, area, y(value), short(chart.show(value)), colours);
    this.times(context, area, colours);
    context.save();
    context.beginPath();
    context.rect(area.x, area.y - 2, area.width + 2, area.height + 4);
    context.clip();
    context.lineJoin = 'round';
    for (const series of chart.series) this.line(context, area, series, y);
    context.restore();
    this.mark(context, area, colours);
    this.dots(context, area, y);
  }

  line(context, area, series, y) {
    const { samples, log } = this.chart;
    context.strokeStyle = colours[series.colour];
    context.lineWidth = 1.5;
    let run = [];
    const end = () => {
      if (run.length > 0) this.stroke(context, area, run);
      run = [];
    };
    for (const sample of samples) {
      if (sample.t < this.end - this.span - 2000) continue;
      const value = series.of(sample);
      // Without requests there is no latency.
      if (log && !(value > 0)) {
        end();
        continue;
      }
      if (run.length > 0 && sample.t - run[run.length - 1].t > GAP) end();
      run.push({ t: sample.t, x: this.at(sample.t, area), y: y(value) });
    }
    end();
  }

  stroke(context, area, run) {
    context.beginPath();
    if (run.length === 1) context.arc(run[0].x, run[0].y, 1.2, 0, 7);
    run.forEach((point, index) => (index ? context.lineTo(point.x, point.y) : context.moveTo(point.x, point.y)));
    context.stroke();
    if (!this.chart.log) {
      context.lineTo(run[run.length - 1].x, area.y + area.height);
      context.lineTo(run[0].x, area.y + area.height);
      context.closePath();
      context.globalAlpha = 0.09;
      context.fillStyle = context.strokeStyle;
      context.fill();
      context.globalAlpha = 1;
    }
  }

  dots(context, area, y) {
    const sample = cursor.t === null ? null : sampleAt(this.chart.samples, cursor.t);
    if (!sample) return;
    for (const series of this.chart.series) {
      const value = series.of(sample);
      if (this.chart.log && !(value > 0)) continue;
      context.fillStyle = colours[series.colour];
      context.beginPath();
      context.arc(this.at(sample.t, area), y(value), 3, 0, 7);
      context.fill();
    }
  }
}

/** A chart with its title and legend. `series`: `{ name, colour, of(sample) }`, coloured by the style sheet's names. */
export class Chart extends Read {
  constructor({ title, note, series, show, log = false, binary = false, least = 0, height = 112 }) {
    super();
    Object.assign(this, { title, series, show, log, binary, least });
    this.values = series.map(() => el('b', { class: 'num' }, '–'));
    this.when = el('span', { class: 'when num' });
    const legend = series.map((one, index) =>
      el('span', { class: 'key' }, el('i', { class: `swatch swatch-${one.colour}` }), one.name, ' ', this.values[index]));
    this.picture = new Lines(this, height);
    this.node = el('section', { class: 'card chart', 'aria-label': title },
      el('header', {}, el('h3', {}, title, note && el('span', { class: 'note' }, note)), this.when, el('div', { class: 'legend' }, legend)),
      this.picture.canvas);
  }

  read() {
    const sample = cursor.t === null ? this.samples.at(-1) : sampleAt(this.samples, cursor.t);
    const told = this.series.map((series, index) => {
      const text = sample ? this.show(series.of(sample)) : '–';
      put(this.values[index], text);
      return `${series.name} ${text}`;
    });
    put(this.when, cursor.t !== null && sample ? clock(sample.t) : '');
    this.picture.canvas.setAttribute('aria-label', `${this.title}: ${told.join(', ')}`);
  }
}

/** A line without axes, for a list. */
export function sparkline(canvas, values, colours) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width) return;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext('2d');
  context.scale(scale, scale);
  const top = Math.max(...values.flat(), 1);
  const count = values[0]?.length ?? 0;
  values.forEach((series, number) => {
    context.beginPath();
    series.forEach((value, index) => {
      const x = width - ((count - 1 - index) * width) / 89;
      const y = height - 1.5 - (value / top) * (height - 3);
      if (index) context.lineTo(x, y);
      else context.moveTo(x, y);
    });
    context.strokeStyle = colours[number];
    context.lineWidth = 1.25;
    context.stroke();
  });
}
