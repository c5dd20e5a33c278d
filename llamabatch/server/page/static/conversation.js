// One conversation: its messages, its options, and the answer that is coming in. No elements here.

import { chosenModel, events, streamsAreTaken } from "./api.js";

const TOLD = ["temperature", "top_p", "max_tokens", "seed"]; // numbers of the options, sent where they are given

/**
 * Messages are { role, content, files, reasoning, calls, error, note }; `content` is text, `calls` are tool calls,
 * `files` are { name, url, kind, format } with a data: address; the kind is "image" or "sound".
 * `state` is "idle", "waiting" (for one of the browser's connections), "asked" or "answering".
 */
export class Conversation {
  state = "idle";
  messages = [];
  options = {};
  #stop = null;
  #onChange;

  /** `onChange` is called after each change; `kept` is what toJSON() gave. */
  constructor(onChange, kept = {}) {
    this.#onChange = onChange;
    this.messages = kept.messages ?? [];
    this.options = kept.options ?? {};
  }

  toJSON() {
    return { messages: this.messages, options: this.options };
  }

  /** The conversation as a text: a heading for each message. */
  toMarkdown() {
    const system = this.options.system ? [{ role: "system", content: this.options.system }] : [];
    const parts = [...system, ...this.messages].map(({ role, content, files, calls, error }) => {
      const shown = (files ?? []).map(({ name, kind }) => `(${kind}: ${name})`);
      const called = (calls ?? []).map(({ name, arguments: text }) => `calls \`${name}(${text})\``);
      return [`## ${role}`, ...shown, content, ...called, error && `(${error})`].filter(Boolean).join("\n\n");
    });
    return `${parts.join("\n\n")}\n`;
  }

  get isBusy() {
    return this.state !== "idle";
  }

  get canRegenerate() {
    return !this.isBusy && this.messages.at(-1)?.role === "assistant";
  }

  async ask(text, files = []) {
    this.messages.push({ role: "user", content: text, ...(files.length ? { files } : {}) });
    await this.#answer();
  }

  async regenerate() {
    while (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    await this.#answer();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.#onChange();
  }

  /** Ends the answer where it is; true if there was one. */
  stop() {
    this.#stop?.abort();
    return this.isBusy;
  }

  /** The body of the request. Raises SyntaxError: the tools are no JSON. */
  body() {
    const { system, tools } = this.options;
    const numbers = TOLD.filter((name) => Number.isFinite(this.options[name])).map((name) => [name, this.options[name]]);
    return {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages.filter(isSent).map(asSent)],
      stream: true,
      stream_options: { include_usage: true },
      ...Object.fromEntries(numbers),
      ...(tools ? { tools: JSON.parse(tools) } : {}),
    };
  }

  async #answer() {
    const stop = new AbortController();
    this.#stop = stop;
    const answer = { role: "assistant", content: "", reasoning: "", calls: [] };
    try {
      const json = this.body();
      this.messages.push(answer);
      this.#becomes(streamsAreTaken() ? "waiting" : "asked");
      const start = performance.now();
      for await (const chunk of events("v1/chat/completions", { json, signal: stop.signal })) {
        take(chunk, answer, (performance.now() - start) / 1000);
        this.#becomes("answering");
      }
    } catch (error) {
      if (!this.messages.includes(answer)) this.messages.push(answer);
      if (stop.signal.aborted) answer.note = "stopped";
      else answer.error = error instanceof SyntaxError ? `The tools are no JSON: ${error.message}` : error.message;
    }
    this.#becomes("idle");
  }

  #becomes(state) {
    this.state = state;
    this.#onChange();
  }
}

/** Adds a chunk to an answer that began some seconds ago. */
function take(chunk, answer, seconds) {
  const [choice] = chunk.choices;
  const delta = choice?.delta ?? {};
  if (chosenModel() !== null) answer.model = chunk.model;
  answer.content += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? "";
  if (delta.content || delta.reasoning_content || delta.tool_calls) answer.firstS ??= seconds;
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (answer.calls[index] ??= { id, name: "", arguments: "" });
    call.name += called.name ?? "";
    call.arguments += called.arguments ?? "";
  }
  if (choice?.finish_reason === "length") answer.note = "cut at the most tokens";
  if (chunk.usage) {
    answer.nTokens = chunk.usage.completion_tokens;
    answer.tokensPerS = answer.nTokens / seconds;
  }
}

const isSent = (message) => message.role !== "assistant" || message.content || message.calls?.length;

function asSent({ role, content, files, calls }) {
  if (files?.length) {
    const shown = files.map(({ url, kind, format }) => {
      if (kind === "image") return { type: "image_url", image_url: { url } };
      return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1), format } };
    });
    return { role, content: content ? [...shown, { type: "text", text: content }] : shown };
  }
  if (!calls?.length) return { role, content };
  const tool_calls = calls.map(({ id, name, arguments: text }) => {
    return { id, type: "function", function: { name, arguments: text } };
  });
  return { role, content: content || null, tool_calls };
}
