// Helpers that create elements. Text is always text: no name of a device or a file is ever parsed as markup.

/** Creates an element with properties, attributes (those with a dash, or `role`), listeners (`on…`) and
 * children. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'class') node.className = value;
    else if (name === 'data') Object.assign(node.dataset, value);
    else if (name.includes('-') || name === 'role' || name === 'for') node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Buttons of which one is chosen: `choices` are `[value, name]`. The result's `choose(value)` shows which. */
export function segments(label, choices, chosen) {
  const buttons = choices.map(([value, name]) => el('button', { type: 'button', class: 'segment', onclick: () => chosen(value) }, name));
  const node = el('div', { class: 'segments', role: 'group', 'aria-label': label }, buttons);
  const choose = (value) => choices.forEach(([one], index) => attribute(buttons[index], 'aria-pressed', one === value));
  return { node, choose };
}

/** Sets the text of an element, only if it differs, so that a selection in it stays. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Sets an attribute, only if it differs; `null` removes it. */
export function attribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export const byId = (id) => document.getElementById(id);
