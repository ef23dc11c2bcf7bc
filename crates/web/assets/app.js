// The page: chooses the view, passes events of the stream to it, and handles the keys that work everywhere.

import { refreshColours } from './canvas.js';
import { Device, TABS } from './device.js';
import { byId, el, put } from './dom.js';
import { Live } from './live.js';
import { Overview } from './overview.js';
import { range } from './range.js';
import { takeToken, token } from './token.js';

const STATES = { connecting: 'Connecting', live: 'Live', lost: 'Reconnecting', gone: 'No server', stranger: 'Token needed', crowded: 'Too many' };
/** Texts of the banner while no stream is open, by the state of the stream. */
const TROUBLES = {
  lost: () => ['The connection was lost. The values shown are the last known ones.'],
  gone: () => ['The server ended or does not answer. This page connects again when it is back.'],
  stranger: () => ['The server requires its token, which may be new since it was restarted: ', el('a', { href: '/entry' }, 'open the page with it'), '.'],
  crowded: () => ['Too many pages show this server. Close one of them: this one connects again by itself.'],
};
const THEMES = ['', 'light', 'dark'];
const title = document.title;

let view = null;
let hello = null;
/** Names of all devices, sorted. */
let devices = [];

/** The device and the tab that the address names, `#/DEVICE/TAB`; the device is `''` in the list of all. */
function named() {
  let words;
  try {
    words = decodeURIComponent(location.hash.replace(/^#\/?/, '')).split('/');
  } catch {
    words = [''];
  }
  const [name, tab] = words;
  return { name, tab: TABS.some(([id]) => id === tab) ? tab : TABS[0][0] };
}

/** Shows what the address names: another tab of the same device, or another view. */
function follow() {
  const { name, tab } = named();
  if (view instanceof Device && view.name === name) view.select(tab);
  else show();
}

function show() {
  const { name, tab } = named();
  view?.destroy();
  view = name
    ? new Device(name, tab, hello?.actions ?? false, (addresses) => live.open(name, addresses),
      (id) => history.pushState(null, '', `#/${name}/${id}`))
    : new Overview();
  byId('main').replaceChildren(view.node);
  byId('crumbs').hidden = !name;
  choices();
  document.title = name ? `${name} · ${title}` : title;
  live.open(name || null, tab === 'addresses');
}

/** Fills the list of devices to choose from. The device that is shown is always in it. */
function choices() {
  const { name } = named();
  const names = devices.includes(name) || !name ? devices : [name, ...devices];
  const select = byId('switch');
  if (select.dataset.names !== names.join(' ')) {
    select.dataset.names = names.join(' ');
    select.replaceChildren(...names.map((one) => el('option', { value: one }, one)));
  }
  select.value = name;
}

/** Shows another device in the same tab: the one of that name, or so many further on in the list. */
function switchTo(device) {
  const { name, tab } = named();
  const count = devices.length;
  const next = typeof device === 'string' ? device : devices[(devices.indexOf(name) + device + count) % count];
  if (next && next !== name) location.hash = `#/${next}/${tab}`;
}

function linkIs(state) {
  if (byId('link').dataset.state === state) return;
  byId('link').dataset.state = state;
  put(byId('link-text'), STATES[state]);
  const banner = byId('banner');
  const trouble = TROUBLES[state];
  banner.hidden = !trouble;
  banner.replaceChildren(...(trouble?.() ?? []));
  document.body.classList.toggle('stale', !banner.hidden);
}

const live = new Live((name, data) => {
  // A browser whose token was never accepted shows the form that asks for it.
  if (data === 'stranger' && !hello && !token()) location.replace('/entry');
  else if (name === 'state') linkIs(data);
  else if (name === 'hello') greet(data);
  else if (name === 'tick') ticked(data);
  else if (name === 'device') view?.device?.(data);
  else if (name === 'addresses') view?.scatter?.(data);
});

function ticked(data) {
  devices = data.devices.map((device) => device.name).sort((a, b) => a.localeCompare(b, 'en', { numeric: true }));
  choices();
  view?.tick(data);
}

/** Handles the first event of a server. A process that was restarted may allow other actions. */
function greet(data) {
  const changed = hello === null || hello.actions !== data.actions || hello.pid !== data.pid;
  const first = hello === null;
  hello = data;
  const mode = byId('mode');
  mode.hidden = false;
  put(mode, data.actions ? 'Actions allowed' : 'View only');
  mode.title = `blockyard ${data.version}, process ${data.pid} on ${data.host}`;
  if (!first) view?.remember();
  if (changed && (!first || data.actions) && view instanceof Device) show();
}

function themed(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem('theme', theme);
  } catch {
    // Private windows may have no storage: then the choice lasts until the page is closed.
  }
  recoloured();
}

function recoloured() {
  refreshColours();
  view?.draw?.();
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? '';
  themed(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
}

function remembered() {
  try {
    return localStorage.getItem('theme') ?? '';
  } catch {
    return '';
  }
}

document.addEventListener('keydown', (event) => {
  const typing = event.target.closest('input, select, dialog');
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === '?') byId('help').showModal();
  else if (event.key === 't') nextTheme();
  else if (event.key === '/' && view instanceof Overview) view.filter.focus();
  else if (event.key === 'Escape' && range.isFixed && view instanceof Device) range.follow();
  else if (event.key === 'Escape' && view instanceof Device) location.hash = '#/';
  else if (event.key === 'p' && view instanceof Device) view.pauseOrFollow();
  else if ((event.key === '[' || event.key === ']') && view instanceof Device) switchTo(event.key === ']' ? 1 : -1);
  else if (/^[1-4]$/.test(event.key) && view instanceof Device) view.show(Number(event.key) - 1);
  else if ((event.key === 'ArrowDown' || event.key === 'ArrowUp') && view instanceof Overview && event.target === document.body) {
    view.step(event.key === 'ArrowDown' ? 1 : -1, event);
  } else return;
  event.preventDefault();
});

document.addEventListener('visibilitychange', () => {
  if (document.hidden) live.pause();
  else live.connect();
});
byId('theme').addEventListener('click', nextTheme);
byId('keys').addEventListener('click', () => byId('help').showModal());
byId('skip').addEventListener('click', (event) => {
  event.preventDefault();
  byId('main').focus();
});
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', recoloured);
window.addEventListener('hashchange', follow);
byId('switch').addEventListener('change', (event) => switchTo(event.target.value));

takeToken();
document.documentElement.dataset.theme = remembered();
refreshColours();
show();
