// One device in four views: activity, addresses of requests, stack, details.

import { direct, resize, resume, suspend } from './actions.js';
import { marks } from './canvas.js';
import { Chart } from './charts.js';
import { attribute, el, put, segments } from './dom.js';
import { Facts } from './facts.js';
import { bytes, count, percent, rate, size, time } from './format.js';
import { Heat } from './heat.js';
import { fetched } from './live.js';
import { SPANS, range } from './range.js';
import { Addresses } from './scatter.js';
import { Stack } from './stack.js';

/** Samples are kept for an hour. */
const KEPT = SPANS.at(-1)[0];
/** Seconds between two samples of the hour that the server keeps. */
const STEP = 10;
export const TABS = [['activity', 'Activity'], ['addresses', 'Addresses'], ['stack', 'Stack'], ['details', 'Details']];
const PERCENTILES = ['p50', 'p90', 'p99', 'p99.9'];

/** The latency of one kind of request. */
const latency = (title, kind) => new Chart({
  title, show: time, log: true,
  series: PERCENTILES.map((name, index) => ({ name, colour: `p-${index + 1}`, of: (sample) => sample[kind].p[index] })),
});

function charts() {
  return [
    new Chart({
      title: 'Requests', note: 'per second', show: count, least: 10,
      series: [
        { name: 'reads', colour: 'read', of: (s) => s.read.ios },
        { name: 'writes', colour: 'write', of: (s) => s.write.ios },
        { name: 'others', colour: 'other', of: (s) => s.other.ios },
      ],
    }),
    new Chart({
      title: 'Throughput', show: rate, binary: true, least: 4096,
      series: [
        { name: 'read', colour: 'read', of: (s) => s.read.bytes },
        { name: 'written', colour: 'write', of: (s) => s.write.bytes },
      ],
    }),
    new Chart({
      title: 'Requests in flight', note: 'average', show: (value) => count(Math.round(value * 10) / 10), least: 1,
      series: [{ name: 'in flight', colour: 'read', of: (s) => s.depth }],
    }),
    latency('Read latency', 'read'),
    latency('Write latency', 'write'),
  ];
}

/** A sample of the hour: its heat map, as those of seconds, in requests a second. */
const stepped = (sample) => ({ ...sample, step: STEP * 1000, heat: sample.heat.map(([row, number]) => [row, number / STEP]) });

const tile = (name) => {
  const value = el('b', { class: 'num' }, '–');
  const note = el('span', { class: 'faint num' });
  return { value, note, node: el('div', { class: 'tile' }, el('span', { class: 'tile-name' }, name), value, note) };
};

export class Device {
  /** `watch(addresses)` makes the stream send details of this device, and the addresses of its requests if
   * `addresses` is set. `address(tab)` puts the tab into the page's address. */
  constructor(name, tab, mayAct, watch, address) {
    Object.assign(this, { name, tab, mayAct, watch, address, samples: [] });
    marks.all = [];
    this.tiles = ['Requests', 'Throughput', 'Latency, p99', 'In flight', 'Busy', 'Failed'].map(tile);
    this.subtitle = el('p', { class: 'subtitle' });
    this.chips = el('span', { class: 'chips' });
    this.acts = el('div', { class: 'acts', role: 'group', 'aria-label': 'Actions' });
    this.charts = charts();
    this.heat = new Heat();
    this.addresses = new Addresses();
    this.stack = new Stack(name, mayAct);
    this.facts = new Facts();
    this.panels = {
      activity: el('div', { class: 'panel grid' }, this.charts.map((chart) => chart.node), this.heat.node),
      addresses: el('div', { class: 'panel' }, this.addresses.node),
      stack: el('div', { class: 'panel' }, this.stack.node),
      details: el('div', { class: 'panel' }, this.facts.node),
    };
    this.gone = el('div', { class: 'empty', hidden: true }, el('h2', {}, `There is no device ${name}`),
      el('p', {}, 'It may have been removed. ', el('a', { href: '#/' }, 'All devices')));
    this.body = el('div', { class: 'device-body' }, el('div', { class: 'tiles' }, this.tiles.map((one) => one.node)),
      el('div', { class: 'tabs' }, this.tabs(), this.window()),
      TABS.map(([id, title]) => {
        Object.assign(this.panels[id], { id: `panel-${id}`, hidden: id !== this.tab });
        attribute(this.panels[id], 'role', 'tabpanel');
        attribute(this.panels[id], 'aria-label', title);
        return this.panels[id];
      }));
    this.node = el('div', { class: 'device-view' },
      el('div', { class: 'title' }, el('div', {}, el('h1', {}, name, this.chips), this.subtitle), this.acts), this.body, this.gone);
    this.ranged = () => {
      this.showWindow();
      this.draw();
    };
    range.listeners.add(this.ranged);
    this.showWindow();
    this.remember();
  }

  tabs() {
    this.buttons = TABS.map(([id, title]) => el('button', {
      type: 'button', role: 'tab', class: 'tab', id: `tab-${id}`, 'aria-controls': `panel-${id}`, onclick: () => this.show(id),
    }, title));
    const list = el('div', { class: 'tab-list', role: 'tablist', 'aria-label': 'Views of the device' }, this.buttons);
    list.addEventListener('keydown', (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const at = TABS.findIndex(([id]) => id === this.tab);
      this.show(TABS[(at + step + TABS.length) % TABS.length][0], true);
    });
    this.mark();
    return list;
  }

  /** The choice of the window of time. */
  window() {
    this.spans = segments('Time shown', SPANS, (span) => range.follow(span));
    this.pause = el('button', { type: 'button', class: 'toggle', id: 'pause', title: 'Pause or go on (p)', onclick: () => this.pauseOrFollow() });
    this.fixed = el('span', { class: 'when num', id: 'window' });
    this.windowed = el('div', { class: 'window' }, this.fixed, this.pause, this.spans.node);
    return this.windowed;
  }

  showWindow() {
    this.windowed.hidden = this.tab === 'stack' || this.tab === 'details';
    this.spans.node.hidden = this.tab !== 'activity';
    this.spans.choose(range.isFixed ? null : range.span);
    put(this.pause, range.isFixed ? 'Go on' : 'Pause');
    attribute(this.pause, 'aria-pressed', range.isFixed);
    const at = (t) => new Date(t).toLocaleTimeString([], { hour12: false });
    put(this.fixed, range.isFixed ? `${at(range.from)} – ${at(range.to)}` : '');
  }

  pauseOrFollow() {
    if (range.isFixed) range.follow();
    else range.zoom(...range.over(this.samples));
  }

  mark() {
    this.buttons.forEach((button, index) => {
      const selected = TABS[index][0] === this.tab;
      attribute(button, 'aria-selected', selected);
      button.tabIndex = selected ? 0 : -1;
    });
  }

  /** Shows another view and puts it into the address; 1 to 4 name them, too. */
  show(tab, focus = false) {
    const id = typeof tab === 'number' ? TABS[tab]?.[0] : tab;
    if (!id || id === this.tab) return;
    this.select(id);
    this.address(id);
    if (focus) this.buttons[TABS.findIndex(([name]) => name === id)].focus();
  }

  /** Shows the view that the address names. */
  select(id) {
    const was = this.tab;
    this.tab = id;
    for (const [name] of TABS) this.panels[name].hidden = name !== id;
    this.mark();
    this.showWindow();
    if ((was === 'addresses') !== (id === 'addresses')) this.watch(id === 'addresses');
    this.draw();
  }

  /** Fetches the server's history: at the start, and after a time without events. */
  async remember() {
    try {
      const [seconds, steps] = await Promise.all(['', '&span=hour'].map((span) => fetched(`/history?device=${this.name}${span}`)));
      const [first, last] = [seconds[0]?.t ?? Infinity, seconds.at(-1)?.t ?? 0];
      // Samples of seconds that the page received itself stay; those of steps fill the time before.
      const seen = this.samples.filter((sample) => !sample.step && sample.t < first);
      const before = steps.filter(({ t }) => t < Math.min(first, seen[0]?.t ?? first)).map(stepped);
      this.samples = [...before, ...seen, ...seconds, ...this.samples.filter((sample) => sample.t > last && sample.t > first)];
      this.draw();
    } catch {
      // Samples that arrive from now on are shown nevertheless.
    }
  }

  /** Updates from the list of all devices: this one may have been removed. */
  tick({ devices }) {
    const exists = devices.some((device) => device.name === this.name);
    this.gone.hidden = exists;
    this.body.hidden = !exists;
    this.acts.hidden = !exists;
  }

  device(details) {
    if (details.name !== this.name) return;
    const { sample, info, errors } = details;
    if (sample && sample.t > (this.samples.at(-1)?.t ?? 0)) this.samples.push(sample);
    const oldest = this.samples.findIndex(({ t }) => t > sample.t - KEPT);
    if (oldest > 0) this.samples.splice(0, oldest);
    this.details = details;
    this.addresses.size = info.size;
    marks.all = details.marks;
    this.head(details);
    this.fill(sample, errors);
    // A window that is paused or zoomed does not change.
    if (!range.isFixed || this.tab !== 'activity') this.draw();
  }

  head({ info, paths }) {
    put(this.subtitle, [...info.layers.slice().reverse(), info.stack].join('  ›  '));
    this.subtitle.title = this.subtitle.textContent;
    const suspended = 'suspended' in info.backend;
    const chips = [['chip', size(info.size)]];
    if (info.read_only) chips.push(['chip', 'read only']);
    if (suspended) chips.push(['chip warn', 'suspended']);
    if (paths.length > 0) {
      const works = paths.filter((path) => path.works).length;
      chips.push([works < paths.length ? 'chip bad' : 'chip good', `${works} of ${paths.length} paths`]);
    }
    const isDirect = info.backend.direct === 'on' || info.backend.direct?.startsWith('on');
    const state = JSON.stringify([chips, isDirect, 'direct' in info.backend]);
    if (state === this.state) return;
    this.state = state;
    this.chips.replaceChildren(...chips.map(([name, text]) => el('span', { class: name }, text)));
    if (!this.mayAct) return;
    const button = (text, act) => el('button', { type: 'button', class: 'button', onclick: act }, text);
    const acts = [
      suspended ? button('Resume', () => resume(this.name)) : button('Suspend', () => suspend(this.name)),
      button('Resize …', () => resize(this.name, info.size.toLocaleString('en'))),
    ];
    if ('direct' in info.backend) acts.push(button(`Direct I/O ${isDirect ? 'off' : 'on'}`, () => direct(this.name, !isDirect)));
    this.acts.replaceChildren(...acts);
  }

  fill(sample, errors) {
    if (!sample) return;
    const { read, write, other, p } = sample;
    const values = [
      [count(read.ios + write.ios + other.ios), `${count(read.ios)} r · ${count(write.ios)} w`],
      [rate(read.bytes + write.bytes), `${bytes(read.bytes)} r · ${bytes(write.bytes)} w`],
      [time(p[2]), `${time(read.p[2])} r · ${time(write.p[2])} w`],
      [count(sample.now), `${count(Math.round(sample.depth * 10) / 10)} on average`],
      [percent(sample.busy), 'of the last second'],
      [count(errors), sample.errors > 0 ? `${count(sample.errors)} a second` : 'since it was added'],
    ];
    values.forEach(([value, note], index) => {
      put(this.tiles[index].value, value);
      put(this.tiles[index].note, note);
    });
    this.tiles[5].node.classList.toggle('bad', errors > 0);
  }

  scatter(update) {
    if (update.name === this.name) this.addresses.update(update);
  }

  draw() {
    if (this.tab === 'activity') {
      for (const chart of this.charts) chart.update(this.samples);
      this.heat.update(this.samples);
    }
    if (this.tab === 'addresses') this.addresses.picture.draw();
    if (!this.details) return;
    if (this.tab === 'stack') this.stack.update(this.details);
    if (this.tab === 'details') this.facts.update(this.details);
  }

  destroy() {
    range.listeners.delete(this.ranged);
    range.selection = null;
    for (const one of [...this.charts, this.heat, this.addresses]) one.destroy();
  }
}
