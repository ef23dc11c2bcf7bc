// What changes something: each asks first, says which command does the same, and says what came of it.

import { byId, el, put } from './dom.js';
import { ask } from './token.js';

/** A word on what was done, or why not, for a while. */
export function toast(text, bad = false) {
  const node = el('div', { class: bad ? 'toast bad' : 'toast' }, text);
  byId('toasts').append(node);
  setTimeout(() => node.remove(), bad ? 9000 : 4000);
}

/** Ask; resolves to the text of the field, `''` where there is none, or `null`: no. */
function confirmed({ title, text, command, yes, field, calm }) {
  const dialog = byId('confirm');
  const input = byId('confirm-input');
  put(byId('confirm-title'), title);
  put(byId('confirm-text'), text);
  put(byId('confirm-yes'), yes);
  byId('confirm-yes').className = calm ? 'button button-main' : 'button button-danger';
  byId('confirm-field').hidden = !field;
  input.required = Boolean(field);
  input.value = field?.value ?? '';
  put(byId('confirm-label'), field?.label ?? '');
  const told = () => put(byId('confirm-command'), command(input.value.trim()));
  input.oninput = told;
  told();
  dialog.returnValue = 'no';
  // It sends no form: a field may be empty, and Enter within one means the button that does.
  byId('confirm-no').onclick = () => dialog.close('no');
  dialog.showModal();
  // Whoever presses Enter without reading does nothing.
  (field ? input : byId('confirm-no')).focus();
  return new Promise((resolve) => {
    dialog.addEventListener('close', () => resolve(dialog.returnValue === 'yes' ? input.value.trim() : null), { once: true });
  });
}

async function post(device, action) {
  const response = await ask(`/devices/${device}/actions`, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(action),
  });
  if (response.ok) return;
  const { error } = await response.json().catch(() => ({}));
  throw new Error(error ?? `the server answered ${response.status}`);
}

async function carryOut(device, question, action, done) {
  const answer = await confirmed(question);
  if (answer === null) return;
  try {
    await post(device, action(answer));
    toast(done);
  } catch (error) {
    toast(`${question.title.replace(/\?$/, '')} failed: ${error.message}`, true);
  }
}

export const failPath = (device, path) => carryOut(device, {
  title: `Fail ${path.name}?`,
  text: 'Requests go to other paths from now on. Where none is left, they wait or fail, as the table says.',
  command: () => `blockyard message ${device} ${path.sector} fail_path ${path.name}`,
  yes: 'Fail path',
}, () => ({ action: 'fail-path', sector: path.sector, path: path.name }), `${path.name} is out of use`);

export const reinstatePath = (device, path) => carryOut(device, {
  title: `Reinstate ${path.name}?`,
  text: 'Requests may go to it again at once.',
  command: () => `blockyard message ${device} ${path.sector} reinstate_path ${path.name}`,
  yes: 'Reinstate path',
  calm: true,
}, () => ({ action: 'reinstate-path', sector: path.sector, path: path.name }), `${path.name} is in use again`);

export const suspend = (device) => carryOut(device, {
  title: `Suspend ${device}?`,
  text: 'What is under way ends and is flushed; what comes then waits until the device is resumed.',
  command: () => `blockyard suspend ${device}`,
  yes: 'Suspend',
}, () => ({ action: 'suspend' }), `${device} is suspended`);

export const resume = (device) => carryOut(device, {
  title: `Resume ${device}?`,
  text: 'What was held back is carried out, in its order.',
  command: () => `blockyard resume ${device}`,
  yes: 'Resume',
  calm: true,
}, () => ({ action: 'resume' }), `${device} goes on`);

export const resize = (device, now) => carryOut(device, {
  title: `Resize ${device}?`,
  text: `It holds ${now} bytes. Its users are told of the new size. It can only grow here.`,
  command: (size) => `blockyard resize ${device} ${size || 'SIZE'}`,
  yes: 'Resize',
  field: { label: 'New size (20G, 512M, or bytes)', value: '' },
}, (size) => ({ action: 'resize', size }), `${device} has its new size`);

export const direct = (device, on) => carryOut(device, {
  title: `Switch direct I/O ${on ? 'on' : 'off'}?`,
  text: on ? 'The file is read and written past the page cache.' : 'The file is read and written through the page cache.',
  command: () => `blockyard set ${device} direct=${on ? 'on' : 'off'}`,
  yes: on ? 'Switch on' : 'Switch off',
}, () => ({ action: 'direct', on }), `Direct I/O of ${device} is ${on ? 'on' : 'off'}`);
