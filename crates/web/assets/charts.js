// Lines over time: requests, bytes, latencies, depth. The legend beside the title is also the read-out: it
// shows the newest values, or those at the cursor.

import { binary, counts, decades } from './axis.js';
import { RangePicture, Read, colours, cursor, gridline, lengthOf, sampleAt } from './canvas.js';
import { el, put } from './dom.js';
import { clock, short } from './format.js';

/** Samples that are further apart than this many of their lengths have a gap between them: no line crosses
 * it. */
const GAP = 3.5;

class Lines extends RangePicture {
  constructor(chart, height) {
    super(chart.title, height);
    this.chart = chart;
  }

  /** The samples within the window, and one on either side, to which lines lead. */
  shown() {
    const { samples } = this.chart;
    let first = samples.findIndex((sample) => sample.t >= this.from);
    if (first < 0) first = samples.length;
    let last = samples.findLastIndex((sample) => sample.t <= this.to);
    first = Math.max(first - 1, 0);
    last = Math.min(last + 1, samples.length - 1);
    return samples.slice(first, last + 1);
  }

  /** From a value to its height, and the values that have lines. */
  scale(area, shown) {
    const { chart } = this;
    const values = shown.flatMap((sample) => chart.series.map((series) => series.of(sample)));
    if (chart.log) {
      const some = values.filter((value) => value > 0);
      const low = 10 ** Math.floor(Math.log10(some.reduce((a, b) => Math.min(a, b), Infinity)));
      const high = 10 ** Math.ceil(Math.log10(some.reduce((a, b) => Math.max(a, b), 0) * 1.0001));
      const [from, to] = some.length > 0 ? [low, Math.max(high, low * 10)] : [1e3, 1e6];
      const y = (value) => area.y + area.height * (1 - Math.log(value / from) / Math.log(to / from));
      return { y: (value) => (value > 0 ? y(value) : area.y + area.height), ticks: decades(from, to, area.height) };
    }
    const most = Math.max(values.reduce((a, b) => Math.max(a, b), 0), chart.least);
    const ticks = (chart.binary ? binary : counts)(most, area.height);
    return { y: (value) => area.y + area.height * (1 - value / ticks.at(-1)), ticks };
  }

  paint(context, area) {
    const { chart } = this;
    const shown = this.shown();
    const { y, ticks } = this.scale(area, shown);
    this.ticks = ticks;
    this.times(context, area);
    for (const value of ticks) gridline(context, area, y(value), short(chart.show(value)));
    context.save();
    context.beginPath();
    context.rect(area.x, area.y - 2, area.width + 2, area.height + 4);
    context.clip();
    context.lineJoin = 'round';
    for (const series of chart.series) this.line(context, area, series, shown, y);
    context.restore();
    this.mark(context, area);
    this.dots(context, area, y);
  }

  line(context, area, series, shown, y) {
    const { log } = this.chart;
    context.strokeStyle = colours[series.colour];
    context.lineWidth = 1.5;
    let run = [];
    const end = () => {
      if (run.length > 0) this.stroke(context, area, run);
      run = [];
    };
    for (const sample of shown) {
      const value = series.of(sample);
      // A sample without requests has no latency.
      if (log && !(value > 0)) {
        end();
        continue;
      }
      const before = run.at(-1);
      if (before && sample.t - before.t > GAP * Math.max(lengthOf(sample), before.length)) end();
      run.push({ t: sample.t, length: lengthOf(sample), x: this.at(sample.t, area), y: y(value) });
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
    if (!sample || sample.t < this.from || sample.t > this.to) return;
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

/** A chart with its title and legend. `series`: `{ name, colour, of(sample) }`, coloured by the style sheet's
 * names. */
export class Chart extends Read {
  constructor({ title, note, series, show, log = false, binary: isBinary = false, least = 0, height = 96 }) {
    super();
    Object.assign(this, { title, series, show, log, binary: isBinary, least });
    this.values = series.map(() => el('b', { class: 'num' }, '–'));
    this.when = el('span', { class: 'when num' });
    const legend = series.map((one, index) =>
      el('span', { class: 'key' }, el('i', { class: `swatch swatch-${one.colour}` }), one.name, ' ', this.values[index]));
    this.picture = new Lines(this, height);
    this.node = el('section', { class: 'card chart', 'aria-label': title },
      el('header', {}, el('h3', {}, title, note && el('span', { class: 'note' }, note)), this.when, el('div', { class: 'legend' }, legend)),
      this.picture.node);
  }

  read() {
    const sample = cursor.t === null ? this.newest() : sampleAt(this.samples, cursor.t);
    const values = this.series.map((series, index) => {
      const text = sample ? this.show(series.of(sample)) : '–';
      put(this.values[index], text);
      return `${series.name} ${text}`;
    });
    put(this.when, cursor.t !== null && sample ? [clock(sample.t), ...this.picture.marksAt()].join(' · ') : '');
    this.picture.canvas.setAttribute('aria-label', `${this.title}: ${values.join(', ')}`);
  }
}

/** A line without axes, for a list. */
export function sparkline(canvas, values, tones) {
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
    context.strokeStyle = tones[number];
    context.lineWidth = 1.25;
    context.stroke();
  });
}
