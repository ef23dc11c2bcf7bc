// All devices: one row each, with the device's activity now and in the last minute and a half; sorted by a
// column, filtered by a text.

import { sparkline } from './charts.js';
import { colours } from './canvas.js';
import { attribute, el, put } from './dom.js';
import { bytes, count, percent, size, time } from './format.js';
import { fetched } from './live.js';

/** Seconds in a row's line. */
const KEPT = 90;
/** Largest number of devices whose history is fetched when the page is opened. */
const PASTS = 24;
/** Columns: their heads, and by what a click on one sorts; all but names begin with the largest. */
const COLUMNS = [
  ['Device', (one) => one.name],
  ['IOPS, 90 s', (one) => one.read.ios + one.write.ios],
  ['Reads/s', (one) => one.read.ios],
  ['Writes/s', (one) => one.write.ios],
  ['Throughput', (one) => one.read.bytes + one.write.bytes],
  ['p99', (one) => one.p99],
  ['In flight', (one) => one.now],
  ['Busy', (one) => one.busy],
];
/** The order and the filter, which are kept when the user returns from a device. */
const chosen = { column: 0, reversed: false, text: '' };

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
    // A click anywhere in the row follows its link.
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
    /** The text that the filter searches. */
    this.text = `${device.name} ${this.what.textContent} ${chips.map(([, word]) => word).join(' ')}`.toLowerCase();
    this.draw();
  }

  draw() {
    sparkline(this.line, [this.past.map((one) => one[0]), this.past.map((one) => one[1])], [colours.read, colours.write]);
  }
}

/** Whether a summary such as "2 of 3 paths work" says that a path does not work. */
function lacks(paths) {
  const numbers = paths.match(/(\d+) of (\d+)/);
  return numbers !== null && numbers[1] !== numbers[2];
}

/** Compares two devices in the chosen order; equal ones are sorted by name. */
function compare(a, b) {
  const [, by] = COLUMNS[chosen.column];
  const names = a.name.localeCompare(b.name, 'en', { numeric: true });
  const order = chosen.column === 0 ? names : by(b) - by(a);
  return (chosen.reversed ? -order : order) || names;
}

export class Overview {
  constructor() {
    this.rows = new Map();
    this.devices = [];
    this.list = el('div', { class: 'rows', role: 'rowgroup' });
    this.sum = el('p', { class: 'sum num' });
    this.filter = el('input', {
      type: 'search', class: 'filter', id: 'filter', placeholder: 'Filter (/)', 'aria-label': 'Filter devices by name, stack or state',
      autocomplete: 'off', spellcheck: false, value: chosen.text, oninput: () => this.filtered(),
    });
    this.filter.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape' && event.key !== 'Enter') return;
      if (event.key === 'Escape') this.filter.value = '';
      this.filtered();
      this.filter.blur();
      event.preventDefault();
      event.stopPropagation();
    });
    this.heads = COLUMNS.map(([name], column) => el('span', { class: 'cell', role: 'columnheader' },
      el('button', { type: 'button', class: 'sort', onclick: () => this.sortBy(column) }, name)));
    this.table = el('div', { class: 'devices card', role: 'table', 'aria-label': 'Devices' },
      el('div', { class: 'row heads', role: 'row' }, this.heads), this.list);
    this.empty = el('div', { class: 'empty', hidden: true }, el('h2', {}, 'No devices'), el('p', {}, 'This process serves none at the moment. A device that is added appears here.'));
    this.none = el('p', { class: 'empty', hidden: true }, 'No device matches the filter.');
    this.node = el('div', { class: 'overview' },
      el('div', { class: 'title' }, el('h1', {}, 'Devices'), this.filter, this.sum), this.table, this.none, this.empty);
    this.node.addEventListener('keydown', (event) => this.key(event));
    this.showOrder();
  }

  tick({ devices }) {
    this.devices = devices;
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
    this.arrange();
    const total = devices.reduce((sum, one) => sum + one.read.ios + one.write.ios, 0);
    const moved = devices.reduce((sum, one) => sum + one.read.bytes + one.write.bytes, 0);
    put(this.sum, `${devices.length} ${devices.length === 1 ? 'device' : 'devices'} · ${count(total)} IOPS · ${bytes(moved)}/s`);
  }

  /** Puts the rows into their order and hides those that do not match the filter. */
  arrange() {
    const words = chosen.text.toLowerCase().split(/\s+/).filter(Boolean);
    const focused = document.activeElement;
    let shown = 0;
    const ordered = this.devices.toSorted(compare).map((device) => this.rows.get(device.name));
    ordered.forEach((row, index) => {
      row.node.hidden = !words.every((word) => row.text.includes(word));
      shown += row.node.hidden ? 0 : 1;
      // Only rows in the wrong place are moved, because a node that is moved loses the focus.
      if (this.list.children[index] !== row.node) this.list.insertBefore(row.node, this.list.children[index]);
    });
    if (focused !== document.activeElement && this.list.contains(focused)) focused.focus({ preventScroll: true });
    this.table.hidden = this.devices.length === 0;
    this.none.hidden = shown > 0 || this.devices.length === 0;
    this.empty.hidden = this.devices.length > 0;
    attribute(this.table, 'aria-rowcount', shown + 1);
  }

  filtered() {
    chosen.text = this.filter.value;
    this.arrange();
    this.draw();
  }

  /** Sorts by a column, or reverses the order if that column is the current one. */
  sortBy(column) {
    chosen.reversed = chosen.column === column && !chosen.reversed;
    chosen.column = column;
    this.showOrder();
    this.arrange();
  }

  showOrder() {
    this.heads.forEach((head, column) => {
      const isUp = (column === 0) !== chosen.reversed;
      attribute(head, 'aria-sort', column !== chosen.column ? null : isUp ? 'ascending' : 'descending');
    });
  }

  key(event) {
    if (event.target === this.filter) return;
    const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (step) this.step(step, event);
  }

  /** Puts the focus on another device. */
  step(step, event) {
    const links = [...this.list.querySelectorAll('.row:not([hidden]) a.name')];
    const at = links.indexOf(document.activeElement);
    const next = at < 0 ? (step > 0 ? 0 : links.length - 1) : Math.min(Math.max(at + step, 0), links.length - 1);
    links[next]?.focus();
    event.preventDefault();
  }

  /** Fetches the history again, after a time without events. */
  remember() {
    for (const row of [...this.rows.values()].slice(0, PASTS)) row.remember();
  }

  draw() {
    for (const row of this.rows.values()) row.draw();
  }

  destroy() {}
}
