// The token: taken from the address, kept for this tab, and sent with each request. It is no cookie, which the browser would
// send to every port of the host; what sessionStorage keeps belongs to this port alone.

const NAME = 'token';
/** Where nothing can be kept, until the page is loaded again. */
let kept = null;

/** Take the token out of the address, where others could read it. */
export function takeToken() {
  const query = new URLSearchParams(location.search);
  const given = query.get(NAME);
  if (given === null) return;
  history.replaceState(null, '', `/${location.hash}`);
  // No other text is a token, and headers do not take all.
  if (!/^[\w-]+$/.test(given)) return;
  kept = given;
  try {
    sessionStorage.setItem(NAME, given);
  } catch {
    // Private windows may keep nothing.
  }
}

/** The token; `null`: there is none. */
export function token() {
  try {
    return sessionStorage.getItem(NAME);
  } catch {
    return kept;
  }
}

/** Ask this server, with the token. */
export function ask(path, options = {}) {
  const known = token();
  const headers = known ? { ...options.headers, authorization: `Bearer ${known}` } : options.headers;
  return fetch(path, { ...options, headers, credentials: 'omit' });
}
