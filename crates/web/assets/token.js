// The token: taken from the address, kept for this tab, and sent with each request. It is not a cookie, which
// the browser would send to every port of the host; sessionStorage belongs to this port alone.

const NAME = 'token';
/** The token where sessionStorage is not available, until the page is loaded again. */
let kept = null;

/** Takes the token out of the address, where others could read it. */
export function takeToken() {
  const query = new URLSearchParams(location.search);
  const given = query.get(NAME);
  if (given === null) return;
  history.replaceState(null, '', `/${location.hash}`);
  // Other texts are not tokens, and headers do not accept all characters.
  if (!/^[\w-]+$/.test(given)) return;
  kept = given;
  try {
    sessionStorage.setItem(NAME, given);
  } catch {
    // Private windows may have no storage.
  }
}

/** Returns the token, or `null`. */
export function token() {
  try {
    return sessionStorage.getItem(NAME);
  } catch {
    return kept;
  }
}

/** Sends a request to this server, with the token. */
export function ask(path, options = {}) {
  const known = token();
  const headers = known ? { ...options.headers, authorization: `Bearer ${known}` } : options.headers;
  return fetch(path, { ...options, headers, credentials: 'omit' });
}
