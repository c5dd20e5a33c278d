// Calls of the server: its address, the key, errors, and streams of events.

const BASE = new URL("..", import.meta.url); // also below a root path
const KEY = "llamabatch.key"; // in sessionStorage: it ends with the tab

// Browsers open six connections to a server over HTTP/1.1. One is left for the live batch and one for short calls;
// further streams wait here, where the page can say so.
const MAX_STREAMS = 4;

const OF_A_MODEL = /^(v1\/(chat\/)?completions|apply-template|slots)\b/;
let model = null;

/** Of a server that has several models, the one that calls are for from now on; null: there is one alone. */
export function useModel(name) {
  model = name;
}

/** What the server, or the way to it, refused. `status` is 0 where there was no answer; `code` may be the server's. */
export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let askForKey = async () => null;
let asking = null;

/** `ask` resolves to a key, or to null where the user has none; its argument tells whether one was refused. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** The name that `useModel` was given. */
export const chosenModel = () => model;

/** A response whose status is a success. A value as `json` is the body of a POST. Raises ApiError. */
export async function call(path, { json, ...options } = {}) {
  const headers = json === undefined ? {} : { "content-type": "application/json" };
  if (model !== null && OF_A_MODEL.test(path)) {
    if (json !== undefined) json = { model, ...json };
    else path += `${path.includes("?") ? "&" : "?"}model=${encodeURIComponent(model)}`;
  }
  if (json !== undefined) options = { method: "POST", body: JSON.stringify(json), ...options };
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    if (key) headers.authorization = `Bearer ${key}`;
    const response = await send(new URL(path, BASE), { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401 || !(await hasNewKey(key))) throw await refusal(response);
  }
}

/** The JSON of a response. */
export async function get(path, options) {
  return (await call(path, options)).json();
}

async function send(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    dispatchEvent(new Event("unanswered"));
    throw new ApiError("The server does not answer. It may have ended, or the network is gone.");
  }
}

async function refusal(response) {
  const text = await response.text();
  let message = text.slice(0, 500);
  let code = null;
  try {
    ({ message, code } = JSON.parse(text).error);
  } catch {
    // a proxy answered
  }
  const wait = response.headers.get("retry-after");
  return new ApiError((message || `status ${response.status}`) + (wait ? ` (try again in ${wait} s)` : ""), response.status, code);
}

/** True once there is another key than the refused one. Calls that fail together ask once. */
async function hasNewKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return true;
  asking ??= askForKey(refused !== null).finally(() => (asking = null));
  const given = await asking;
  if (given === null) return false;
  sessionStorage.setItem(KEY, given);
  return true;
}

/** Places for streams, given in the order of asking. */
class Places {
  #free;
  #waiting = [];

  constructor(count) {
    this.#free = count;
  }

  get areTaken() {
    return this.#free === 0;
  }

  async take(signal) {
    signal?.throwIfAborted();
    if (this.#free > 0) {
      this.#free -= 1;
      return;
    }
    await new Promise((resolve, reject) => {
      this.#waiting.push(resolve);
      signal?.addEventListener("abort", () => {
        const place = this.#waiting.indexOf(resolve);
        if (place >= 0) this.#waiting.splice(place, 1);
        if (place >= 0) reject(signal.reason);
      });
    });
  }

  give() {
    const next = this.#waiting.shift();
    if (next) next();
    else this.#free += 1;
  }
}

const places = new Places(MAX_STREAMS);

/** True while a further stream would wait for one of the browser's connections. */
export const streamsAreTaken = () => places.areTaken;

/**
 * The events of a stream as values. `isLive`: it has no last event, and a connection of its own; any other stream that
 * lacks its last event was cut. Raises ApiError, also for an error among the events, and AbortError.
 */
export async function* events(path, { isLive = false, ...options } = {}) {
  if (!isLive) await places.take(options.signal);
  let reader = null;
  try {
    const response = await call(path, options);
    reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await read(reader);
      if (done && !isLive) throw new ApiError("The stream was cut before its end.");
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = dataOf(part);
        if (data === "[DONE]") return;
        if (!data) continue; // a comment, which keeps the connection open
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, event.error.code);
        yield event;
      }
    }
  } finally {
    reader?.cancel().catch(() => {}); // the server sees a client that leaves, and frees its slot
    if (!isLive) places.give();
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the end of the stream.");
  }
}

function dataOf(part) {
  return part
    .split("\n")
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).trimStart())
    .join("\n");
}
