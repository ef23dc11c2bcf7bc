// The stack: hosts on top, backends at the bottom, each node with its own share of the latency. A path of a
// multipath table also has its state and a button to fail or reinstate it. The two files of an overlay are
// named origin and overlay.

import { failPath, reinstatePath } from './actions.js';
import { attribute, el, put } from './dom.js';
import { count, percent, time } from './format.js';

/** The shape of the stack: the view is built again when the shape changes, and only updated otherwise. */
const shapeOf = ({ stack, paths, info }) =>
  JSON.stringify([stack.map((part) => [part.name, part.depth, part.label, part.role]), paths.map((path) => [path.name, path.group, path.node]), info.exports.map((one) => one.address)]);

export class Stack {
  constructor(device, mayAct) {
    Object.assign(this, { device, mayAct, shape: '', cards: [] });
    this.tree = el('div', { class: 'tree' });
    this.node = el('section', { class: 'card', 'aria-label': 'Stack' },
      el('header', {}, el('h3', {}, 'Stack', el('span', { class: 'note' }, 'share of the time that requests take, in the last second'))),
      el('div', { class: 'tree-scroll', tabIndex: 0, role: 'group', 'aria-label': 'The stack, from hosts to backends' }, this.tree));
  }

  update(details) {
    const shape = shapeOf(details);
    if (shape !== this.shape) {
      this.shape = shape;
      this.build(details);
    }
    details.info.exports.forEach((one, index) => put(this.hosts[index], clients(one)));
    details.stack.forEach((part, index) => this.fill(this.cards[index], part));
    for (const path of details.paths) this.fillPath(path);
  }

  build({ stack, paths, info }) {
    this.cards = stack.map((part) => this.card(part));
    this.paths = new Map();
    for (const path of paths) {
      const at = stack.findIndex((part) => part.node === path.node);
      const shown = this.pathRow(path);
      this.paths.set(key(path), shown);
      if (at >= 0) {
        this.cards[at].node.append(shown.node);
        shown.card = this.cards[at].node;
        put(this.cards[at].label, path.name);
        this.cards[at].label.title = path.name;
      }
    }
    this.hosts = info.exports.map(() => el('span', { class: 'faint' }));
    const hosts = info.exports.map((one, index) =>
      el('div', { class: 'host', title: one.address }, el('b', {}, one.kind), this.hosts[index]));
    const branch = (at) => {
      const below = stack.flatMap((part, index) => (index > at && part.depth === stack[at].depth + 1 && parentOf(stack, index) === at ? [branch(index)] : []));
      return el('li', {}, this.cards[at].node, below.length > 0 && el('ul', {}, below));
    };
    const roots = stack.flatMap((part, index) => (part.depth === 0 ? [branch(index)] : []));
    this.tree.replaceChildren(
      el('div', { class: 'hosts' }, hosts.length > 0 ? hosts : el('div', { class: 'host' }, 'not exported')),
      el('ul', { class: 'branches' }, roots));
  }

  card(part) {
    const shown = {
      label: el('span', { class: 'label' }),
      share: el('b', { class: 'num' }),
      bar: el('span', { class: 'bar-fill' }),
      own: el('span', { class: 'num' }),
      ios: el('span', { class: 'num' }),
      depth: el('span', { class: 'num' }),
    };
    shown.node = el('div', { class: part.backend ? 'node backend' : 'node' },
      el('div', { class: 'node-head' }, el('span', {}, part.role && el('span', { class: 'chip role' }, part.role), el('b', {}, part.name)), shown.share),
      shown.label,
      el('div', { class: 'bar-back', 'aria-hidden': 'true' }, shown.bar),
      el('dl', { class: 'node-facts' },
        el('div', {}, el('dt', {}, 'own'), el('dd', {}, shown.own)),
        el('div', {}, el('dt', {}, 'IOPS'), el('dd', {}, shown.ios)),
        el('div', {}, el('dt', {}, 'inside'), el('dd', {}, shown.depth))));
    if (part.label) {
      put(shown.label, part.label);
      shown.label.title = part.label;
    }
    return shown;
  }

  fill(shown, part) {
    put(shown.share, percent(part.share));
    shown.bar.style.width = `${(part.share * 100).toFixed(1)}%`;
    put(shown.own, time(part.own));
    put(shown.ios, count(part.ios));
    put(shown.depth, count(part.in_flight));
  }

  pathRow(path) {
    const shown = {
      state: el('span', { class: 'chip' }),
      fails: el('span', { class: 'faint num' }),
      button: el('button', { type: 'button', class: 'button button-small' }),
    };
    shown.button.addEventListener('click', () => {
      const { path: now } = shown;
      (now.works ? failPath : reinstatePath)(this.device, now);
    });
    shown.node = el('div', { class: 'path' }, shown.state, el('span', { class: 'faint' }, `group ${path.group}`), shown.fails, this.mayAct && shown.button);
    return shown;
  }

  fillPath(path) {
    const shown = this.paths.get(key(path));
    if (!shown) return;
    shown.path = path;
    shown.card?.classList.toggle('failed', !path.works);
    const idle = path.group_state === 'D' ? 'disabled' : path.group_state === 'E' ? 'standby' : 'in use';
    put(shown.state, path.works ? idle : 'failed');
    shown.state.className = path.works ? (path.group_state === 'A' ? 'chip good' : 'chip') : 'chip bad';
    put(shown.fails, path.fails > 0 ? `${path.fails}×` : '');
    shown.fails.title = 'how often it failed';
    put(shown.button, path.works ? 'Fail' : 'Reinstate');
    attribute(shown.button, 'aria-label', `${path.works ? 'Fail' : 'Reinstate'} path ${path.name}`);
  }
}

const key = (path) => `${path.sector} ${path.group} ${path.name}`;
const clients = (one) => `${one.connections} ${one.connections === 1 ? 'client' : 'clients'}`;

/** The node above a node: the nearest one before it with a smaller depth. */
function parentOf(stack, index) {
  for (let at = index - 1; at >= 0; at -= 1) if (stack[at].depth < stack[index].depth) return at;
  return -1;
}
