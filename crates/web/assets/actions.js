// Actions that change a device: each asks first, shows the equivalent command, and reports its result.

import { byId, el, put } from './dom.js';
import { ask } from './token.js';

/** Shows a result or an error for some seconds. */
export function toast(text, bad = false) {
  const node = el('div', { class: bad ? 'toast bad' : 'toast' }, text);
  byId('toasts').append(node);
  setTimeout(() => node.remove(), bad ? 9000 : 4000);
}

/** Asks for confirmation; resolves to the text of the field, `''` without a field, or `null`: cancelled. */
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
  const showCommand = () => put(byId('confirm-command'), command(input.value.trim()));
  input.oninput = showCommand;
  showCommand();
  // The close event would come later, when the dialog may be open again with another question.
  const answered = new Promise((resolve) => {
    // A button of its own: Cancel must not check the field, and Enter in the field must not press it.
    byId('confirm-no').onclick = () => {
      resolve(null);
      dialog.close();
    };
    dialog.oncancel = () => resolve(null);
    dialog.querySelector('form').onsubmit = () => resolve(input.value.trim());
  });
  dialog.showModal();
  // Enter without reading cancels.
  (field ? input : byId('confirm-no')).focus();
  return answered;
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
  text: 'Requests go to other paths from now on. If no path is left, they wait or fail, as the table specifies.',
  command: () => `blockyard message ${device} ${path.sector} fail_path ${path.name}`,
  yes: 'Fail path',
}, () => ({ action: 'fail-path', sector: path.sector, path: path.name }), `${path.name} was failed`);

export const reinstatePath = (device, path) => carryOut(device, {
  title: `Reinstate ${path.name}?`,
  text: 'Requests may go to this path again at once.',
  command: () => `blockyard message ${device} ${path.sector} reinstate_path ${path.name}`,
  yes: 'Reinstate path',
  calm: true,
}, () => ({ action: 'reinstate-path', sector: path.sector, path: path.name }), `${path.name} was reinstated`);

export const suspend = (device) => carryOut(device, {
  title: `Suspend ${device}?`,
  text: 'Requests in flight are completed and flushed; later ones wait until the device is resumed.',
  command: () => `blockyard suspend ${device}`,
  yes: 'Suspend',
}, () => ({ action: 'suspend' }), `${device} is suspended`);

export const resume = (device) => carryOut(device, {
  title: `Resume ${device}?`,
  text: 'Requests that wait are processed in their order.',
  command: () => `blockyard resume ${device}`,
  yes: 'Resume',
  calm: true,
}, () => ({ action: 'resume' }), `${device} is resumed`);

export const resize = (device, now) => carryOut(device, {
  title: `Resize ${device}?`,
  text: `The device has ${now} bytes. Its clients are notified of the new size. It can only grow here.`,
  command: (size) => `blockyard resize ${device} ${size || 'SIZE'}`,
  yes: 'Resize',
  field: { label: 'New size (20G, 512M, or bytes)', value: '' },
}, (size) => ({ action: 'resize', size }), `${device} has its new size`);

export const direct = (device, on) => carryOut(device, {
  title: `Switch direct I/O ${on ? 'on' : 'off'}?`,
  text: on ? 'The file is read and written without the page cache.' : 'The file is read and written through the page cache.',
  command: () => `blockyard set ${device} direct=${on ? 'on' : 'off'}`,
  yes: on ? 'Switch on' : 'Switch off',
}, () => ({ action: 'direct', on }), `Direct I/O of ${device} is ${on ? 'on' : 'off'}`);
