// Small words for making elements. Text is always text: nothing that a server or a user named is ever read as markup.

/** An element with properties, attributes (those with a dash, or `role`), listeners (`on…`) and children. */
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

/** Text that changes each second: set only when it is another, so that what is selected stays selected. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The same for an attribute. */
export function attribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export const byId = (id) => document.getElementById(id);
