// The view "Alone or in company": prompts, a picture that grows, and the texts beside one another.

import { chosenModel, get } from "./api.js";
import { compare, MOST_PROMPTS, usualCount } from "./comparison.js";
import { announce, download, html } from "./dom.js";
import { factor, figure, NARROW, pngBlob, sentence, svgBlob, WIDE } from "./figure.js";

const ORDER = "llamabatch.aloneFirst"; // in sessionStorage: which run was first the last time
const HEROES = ["Anna and a red boat", "Tom and an old clock", "Mia and a small dog", "Ben and a lost key", "Lucy and a tall tree", "Sam and a green hat", "Eva and a brown bear", "Leo and a blue kite"];
const PLACES = ["in the forest", "by the sea", "at the market", "in the garden"];
const NEAR = 24; // characters shown on each side of a difference

const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 700px)");

export class CompareView {
  #prompts = html("textarea", { id: "compare-prompts", rows: "6", spellcheck: "false" });
  #start = html("button", { type: "button", class: "main", onclick: () => this.#compare() }, "Compare");
  #halt = html("button", { type: "button", disabled: true, onclick: () => this.stop() }, "Stop");
  #png = html("button", { type: "button", disabled: true, onclick: () => this.#save("png") }, "Download PNG");
  #svg = html("button", { type: "button", disabled: true, onclick: () => this.#save("svg") }, "Download SVG");
  #state = html("p", { class: "hint", id: "compare-state" });
  #error = html("p", { class: "error", role: "alert", hidden: true });
  #picture = html("div", { class: "picture" });
  #details = html("div", { class: "details" });
  #stopper = null;
  #run = null;
  #facts = [];
  #frame = 0;
  #isFilled = false;

  constructor(section) {
    section.append(
      html("div", { class: "bar" }, html("h2", {}, "Alone or in company")),
      html("p", { class: "lead" }, "This server runs the same prompts one by one, and then all of them together. The picture shows both speeds, and whether a text is different in company."),
      html("div", { class: "row" }, this.#start, this.#halt, this.#png, this.#svg),
      this.#state,
      this.#error,
      this.#picture,
      this.#details,
      html("details", { class: "options" }, html("summary", {}, "Prompts"), html("label", { for: "compare-prompts" }, `One a line, at most ${MOST_PROMPTS}`), this.#prompts),
      html("p", { class: "hint" }, "How it is measured: sampling is greedy. A short request warms up the model. No prompt comes from the prefix cache (cache_prompt: false). One by one: each request waits for the one before it. Together: one request has all prompts. Which of the two goes first changes each time. Requests of other people disturb both."),
    );
    for (const each of [dark, narrow]) each.addEventListener("change", () => this.#run && this.#draw());
  }

  async show() {
    if (this.#isFilled) return;
    try {
      const count = await usualCount();
      const prompts = Array.from({ length: count }, (_, at) => `Write a short story about ${HEROES[at % 8]} ${PLACES[Math.floor(at / 8) % 4]}.`);
      this.#prompts.value ||= prompts.join("\n");
      this.#isFilled = true;
    } catch (error) {
      this.#fail(error);
    }
  }

  hide() {} // a comparison goes on

  stop() {
    const runs = this.#stopper !== null;
    this.#stopper?.abort();
    return runs;
  }

  async #compare() {
    await this.show();
    const texts = this.#prompts.value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (texts.length < 2 || texts.length > MOST_PROMPTS) {
      return this.#fail(new Error(`There are ${texts.length} prompts; give 2 to ${MOST_PROMPTS}, one a line.`));
    }
    this.#begin();
    const isAloneFirst = sessionStorage.getItem(ORDER) !== "true";
    sessionStorage.setItem(ORDER, isAloneFirst);
    try {
      this.#facts = await factsOf();
      const onChange = (run) => {
        this.#run = run;
        this.#frame ||= requestAnimationFrame(() => this.#draw());
      };
      this.#run = await compare(texts, { isAloneFirst, signal: this.#stopper.signal, onChange });
      this.#finish();
    } catch (error) {
      if (this.#stopper.signal.aborted) this.#state.textContent = "Stopped.";
      else this.#fail(error);
    }
    this.#stopper = null;
    this.#start.disabled = false;
    this.#halt.disabled = true;
  }

  #begin() {
    this.#stopper = new AbortController();
    this.#error.hidden = true;
    this.#state.textContent = "Warming up …";
    this.#details.replaceChildren();
    this.#picture.replaceChildren();
    for (const each of [this.#start, this.#png, this.#svg]) each.disabled = true;
    this.#halt.disabled = false;
  }

  #fail(error) {
    this.#state.textContent = "";
    this.#error.textContent = error.message;
    this.#error.hidden = false;
  }

  #finish() {
    this.#draw();
    this.#png.disabled = this.#svg.disabled = false;
    this.#details.replaceChildren(...details(this.#run));
    announce(sentence(this.#run));
  }

  #draw() {
    this.#frame = 0;
    const { alone, company, equal, isAloneFirst } = this.#run;
    const isTogether = company && !(alone && !isAloneFirst);
    this.#state.textContent = equal ? sentence(this.#run) : isTogether ? "Together …" : "One by one …";
    this.#picture.replaceChildren(figure(this.#run, this.#facts, narrow.matches ? NARROW : WIDE, dark.matches));
  }

  async #save(kind) {
    const picture = figure(this.#run, this.#facts, WIDE, dark.matches);
    picture.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    const name = `llamabatch-${factor(this.#run)}x.${kind}`;
    download(name, kind === "svg" ? svgBlob(picture) : await pngBlob(picture));
  }
}

/** The foot of the picture: model, version, slots, day. */
async function factsOf() {
  const [{ data }, { version }] = await Promise.all([get("v1/models"), get("version")]);
  const name = chosenModel();
  const { id, meta } = data.find((each) => each.id === name) ?? data[0];
  const size = meta?.n_params ? [`${parameters(meta.n_params)} parameters`] : [];
  return [id, ...size, `version ${version}`, new Date().toISOString().slice(0, 10)];
}

const parameters = (count) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(count);

function details(run) {
  const { alone, company, equal } = run;
  const cached = alone.cached + company.cached;
  const notes = [
    `At most ${run.maxTokens} tokens a prompt; ${alone.tokens} tokens one by one, ${company.tokens} together. ${run.isAloneFirst ? "One by one" : "Together"} went first.`,
    cached ? `${cached} tokens of prompts came from the prefix cache.` : "No token of a prompt came from the prefix cache.",
    run.busy ? `${run.busy} slots had other requests at the start: the figures are disturbed.` : null,
  ].filter(Boolean);
  const head = ["", "Prompt", "Text", "Alone, s", "In company, s"].map((label) => html("th", { scope: "col" }, label));
  const rows = run.prompts.map((prompt, at) => row(prompt, equal[at], alone.spans[at], company.spans[at]));
  return [
    html("ul", { class: "notes" }, notes.map((note) => html("li", {}, note))),
    html("details", { open: !equal.every((each) => each === true) }, html("summary", {}, "The texts"), html("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "The texts" }, html("table", { class: "texts" }, html("thead", {}, html("tr", {}, head)), html("tbody", {}, rows)))),
  ];
}

function row(prompt, equal, alone, company) {
  const isEqual = equal === true;
  const mark = html("td", { class: isEqual ? "equal" : "differs" }, isEqual ? "✓" : "≠", html("span", { class: "unseen" }, isEqual ? " equal" : " differs"));
  const text = isEqual ? [alone.text] : difference(alone.text, company.text, equal);
  const seconds = ({ start, end }) => (end - start).toFixed(2);
  return html("tr", {}, mark, html("td", {}, prompt), html("td", { class: "text" }, text), html("td", {}, seconds(alone)), html("td", {}, seconds(company)));
}

/** Both texts around the first place where they differ. */
function difference(one, other, at) {
  const around = (text) => [text.slice(Math.max(0, at - NEAR), at), html("mark", {}, text.slice(at, at + NEAR) || "∅")];
  return [
    html("p", {}, `They differ from character ${at + 1} on.`),
    html("p", {}, "Alone: … ", ...around(one), " …"),
    html("p", {}, "In company: … ", ...around(other), " …"),
  ];
}
