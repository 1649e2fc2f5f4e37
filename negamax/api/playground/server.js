// Requests to the server: addresses of routes, the API key, and errors.

const KEY = "negamax.api_key"; // name of the key in sessionStorage

export class ServerError extends Error {
  constructor(message, details = {}) {
    super(message);
    Object.assign(this, { status: null, code: null, requestId: null, retryAfter: null }, details);
  }
}

// Returns the API key of this tab, or null.
export function key() {
  return sessionStorage.getItem(KEY);
}

// Stores the key until the tab is closed; null deletes the key.
export function setKey(value) {
  if (value === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, value);
}

// Returns the JSON of a GET route, or throws ServerError.
export async function getJson(path) {
  return (await get(path)).json();
}

// Returns the text of a GET route, or throws ServerError.
export async function getText(path) {
  return (await get(path)).text();
}

async function get(path) {
  const response = await reached(fetch(addressOf(path), { headers: authorization() }));
  if (!response.ok) throw await errorOf(response);
  return response;
}

// Returns the address of a route without the credentials that the page's own address may contain.
export function addressOf(path) {
  const url = new URL(path, document.baseURI);
  url.username = url.password = url.hash = "";
  return url.href;
}

// Without a key in this page, the browser may send a key from its own dialog. The header shows the
// server that this page sends the request; no other site can set the header.
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
