// Facts about a device that change rarely: exports, limits, queues, events, facts of its backend.

import { el } from './dom.js';
import { age, bytes, clock, count, size } from './format.js';

/** The value of a 32-bit limit that is not set. */
const NONE = 4294967295;

function limit(name, value) {
  if (value === NONE || value === 65535) return [String(value), 'no limit'];
  if (name.endsWith('_sectors') && value > 0) return [String(value), size(value * 512)];
  const isBytes = name.endsWith('block_size') || name.startsWith('io_') || name.endsWith('segment_size') || name.endsWith('granularity');
  return [String(value), isBytes && value >= 1024 ? size(value) : ''];
}

/** Largest number of events that are listed. */
const EVENTS_MAX = 20;

const row = (name, value, note = '') =>
  el('div', { class: 'fact' }, el('dt', {}, name), el('dd', { class: 'num' }, value, note && el('span', { class: 'faint' }, ` ${note}`)));

const card = (title, rows, note) =>
  el('section', { class: 'card', 'aria-label': title }, el('header', {}, el('h3', {}, title, note && el('span', { class: 'note' }, note))),
    rows.length > 0 ? el('dl', { class: 'facts' }, rows) : el('p', { class: 'faint' }, 'None.'));

/** Sessions of initiators, each once although every portal reports it. */
function sessionsOf(info) {
  const all = new Map(info.exports.flatMap((one) => one.sessions ?? []).map((session) => [session.number, session]));
  return [...all.values()];
}

function sessionRows(session) {
  const of = (name) => session.counts[name] ?? 0;
  const failures = ['errors', 'aborts', 'rejects', 'digest-errors', 'waited'].filter((name) => of(name) > 0);
  const held = session.has_reservation ? 'holds the reservation' : session.is_registered ? 'registered' : '';
  return [
    row(`session ${session.number}`, session.initiator, held),
    ...session.connections.map((one) => row('connection', one.peer, `at ${one.portal}`)),
    row('digests', session.digests, session.user && `CHAP user ${session.user}`),
    row('commands', count(of('commands')), `${of('in-progress')} in progress`),
    row('data', `${bytes(of('bytes-read'))} read`, `${bytes(of('bytes-written'))} written`),
    ...failures.map((name) => row(name, count(of(name)))),
  ];
}

export class Facts {
  constructor() {
    this.node = el('div', { class: 'columns' });
    this.text = '';
  }

  update({ info, errors, targets, marks }) {
    const shown = { ...info, uptime_ms: age(info.uptime_ms), queues: info.queues.map((queue) => [queue.reactor, queue.depth]) };
    const text = JSON.stringify([shown, errors, targets, marks]);
    // Text that is selected here stays selected.
    if (text === this.text) return;
    this.text = text;
    const set = Object.entries(info.limits).filter(([, value]) => value !== 0);
    const unset = Object.entries(info.limits).filter(([, value]) => value === 0).map(([name]) => name);
    this.node.replaceChildren(
      card('Device', [
        row('size', size(info.size), `${info.size.toLocaleString('en')} bytes`),
        row('logical block', `${info.logical_block_size} B`),
        row('access', info.read_only ? 'read only' : 'read and write'),
        row('uptime', age(info.uptime_ms)),
        row('process', String(info.pid)),
        row('failed requests', count(errors)),
        ...info.queues.map((queue) => row(`queue on thread ${queue.reactor}`, `depth ${queue.depth}`, queue.engine)),
      ]),
      card('Exports', info.exports.flatMap((one) => [
        row(one.kind, one.address),
        row('clients', String(one.connections), one.tls === 'off' ? '' : `TLS ${one.tls}`),
        ...Object.entries(one.details).filter(([name]) => !name.startsWith('session ')).map(([name, value]) => row(name, value)),
      ])),
      ...(sessionsOf(info).length > 0 ? [card('Sessions', sessionsOf(info).flatMap(sessionRows))] : []),
      card('Events', marks.toReversed().slice(0, EVENTS_MAX).map(({ t, text }) => row(clock(t), text)), 'in the last hour'),
      card('Backend', Object.entries(info.backend).map(([name, value]) => row(name, value))),
      ...(targets.length > 0 ? [card('Table', targets.map((target) => row(`${target.start} + ${target.len}`, `${target.kind} ${target.params}`)))] : []),
      card('Queue limits', set.map(([name, value]) => row(name, ...limit(name, value))), unset.length > 0 ? `${unset.length} more are 0` : ''));
  }
}
