// The server: where its routes are, the key that it may ask for, and its errors.

const KEY = "negamax.api_key"; // its name in sessionStorage

export class ServerError extends Error {
  constructor(message, details = {}) {
    super(message);
    Object.assign(this, { status: null, code: null, requestId: null, retryAfter: null }, details);
  }
}

// The API key of this tab, or null.
export function key() {
  return sessionStorage.getItem(KEY);
}

// Keeps the key until the tab is closed; null forgets it.
export function setKey(value) {
  if (value === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, value);
}

// The JSON of a GET route. Throws ServerError.
export async function getJson(path) {
  return (await get(path)).json();
}

// The text of a GET route. Throws ServerError.
export async function getText(path) {
  return (await get(path)).text();
}

async function get(path) {
  const response = await reached(fetch(addressOf(path), { headers: authorization() }));
  if (!response.ok) throw await errorOf(response);
  return response;
}

// Where a route is, seen from the page; without the credentials that may stand in the page's own
// address.
export function addressOf(path) {
  const url = new URL(path, document.baseURI);
  url.username = url.password = url.hash = "";
  return url.href;
}

// Without a key of the page's own, the browser may have been asked for one; the header says that
// this page sends it, which no other site can.
export function authorization() {
  return key() ? { authorization: `Bearer ${key()}` } : { "x-negamax-page": "1" };
}

export async function reached(fetching) {
  try {
    return await fetching;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", { code: "unreachable" });
  }
}

export async function errorOf(response) {
  const details = {
    status: response.status,
    requestId: response.headers.get("x-request-id"),
    retryAfter: response.headers.get("retry-after"),
  };
  const body = await response.json().catch(() => null);
  return new ServerError(
    body?.error?.message ?? `The server answered ${response.status} ${response.statusText}`,
    {
      ...details,
      code: body?.error?.code ?? body?.error?.type ?? null,
    },
  );
}
