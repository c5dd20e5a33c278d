// The same prompts one by one and together, over the server's own API. No elements here.
//
// So that neither run is helped by the other: no prompt is taken from the prefix cache (cache_prompt: false; the server
// tells how many tokens were, and the page shows it), a short request warms up before both, and the run that goes first
// changes from one comparison to the next. The texts are greedy, so that they can be compared.

import { call, events, get } from "./api.js";

const SECONDS = 10; // that one by one may take, roughly; together takes a part of it
const [LEAST_TOKENS, MOST_TOKENS] = [16, 128];
export const MOST_PROMPTS = 64;

/**
 * Compares. `onChange(run)` is called as it goes; the run is also what comes back. Raises ApiError and AbortError.
 *
 * A run is { prompts, maxTokens, isAloneFirst, busy, alone, company, equal }: `alone` and `company` are passes, null
 * until they begin; `equal[i]` is true, or the place of the first difference; `busy` are slots that others had.
 */
export async function compare(texts, { isAloneFirst, signal, onChange }) {
  const [prompts, busy] = [await templated(texts, signal), await busySlots(signal)];
  const speed = await warmUp(prompts[0], signal);
  const maxTokens = Math.round(Math.min(MOST_TOKENS, Math.max(LEAST_TOKENS, (SECONDS * speed) / prompts.length)));
  const run = { prompts: texts, maxTokens, isAloneFirst, busy, alone: null, company: null, equal: null };
  const ways = [["alone", prompts.map((prompt, at) => [[at], [prompt]])], ["company", [[prompts.map((_, at) => at), prompts]]]];
  for (const [name, requests] of isAloneFirst ? ways : ways.reverse()) {
    run[name] = newPass(prompts.length);
    await pass(run[name], requests, maxTokens, signal, () => onChange(run));
  }
  run.equal = prompts.map((_, at) => firstDifference(run.alone.spans[at].text, run.company.spans[at].text));
  onChange(run);
  return run;
}

/** How many prompts fit into the time at a speed that a warm-up has shown; at most as many as slots. */
export async function usualCount(signal) {
  const slots = await slotsOf(signal);
  return Math.min(32, Math.max(2, slots.length || 8));
}

/** Each prompt as a message in the model's chat template; as it is where the model has none. */
async function templated(texts, signal) {
  try {
    const made = texts.map((content) => {
      return get("apply-template", { json: { messages: [{ role: "user", content }] }, signal });
    });
    return (await Promise.all(made)).map(({ prompt }) => prompt);
  } catch (error) {
    if (error.status === 400 || error.status === 501) return texts;
    throw error;
  }
}

async function slotsOf(signal) {
  try {
    return await get("slots", { signal });
  } catch (error) {
    if (error.status === 501 || error.code === "model_not_loaded") return []; // --no-slots, or the first request loads it
    throw error;
  }
}

const busySlots = async (signal) => (await slotsOf(signal)).filter((slot) => slot.is_processing).length;

const greedy = (prompt, max_tokens) => {
  return { prompt, max_tokens, temperature: 0, cache_prompt: false, return_token_ids: true, seed: 1 };
};

/** Tokens/s of one request alone; the engine's buffers are warm after it. */
async function warmUp(prompt, signal) {
  const json = { ...greedy(prompt, LEAST_TOKENS), ignore_eos: true };
  await (await call("v1/completions", { json: { ...json, max_tokens: 2 }, signal })).json();
  const start = performance.now();
  const { usage } = await get("v1/completions", { json, signal });
  return usage.completion_tokens / ((performance.now() - start) / 1000);
}

/** Times of a pass count in seconds from its start. `end` of a span is null until its text is whole. */
function newPass(count) {
  const span = () => ({ start: null, first: null, end: null, text: "", tokens: 0 });
  return { spans: Array.from({ length: count }, span), seconds: 0, tokens: 0, cached: 0, startedAt: performance.now() };
}

/** Sends requests one after the other; a request is the places of its prompts, and the prompts. */
async function pass(made, requests, maxTokens, signal, onChange) {
  const now = () => (performance.now() - made.startedAt) / 1000;
  for (const [places, prompts] of requests) {
    for (const at of places) made.spans[at].start = now();
    const json = { ...greedy(prompts, maxTokens), stream: true, stream_options: { include_usage: true } };
    for await (const chunk of events("v1/completions", { json, signal })) {
      for (const choice of chunk.choices) take(choice, made.spans[places[choice.index]], now());
      made.cached += chunk.usage?.prompt_tokens_details?.cached_tokens ?? 0;
      made.seconds = now();
      onChange();
    }
    made.seconds = now();
  }
  made.tokens = made.spans.reduce((sum, { tokens }) => sum + tokens, 0);
}

function take(choice, span, seconds) {
  span.first ??= seconds;
  span.text += choice.text;
  span.tokens += choice.token_ids?.length ?? 0;
  if (choice.finish_reason) span.end = seconds;
}

/** True for equal texts, else the place of the first character that differs. */
export function firstDifference(one, other) {
  if (one === other) return true;
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return at;
}
