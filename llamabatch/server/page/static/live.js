// The live batch: slots, queue and speeds, from the events of /slots?stream=1.

import { events } from "./api.js";
import { html, svg } from "./dom.js";
import { Sparkline } from "./sparkline.js";

const LANES = 5; // prefix groups that have a place beside the rows; further ones share the last
const WIDTH = 1000; // of a bar, in its own units
const RETRY_MS = 2000;
const CALM_MS = 1000; // between drawings, where the user wants little motion
const REASONS = {
  slot: "all slots are taken",
  cells: "the KV cache has no room",
  grammar: "its grammar is compiled",
  company: "waits for company",
  step: "enters with the next step",
};
const TILES = [
  ["rows", "Rows per step", (view) => number(view.rates.rows_per_step, 1)],
  ["speed", "Tokens/s", (view) => number(view.rates.tokens_per_s, 0)],
  ["prompt", "Prompt tokens/s", (view) => number(view.rates.prompt_tokens_per_s, 0)],
  ["gap", "Gap p50 / p95 / max, ms", (view) => ["p50", "p95", "max"].map((each) => ms(view.rates[`gap_${each}_s`])).join(" / ")],
  ["running", "Running / slots", (view) => `${view.slots.filter(isRunning).length} / ${view.slots.length}`],
  ["queue", "Waiting", (view) => number(view.queue.n, 0)],
];

const isRunning = (slot) => slot.state !== "free";
const number = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const ms = (seconds) => (seconds === null ? "–" : number(seconds * 1000, seconds < 0.01 ? 1 : 0));

export class LiveView {
  #stop = null;
  #notice = html("p", { class: "notice", role: "status", hidden: true });
  #tiles = new Map();
  #rows = [];
  #body = html("tbody");
  #queue = html("div", { class: "queue" });
  #totals = html("p", { class: "hint" });
  #speed;
  #filled;
  #drawnAt = 0;
  #section;

  constructor(section) {
    this.#section = section;
    this.#build();
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#close() : section.hidden || this.#open()));
  }

  /** The view without figures. */
  #build() {
    this.#tell("");
    this.#rows = [];
    this.#speed = new Sparkline("Tokens/s");
    this.#filled = new Sparkline("Rows per step");
    for (const part of [this.#body, this.#queue, this.#totals]) part.replaceChildren();
    const tiles = TILES.map(([name, label]) => {
      const value = html("dd", {}, "–");
      this.#tiles.set(name, value);
      return html("div", { class: `tile ${name}` }, html("dt", {}, label), value);
    });
    const head = ["Slot", "Tier", "Prompt, then output", "Tokens"].map((label) => html("th", { scope: "col" }, label));
    this.#section.replaceChildren(
      html("div", { class: "bar" }, html("h2", {}, "Live batch"), legend()),
      this.#notice,
      html("dl", { class: "tiles" }, tiles),
      html("div", { class: "sparklines" }, this.#speed.element, this.#filled.element),
      html("table", { class: "slots" }, html("caption", { class: "unseen" }, "Slots of the engine"), html("thead", {}, html("tr", {}, head)), this.#body),
      html("h3", {}, "Queue"),
      this.#queue,
      this.#totals,
    );
  }

  show() {
    this.#open();
  }

  hide() {
    this.#close();
  }

  /** Shows the engine of another model. */
  restart() {
    this.#build();
    if (!this.#section.hidden) this.#open();
  }

  stop() {
    return false;
  }

  #open() {
    this.#close();
    this.#stop = new AbortController();
    this.#watch(this.#stop.signal);
  }

  #close() {
    this.#stop?.abort();
  }

  async #watch(signal) {
    while (!signal.aborted) {
      try {
        for await (const view of events("slots?stream=1", { isLive: true, signal })) this.#draw(view);
      } catch (error) {
        if (signal.aborted) return;
        this.#tell(error.code === "model_not_loaded" ? "The model is not loaded: the first request loads it." : error.message);
        if ([401, 403, 404, 501].includes(error.status)) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  /** Shows why there are no new figures, and the old ones as such; "" for new ones. */
  #tell(message) {
    this.#notice.hidden = !message;
    this.#section.classList.toggle("stale", Boolean(message));
    if (this.#notice.textContent !== message) this.#notice.textContent = message;
  }

  #draw(view) {
    if (!view.slots) return this.#tell(view.message ?? `The server is ${view.state}.`);
    this.#tell("");
    this.#speed.add(view.time, view.rates.tokens_per_s);
    this.#filled.add(view.time, view.rates.rows_per_step);
    const now = performance.now();
    if (matchMedia("(prefers-reduced-motion: reduce)").matches && now - this.#drawnAt < CALM_MS) return;
    this.#drawnAt = now;
    for (const [name, , text] of TILES) this.#tiles.get(name).textContent = text(view);
    this.#speed.draw();
    this.#filled.draw();
    this.#drawSlots(view.slots);
    this.#drawQueue(view.queue);
    const { totals } = view;
    this.#totals.textContent =
      `Since the start: ${number(totals.requests, 0)} ${totals.requests === 1 ? "request" : "requests"}, ${number(totals.generated_tokens, 0)} tokens generated, ` +
      `${number(totals.prompt_tokens, 0)} of prompts, ${number(totals.cached_tokens, 0)} of them from shared prefixes, ` +
      `${number(totals.errors, 0)} errors, ${number(totals.preemptions, 0)} preemptions, ${number(totals.restarts, 0)} restarts.`;
  }

  #drawSlots(slots) {
    while (this.#rows.length < slots.length) {
      const row = new Row(this.#rows.length);
      this.#rows.push(row);
      this.#body.append(row.element);
    }
    while (this.#rows.length > slots.length) this.#rows.pop().element.remove();
    const groups = prefixGroups(slots);
    const engines = new Set(slots.map((slot) => slot.engine)).size;
    slots.forEach((slot, at) => this.#rows[at].draw(slot, groups, at, engines > 1));
  }

  #drawQueue(queue) {
    const items = queue.next.map((one) => {
      const facts = `${one.tier}, ${number(one.n_prompt, 0)} tokens, ${number(one.age_s, 1)} s`;
      return html("li", {}, html("span", { class: `tier ${one.tier}` }, facts), ` ${REASONS[one.reason] ?? one.reason}`);
    });
    const more = queue.n - queue.next.length;
    this.#queue.replaceChildren(
      items.length ? html("ol", {}, items) : html("p", { class: "hint" }, "Nothing waits."),
      ...(more > 0 ? [html("p", { class: "hint" }, `and ${number(more, 0)} more`)] : []),
    );
  }
}

/** Groups of slots that began with cells of one another: key -> { lane, first, last }, the rows they lie in. */
function prefixGroups(slots) {
  const found = new Map();
  slots.forEach((slot, at) => {
    if (!isRunning(slot) || slot.prefix < 0) return;
    const key = groupOf(slot);
    const group = found.get(key) ?? { first: at, count: 0 };
    found.set(key, { ...group, last: at, count: group.count + 1 });
  });
  const shared = [...found].filter(([, group]) => group.count > 1);
  return new Map(shared.map(([key, group], lane) => [key, { ...group, lane: Math.min(lane, LANES - 1) }]));
}

const groupOf = (slot) => `${slot.engine}.${slot.prefix}`;

/** A row a slot: the bar has the prompt on the left and the output on the right, to the scale of the context. */
class Row {
  #slot = html("th", { scope: "row" });
  #tier = html("td", { class: "tier" });
  #tokens = html("td", { class: "tokens" });
  #bar = svg("svg", { viewBox: `0 0 ${WIDTH} 20`, preserveAspectRatio: "none", class: "slot-bar", "aria-hidden": "true" });
  #gutter = svg("svg", { viewBox: `0 0 ${LANES * 8} 24`, preserveAspectRatio: "none", class: "gutter", "aria-hidden": "true" });
  #rects = Object.fromEntries(
    ["room", "whole", "cached", "done", "output"].map((name) => [name, svg("rect", { class: name, y: "0", height: "20" })]),
  );

  constructor() {
    this.#bar.append(...Object.values(this.#rects));
    const drawn = html("td", { class: "drawn" }, html("div", { class: "drawing" }, this.#gutter, this.#bar));
    this.element = html("tr", {}, this.#slot, this.#tier, drawn, this.#tokens);
  }

  draw(slot, groups, at, hasEngines) {
    const group = isRunning(slot) ? groups.get(groupOf(slot)) : undefined;
    this.element.className = slot.state.replaceAll(" ", "-");
    text(this.#slot, hasEngines ? `${slot.engine}.${slot.id}` : slot.id);
    text(this.#tier, slot.tier ?? "");
    this.#tier.className = `tier ${slot.tier ?? ""}`;
    text(this.#tokens, tokensOf(slot));
    this.#drawBar(slot, group);
    this.#drawGutter(groups, at, group);
  }

  #drawBar(slot, group) {
    const { n_prompt = 0, n_prompt_done = 0, n_cached = 0, n_output = 0, max_output = 0 } = slot;
    const room = isRunning(slot) ? Math.max(1, n_prompt + max_output) : slot.n_ctx;
    // the square root keeps short prompts visible beside a long room
    const x = (tokens) => WIDTH * Math.sqrt(Math.min(1, tokens / room));
    const place = (name, from, to) => {
      this.#rects[name].setAttribute("x", x(from));
      this.#rects[name].setAttribute("width", Math.max(0, x(to) - x(from)));
    };
    place("room", 0, isRunning(slot) ? room : slot.n_cells);
    place("whole", 0, n_prompt);
    place("cached", 0, Math.min(n_cached, n_prompt_done));
    place("done", Math.min(n_cached, n_prompt_done), n_prompt_done);
    place("output", n_prompt, n_prompt + n_output);
    this.#rects.cached.dataset.lane = group?.lane ?? "";
  }

  #drawGutter(groups, at, own) {
    const lines = [...groups.values()].filter((each) => each.first <= at && at <= each.last).map((each) => {
      const x = each.lane * 8 + 4;
      const [top, bottom] = [each.first === at ? 12 : 0, each.last === at ? 12 : 24];
      const branch = each === own ? `M${x} 12H${LANES * 8}` : "";
      return svg("path", { d: `M${x} ${top}V${bottom}${branch}`, "data-lane": each.lane });
    });
    const shape = lines.map((line) => line.getAttribute("d") + line.dataset.lane).join();
    if (this.#gutter.dataset.shape === shape) return;
    this.#gutter.dataset.shape = shape;
    this.#gutter.replaceChildren(...lines);
  }
}

function text(element, value) {
  const wanted = String(value);
  if (element.textContent !== wanted) element.textContent = wanted;
}

function tokensOf(slot) {
  if (!isRunning(slot)) return slot.n_cells ? `free, ${number(slot.n_cells, 0)} kept` : "free";
  const shared = slot.n_cached ? ` · ${number(slot.n_cached, 0)} shared` : "";
  const prompt = slot.n_prompt_done < slot.n_prompt ? `${number(slot.n_prompt_done, 0)}/${number(slot.n_prompt, 0)}` : number(slot.n_prompt, 0);
  if (slot.waits_for !== null) return `${prompt} · waits for slot ${slot.waits_for}'s prefix`;
  return `${prompt} + ${number(slot.n_output, 0)}${shared}`;
}

function legend() {
  const entries = [
    ["cached", "shared prefix"],
    ["done", "prompt computed"],
    ["whole", "prompt to come"],
    ["output", "output"],
    ["room", "room left"],
  ];
  return html("ul", { class: "legend" }, entries.map(([name, label]) => html("li", {}, html("span", { class: `swatch ${name}` }), label)));
}
