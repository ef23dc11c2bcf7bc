// What is known about a device and does not move: exports, limits, queues, what its backend says of itself.

import { el } from './dom.js';
import { age, count, size } from './format.js';

/** Limits of which every value is a number of sectors, or of bytes, are shown as sizes, too. */
const NONE = 4294967295;

function limit(name, value) {
  if (value === NONE || value === 65535) return [String(value), 'no limit'];
  if (name.endsWith('_sectors') && value > 0) return [String(value), size(value * 512)];
  const isBytes = name.endsWith('block_size') || name.startsWith('io_') || name.endsWith('segment_size') || name.endsWith('granularity');
  return [String(value), isBytes && value >= 1024 ? size(value) : ''];
}

const row = (name, value, note = '') =>
  el('div', { class: 'fact' }, el('dt', {}, name), el('dd', { class: 'num' }, value, note && el('span', { class: 'faint' }, ` ${note}`)));

const card = (title, rows, note) =>
  el('section', { class: 'card', 'aria-label': title }, el('header', {}, el('h3', {}, title, note && el('span', { class: 'note' }, note))),
    rows.length > 0 ? el('dl', { class: 'facts' }, rows) : el('p', { class: 'faint' }, 'None.'));

export class Facts {
  constructor() {
    this.node = el('div', { class: 'columns' });
    this.text = '';
  }

  update({ info, errors, targets }) {
    const shown = { ...info, uptime_ms: age(info.uptime_ms), queues: info.queues.map((queue) => [queue.reactor, queue.depth]) };
    const text = JSON.stringify([shown, errors, targets]);
    // Whoever has something selected here keeps it.
    if (text === this.text) return;
    this.text = text;
    const set = Object.entries(info.limits).filter(([, value]) => value !== 0);
    const unset = Object.entries(info.limits).filter(([, value]) => value === 0).map(([name]) => name);
    this.node.replaceChildren(
      card('Device', [
        row('size', size(info.size), `${info.size.toLocaleString('en')} bytes`),
        row('logical block', `${info.logical_block_size} B`),
        row('access', info.read_only ? 'read only' : 'read and write'),
        row('there for', age(info.uptime_ms)),
        row('process', String(info.pid)),
        row('failed requests', count(errors)),
        ...info.queues.map((queue) => row(`queue on thread ${queue.reactor}`, `depth ${queue.depth}`, queue.engine)),
      ]),
      card('Exports', info.exports.flatMap((one) => [
        row(one.kind, one.address),
        row('clients', String(one.connections), one.tls === 'off' ? '' : `TLS ${one.tls}`),
        ...Object.entries(one.details).map(([name, value]) => row(name, value)),
      ])),
      card('Backend', Object.entries(info.backend).map(([name, value]) => row(name, value))),
      ...(targets.length > 0 ? [card('Table', targets.map((target) => row(`${target.start} + ${target.len}`, `${target.kind} ${target.params}`)))] : []),
      card('Queue limits', set.map(([name, value]) => row(name, ...limit(name, value))), unset.length > 0 ? `${unset.length} more are 0` : ''));
  }
}
