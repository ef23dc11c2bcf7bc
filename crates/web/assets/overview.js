// All devices: one row each, with what it does now and did in the last minute and a half.

import { sparkline } from './charts.js';
import { colours } from './canvas.js';
import { attribute, el, put } from './dom.js';
import { bytes, count, percent, size, time } from './format.js';
import { fetched } from './live.js';

/** Seconds in a row's line. */
const KEPT = 90;
/** Of so many devices the past is asked for when the page is opened. */
const PASTS = 24;

const cell = (name, label) => el('span', { class: `cell num ${name}`, role: 'cell', data: { label } });

class Row {
  constructor(device) {
    this.name = device.name;
    this.past = [];
    this.line = el('canvas', { class: 'spark', 'aria-hidden': 'true' });
    this.cells = {
      read: cell('read', 'read'), write: cell('write', 'write'), bytes: cell('bytes', 'throughput'),
      p99: cell('p99', 'p99'), depth: cell('depth', 'in flight'), busy: cell('busy', 'busy'),
    };
    this.what = el('span', { class: 'what' });
    this.chips = el('span', { class: 'chips' });
    this.link = el('a', { class: 'name', href: `#/${device.name}` }, device.name);
    this.node = el('div', { class: 'row', role: 'row' },
      el('span', { class: 'cell device', role: 'cell' }, this.link, this.chips, this.what),
      el('span', { class: 'cell spark-cell', role: 'cell' }, this.line),
      Object.values(this.cells));
    // The whole row is as good as its link.
    this.node.addEventListener('click', (event) => {
      if (!event.target.closest('a') && !String(getSelection())) this.link.click();
    });
  }

  async remember() {
    const samples = await fetched(`/history?device=${this.name}`).catch(() => []);
    this.past = samples.slice(-KEPT).map((one) => [one.read.ios, one.write.ios]);
  }

  update(device) {
    this.past = [...this.past.slice(1 - KEPT), [device.read.ios, device.write.ios]];
    put(this.what, [...device.layers.slice().reverse(), device.stack].join('  ›  '));
    this.what.title = this.what.textContent;
    put(this.cells.read, count(device.read.ios));
    put(this.cells.write, count(device.write.ios));
    put(this.cells.bytes, `${bytes(device.read.bytes + device.write.bytes)}/s`);
    put(this.cells.p99, time(device.p99));
    put(this.cells.depth, count(device.now));
    put(this.cells.busy, percent(device.busy));
    const chips = [['chip', size(device.size)]];
    if (device.ro) chips.push(['chip', 'read only']);
    if (device.suspended) chips.push(['chip warn', 'suspended']);
    if (device.paths) chips.push([lacks(device.paths) ? 'chip bad' : 'chip good', device.paths.replace(' work', '')]);
    if (device.errors > 0) chips.push(['chip bad', `${count(device.errors)} failed`]);
    const text = JSON.stringify(chips);
    if (this.chips.dataset.text !== text) {
      this.chips.dataset.text = text;
      this.chips.replaceChildren(...chips.map(([name, word]) => el('span', { class: name }, word)));
    }
    this.draw();
  }

  draw() {
    sparkline(this.line, [this.past.map((one) => one[0]), this.past.map((one) => one[1])], [colours.read, colours.write]);
  }
}

/** "2 of 3 paths work": one is missing. */
function lacks(paths) {
  const numbers = paths.match(/(\d+) of (\d+)/);
  return numbers !== null && numbers[1] !== numbers[2];
}

export class Overview {
  constructor() {
    this.rows = new Map();
    this.list = el('div', { class: 'rows', role: 'rowgroup' });
    this.sum = el('p', { class: 'sum num' });
    const heads = ['Device', 'IOPS, 90 s', 'Reads/s', 'Writes/s', 'Throughput', 'p99', 'In flight', 'Busy'];
    this.table = el('div', { class: 'devices card', role: 'table', 'aria-label': 'Devices' },
      el('div', { class: 'row heads', role: 'row' }, heads.map((head) => el('span', { class: 'cell', role: 'columnheader' }, head))),
      this.list);
    this.empty = el('div', { class: 'empty', hidden: true }, el('h2', {}, 'No devices'), el('p', {}, 'This process serves none at the moment. A device that it is given shows here by itself.'));
    this.node = el('div', { class: 'overview' }, el('div', { class: 'title' }, el('h1', {}, 'Devices'), this.sum), this.table, this.empty);
    this.node.addEventListener('keydown', (event) => this.key(event));
  }

  tick({ devices }) {
    for (const device of devices) {
      let row = this.rows.get(device.name);
      if (!row) {
        row = new Row(device);
        this.rows.set(device.name, row);
        this.list.append(row.node);
        if (this.rows.size <= PASTS) row.remember();
      }
      row.update(device);
    }
    for (const [name, row] of this.rows) {
      if (devices.some((device) => device.name === name)) continue;
      row.node.remove();
      this.rows.delete(name);
    }
    this.table.hidden = devices.length === 0;
    this.empty.hidden = devices.length > 0;
    const total = devices.reduce((sum, one) => sum + one.read.ios + one.write.ios, 0);
    const moved = devices.reduce((sum, one) => sum + one.read.bytes + one.write.bytes, 0);
    put(this.sum, `${devices.length} ${devices.length === 1 ? 'device' : 'devices'} · ${count(total)} IOPS · ${bytes(moved)}/s`);
    attribute(this.table, 'aria-rowcount', devices.length + 1);
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (step) this.step(step, event);
  }

  /** Put the focus on another device. */
  step(step, event) {
    const links = [...this.list.querySelectorAll('a.name')];
    const at = links.indexOf(document.activeElement);
    const next = at < 0 ? (step > 0 ? 0 : links.length - 1) : Math.min(Math.max(at + step, 0), links.length - 1);
    links[next]?.focus();
    event.preventDefault();
  }

  /** After a while in which nothing came. */
  remember() {
    for (const row of [...this.rows.values()].slice(0, PASTS)) row.remember();
  }

  draw() {
    for (const row of this.rows.values()) row.draw();
  }

  destroy() {}
}
