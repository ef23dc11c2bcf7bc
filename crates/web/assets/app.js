// The page: which view is shown, what the stream tells it, and the keys that work everywhere.

import { refreshColours } from './canvas.js';
import { Device } from './device.js';
import { byId, el, put } from './dom.js';
import { Live } from './live.js';
import { Overview } from './overview.js';
import { takeToken, token } from './token.js';

const STATES = { connecting: 'Connecting', live: 'Live', lost: 'Reconnecting', gone: 'No server', stranger: 'Token needed', crowded: 'Too many' };
/** What is said of a stream that is not there. */
const TROUBLES = {
  lost: () => ['The connection was lost. What is shown is as of then.'],
  gone: () => ['The server is gone: its process ended, or does not answer. This page looks for it and goes on when it is back.'],
  stranger: () => ['The server is there, but wants its token, which may be a new one since it was started anew: ', el('a', { href: '/entry' }, 'open the page with it'), '.'],
  crowded: () => ['Too many pages look at this server. Close one of them: this one goes on by itself.'],
};
const THEMES = ['', 'light', 'dark'];
const title = document.title;

let view = null;
let hello = null;

/** The device that the address names; `''`: none, or what no link of this page says. */
function named() {
  try {
    return decodeURIComponent(location.hash.replace(/^#\/?/, ''));
  } catch {
    return '';
  }
}

function show() {
  const name = named();
  view?.destroy();
  view = name
    ? new Device(name, hello?.actions ?? false, (addresses) => live.open(name, addresses))
    : new Overview();
  byId('main').replaceChildren(view.node);
  byId('crumbs').replaceChildren(...(name ? [el('a', { href: '#/' }, 'Devices'), el('span', { class: 'faint' }, '/'), el('span', { 'aria-current': 'page' }, name)] : []));
  document.title = name ? `${name} · ${title}` : title;
  live.open(name || null);
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
  // Who was never let in is asked for the token.
  if (data === 'stranger' && !hello && !token()) location.replace('/entry');
  else if (name === 'state') linkIs(data);
  else if (name === 'hello') greet(data);
  else if (name === 'tick') view?.tick(data);
  else if (name === 'device') view?.device?.(data);
  else if (name === 'addresses') view?.scatter?.(data);
});

/** Who is there: a process that was started anew may allow other things. */
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
    // It is as it is until the page is closed.
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
  const typing = event.target.closest('input, dialog');
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === '?') byId('help').showModal();
  else if (event.key === 't') nextTheme();
  else if (event.key === 'Escape' && view instanceof Device) location.hash = '#/';
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
window.addEventListener('hashchange', show);

takeToken();
document.documentElement.dataset.theme = remembered();
refreshColours();
show();
