// One device: what it does, where its requests go, how it is built, and what is known about it.

import { direct, resize, resume, suspend } from './actions.js';
import { Chart } from './charts.js';
import { attribute, el, put } from './dom.js';
import { Facts } from './facts.js';
import { bytes, count, percent, rate, size, time } from './format.js';
import { Heat } from './heat.js';
import { fetched } from './live.js';
import { Addresses } from './scatter.js';
import { Stack } from './stack.js';

/** Five minutes. */
const KEPT = 300;
const TABS = [['activity', 'Activity'], ['addresses', 'Addresses'], ['stack', 'Stack'], ['details', 'Details']];

const percentile = (index) => (sample) => sample.p[index];

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
      title: 'Latency', note: 'percentiles', show: time, log: true,
      series: ['50', '90', '99', '99.9'].map((name, index) => ({ name, colour: `p-${index + 1}`, of: percentile(index) })),
    }),
    new Chart({
      title: 'Requests in flight', note: 'average of each second', show: (value) => count(Math.round(value * 10) / 10), least: 1,
      series: [{ name: 'in flight', colour: 'read', of: (s) => s.depth }],
    }),
  ];
}

const tile = (name) => {
  const value = el('b', { class: 'num' }, '–');
  const note = el('span', { class: 'faint num' });
  return { value, note, node: el('div', { class: 'tile' }, el('span', { class: 'tile-name' }, name), value, note) };
};

export class Device {
  /** `watch(addresses)`: have the stream tell of this device, and of where its requests go or not. */
  constructor(name, mayAct, watch) {
    Object.assign(this, { name, mayAct, watch, samples: [], tab: 'activity' });
    this.tiles = ['Requests', 'Throughput', 'Latency', 'In flight', 'Busy', 'Failed'].map(tile);
    this.subtitle = el('p', { class: 'subtitle' });
    this.chips = el('span', { class: 'chips' });
    this.acts = el('div', { class: 'acts', role: 'group', 'aria-label': 'Actions' });
    this.charts = charts();
    this.heat = new Heat();
    this.addresses = new Addresses();
    this.stack = new Stack(name, mayAct);
    this.facts = new Facts();
    this.panels = {
      activity: el('div', { class: 'grid' }, this.charts.map((chart) => chart.node), this.heat.node),
      addresses: el('div', {}, this.addresses.node),
      stack: el('div', {}, this.stack.node),
      details: el('div', {}, this.facts.node),
    };
    this.gone = el('div', { class: 'empty', hidden: true }, el('h2', {}, `There is no device ${name}`),
      el('p', {}, 'It may have been removed. ', el('a', { href: '#/' }, 'All devices')));
    this.body = el('div', {}, el('div', { class: 'tiles' }, this.tiles.map((one) => one.node)), this.tabs(),
      TABS.map(([id, title]) => {
        Object.assign(this.panels[id], { id: `panel-${id}`, hidden: id !== this.tab });
        attribute(this.panels[id], 'role', 'tabpanel');
        attribute(this.panels[id], 'aria-label', title);
        return this.panels[id];
      }));
    this.node = el('div', { class: 'device-view' },
      el('div', { class: 'title' }, el('div', {}, el('h1', {}, name, this.chips), this.subtitle), this.acts), this.body, this.gone);
    this.remember();
  }

  tabs() {
    this.buttons = TABS.map(([id, title]) => el('button', {
      type: 'button', role: 'tab', class: 'tab', id: `tab-${id}`, 'aria-controls': `panel-${id}`, onclick: () => this.show(id),
    }, title));
    const list = el('div', { class: 'tabs', role: 'tablist', 'aria-label': 'Views of the device' }, this.buttons);
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

  mark() {
    this.buttons.forEach((button, index) => {
      const selected = TABS[index][0] === this.tab;
      attribute(button, 'aria-selected', selected);
      button.tabIndex = selected ? 0 : -1;
    });
  }

  /** Another view; 1 to 4 name them, too. */
  show(tab, focus = false) {
    const id = typeof tab === 'number' ? TABS[tab]?.[0] : tab;
    if (!id) return;
    const was = this.tab;
    this.tab = id;
    for (const [name] of TABS) this.panels[name].hidden = name !== id;
    this.mark();
    if (focus) this.buttons[TABS.findIndex(([name]) => name === id)].focus();
    if ((was === 'addresses') !== (id === 'addresses')) this.watch(id === 'addresses');
    this.draw();
  }

  /** What the server has kept: at the start, and after a while in which nothing came. */
  async remember() {
    try {
      const past = await fetched(`/history?device=${this.name}`);
      const last = past.at(-1)?.t ?? 0;
      this.samples = [...past, ...this.samples.filter((sample) => sample.t > last)].slice(-KEPT);
      this.draw();
    } catch {
      // What comes from now on is shown nevertheless.
    }
  }

  /** All devices, in short: is this one still there? */
  tick({ devices }) {
    const there = devices.some((device) => device.name === this.name);
    this.gone.hidden = there;
    this.body.hidden = !there;
    this.acts.hidden = !there;
  }

  device(details) {
    if (details.name !== this.name) return;
    const { sample, info, errors } = details;
    if (sample && sample.t !== this.samples.at(-1)?.t) this.samples = [...this.samples.slice(1 - KEPT), sample];
    this.details = details;
    this.addresses.size = info.size;
    this.head(info);
    this.fill(sample, errors);
    this.draw();
  }

  head(info) {
    put(this.subtitle, [...info.layers.slice().reverse(), info.stack].join('  ›  '));
    this.subtitle.title = this.subtitle.textContent;
    const suspended = 'suspended' in info.backend;
    const chips = [['chip', size(info.size)]];
    if (info.read_only) chips.push(['chip', 'read only']);
    if (suspended) chips.push(['chip warn', 'suspended']);
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
    const told = [
      [count(read.ios + write.ios + other.ios), `${count(read.ios)} r · ${count(write.ios)} w`],
      [rate(read.bytes + write.bytes), `${bytes(read.bytes)} r · ${bytes(write.bytes)} w`],
      [time(p[2]), `p99 · half below ${time(p[0])}`],
      [count(sample.now), `${count(Math.round(sample.depth * 10) / 10)} on average`],
      [percent(sample.busy), 'of the last second'],
      [count(errors), sample.errors > 0 ? `${count(sample.errors)} a second` : 'since it was added'],
    ];
    told.forEach(([value, note], index) => {
      put(this.tiles[index].value, value);
      put(this.tiles[index].note, note);
    });
    this.tiles[5].node.classList.toggle('bad', errors > 0);
  }

  scatter(told) {
    if (told.name === this.name) this.addresses.update(told);
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
    for (const one of [...this.charts, this.heat, this.addresses]) one.destroy();
  }
}
