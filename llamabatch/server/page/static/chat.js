// Conversations side by side, each with a stream of its own.

import { announce, copyButton, download, html } from "./dom.js";
import { Conversation } from "./conversation.js";
import { markdown } from "./markdown.js";

const KEPT = "llamabatch.conversations"; // in localStorage, where the user asks for it
const MOST = 12;
const STATES = {
  waiting: "waits for one of the browser's connections to this server",
  asked: "waits for the first token",
  answering: "answering",
};
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 5, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Most tokens", { min: 1, max: 1_000_000, step: 1 }],
  ["seed", "Seed", { min: 0, max: 2 ** 31, step: 1 }],
];

export class ChatView {
  #columns = [];
  #grid;
  #keep;
  #all; // the field that asks all conversations
  #number = 0;

  constructor(section) {
    const kept = readKept();
    this.#grid = html("div", { class: "columns" });
    this.#keep = html("input", { type: "checkbox", id: "keep", onchange: () => this.#save(true) });
    this.#keep.checked = kept.length > 0;
    this.#add_button = html("button", { type: "button", onclick: () => this.#add().focus() }, "New conversation");
    this.#all = composer("Ask all conversations at once", "Ask all", (...given) => this.#askAll(...given));
    const keep = html("label", { for: "keep", class: "check" }, this.#keep, "Keep them in this browser");
    section.append(
      html("div", { class: "bar" }, html("h2", {}, "Conversations"), this.#add_button, keep),
      this.#grid,
      this.#all,
    );
    takesDrops(this.#all, this.#all);
    for (const name of ["dragover", "drop"]) {
      section.addEventListener(name, (event) => event.preventDefault()); // else the browser leaves the page for a file
    }
    for (const each of kept.length ? kept : [{}]) this.#add(each);
  }

  #add_button;

  show() {}

  hide() {} // answers go on

  /** The kinds of files that the model reads, of those in KINDS. The ways to attach others are hidden. */
  set reads(kinds) {
    this.#grid.parentElement.dataset.reads = kinds.join(" ");
  }

  /** Ends the answer of the conversation that `target` is in, else all of them. */
  stop(target) {
    const column = this.#columns.find((each) => each.element.contains(target));
    const chosen = column ? [column] : this.#columns;
    return chosen.filter((each) => each.conversation.stop()).length > 0;
  }

  #add(kept) {
    this.#number += 1;
    const column = new Column(this.#number, kept, { onSave: () => this.#save(), onRemove: () => this.#remove(column) });
    this.#columns.push(column);
    this.#grid.append(column.element);
    this.#counted();
    return column;
  }

  #remove(column) {
    column.conversation.stop();
    column.element.remove();
    this.#columns = this.#columns.filter((each) => each !== column);
    this.#counted();
    if (this.#columns.length === 0) this.#add();
    this.#columns[0].focus();
  }

  #counted() {
    this.#add_button.disabled = this.#columns.length >= MOST;
    this.#all.hidden = this.#columns.length < 2;
    this.#save();
  }

  #askAll(...given) {
    for (const { conversation } of this.#columns) if (!conversation.isBusy) conversation.ask(...given);
  }

  /** `isNew`: the user has just changed whether to keep them. */
  #save(isNew = false) {
    try {
      if (this.#keep.checked) localStorage.setItem(KEPT, JSON.stringify(this.#columns.map((each) => each.conversation)));
      else if (isNew) localStorage.removeItem(KEPT);
    } catch {
      this.#keep.checked = false; // the browser keeps nothing, or has no room
      announce("The browser has no room for the conversations.");
    }
  }
}

function readKept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? [];
  } catch {
    return [];
  }
}

/** A conversation on the screen. */
class Column {
  #name;
  #log;
  #state;
  #buttons;
  #composer;
  #frame = 0;
  #onSave;
  #drawn = new WeakMap(); // message -> its element, and the text that it shows

  constructor(number, kept, { onSave, onRemove }) {
    this.#name = `Conversation ${number}`;
    this.#onSave = onSave;
    this.conversation = new Conversation(() => this.#changed(), kept);
    this.#log = html("div", { class: "log", tabindex: "0", role: "group", "aria-label": `Messages of ${this.#name}` });
    this.#state = html("p", { class: "state" });
    const button = (label, onclick) => html("button", { type: "button", onclick }, label);
    this.#buttons = {
      stop: button("Stop", () => this.conversation.stop()),
      again: button("Regenerate", () => this.conversation.regenerate()),
      save: button("Export", () => download(`${this.#name}.md`, new Blob([this.conversation.toMarkdown()], { type: "text/markdown" }))),
      clear: button("Clear", () => this.conversation.clear()),
    };
    const remove = html("button", { type: "button", class: "quiet", "aria-label": `Close ${this.#name}`, onclick: onRemove }, "✕");
    this.#composer = composer(`Message of ${this.#name}`, "Send", (...given) => this.#ask(...given));
    this.element = html(
      "article",
      { class: "column", "aria-label": this.#name },
      html("header", {}, html("h3", {}, this.#name), remove),
      this.#options(number),
      this.#log,
      html("div", { class: "under" }, this.#state, ...Object.values(this.#buttons)),
      this.#composer,
    );
    takesDrops(this.element, this.#composer);
    this.#draw();
  }

  focus() {
    this.#composer.querySelector("textarea").focus();
  }

  #ask(...given) {
    if (this.conversation.isBusy) return false;
    this.conversation.ask(...given);
    return true;
  }

  #options(number) {
    const { options } = this.conversation;
    const set = (name, value) => {
      options[name] = value;
      this.#onSave();
    };
    const numbers = NUMBERS.map(([name, label, range]) => {
      const input = html("input", { type: "number", id: `${name}-${number}`, placeholder: "model's own", ...range });
      input.value = options[name] ?? "";
      input.addEventListener("change", () => set(name, input.value === "" ? undefined : input.valueAsNumber));
      return html("div", {}, html("label", { for: input.id }, label), input);
    });
    const texts = [
      ["system", "System prompt", "You are …"],
      ["tools", "Tools (JSON)", '[{"type": "function", "function": {"name": …}}]'],
    ].map(([name, label, placeholder]) => {
      const area = html("textarea", { id: `${name}-${number}`, rows: "2", placeholder, spellcheck: "false" });
      area.value = options[name] ?? "";
      area.addEventListener("change", () => set(name, area.value.trim()));
      return html("div", { class: "wide" }, html("label", { for: area.id }, label), area);
    });
    return html("details", { class: "options" }, html("summary", {}, "Options"), html("div", { class: "fields" }, numbers, texts));
  }

  #changed() {
    if (!this.conversation.isBusy) this.#finished();
    this.#frame ||= requestAnimationFrame(() => this.#draw()); // many pieces, one drawing
  }

  #finished() {
    const last = this.conversation.messages.at(-1);
    if (last) announce(`${this.#name}: ${last.error ?? last.note ?? last.content.slice(0, 300)}`);
    this.#onSave();
  }

  #draw() {
    this.#frame = 0;
    const { messages, state, isBusy } = this.conversation;
    const isAtEnd = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 60;
    const elements = messages.map((message, at) => this.#message(message, isBusy && at === messages.length - 1));
    for (const [at, element] of elements.entries()) {
      if (this.#log.children[at] !== element) this.#log.insertBefore(element, this.#log.children[at] ?? null);
    }
    while (this.#log.children.length > elements.length) this.#log.lastChild.remove();
    if (isAtEnd) this.#log.scrollTop = this.#log.scrollHeight;
    this.#state.textContent = STATES[state] ?? "";
    this.#buttons.stop.disabled = !isBusy;
    this.#buttons.again.disabled = !this.conversation.canRegenerate;
    this.#buttons.clear.disabled = this.#buttons.save.disabled = isBusy || messages.length === 0;
    this.#composer.querySelector("button.main").disabled = isBusy;
  }

  /** The element of a message: that of before where nothing of it has changed. */
  #message(message, isComing) {
    const shown = JSON.stringify([message, isComing], (name, value) => (name === "url" ? undefined : value)); // not megabytes
    const before = this.#drawn.get(message);
    if (before?.shown === shown) return before.element;
    const element = before?.element ?? html("div", { class: `message ${message.role}` });
    element.replaceChildren(...parts(message, isComing, before?.element));
    this.#drawn.set(message, { shown, element });
    return element;
  }
}

function parts(message, isComing, before) {
  if (message.role === "user") {
    const text = message.content ? html("p", { class: "asked" }, message.content) : null;
    const shown = message.files?.length ? html("div", { class: "shown" }, message.files.map(preview)) : null;
    return [html("span", { class: "unseen" }, "You: "), html("div", { class: "told" }, shown, text)];
  }
  return [
    message.reasoning ? thinking(message, isComing, before?.querySelector("details.thinking")?.open) : null,
    message.content ? html("div", { class: "text" }, markdown(message.content)) : null,
    ...message.calls.map(({ name, arguments: text }) => {
      return html("div", { class: "call" }, html("span", {}, "calls "), html("code", {}, `${name}(${text})`));
    }),
    isComing && !message.content && !message.reasoning ? html("p", { class: "dots", "aria-hidden": "true" }, "…") : null,
    message.error ? html("p", { class: "error", role: "alert" }, message.error) : null,
    isComing ? null : footer(message),
  ].filter(Boolean);
}

function thinking(message, isComing, isOpen = false) {
  const label = isComing && !message.content ? "Thinking …" : "Thinking";
  return html("details", { class: "thinking", open: isOpen }, html("summary", {}, label), html("p", {}, message.reasoning));
}

function footer(message) {
  const facts = [
    message.model,
    message.note,
    message.nTokens === undefined ? null : `${message.nTokens} tokens`,
    message.tokensPerS === undefined ? null : `${message.tokensPerS.toLocaleString("en", { maximumFractionDigits: message.tokensPerS < 100 ? 1 : 0 })} tokens/s`,
    message.firstS === undefined ? null : `first after ${(message.firstS * 1000).toFixed(0)} ms`,
  ].filter(Boolean);
  const button = message.content ? copyButton("Copy the answer", message.content) : null;
  return html("p", { class: "facts" }, html("span", {}, facts.join(" · ")), button);
}

// the files that the server reads: the format of each type, and the words for them
const KINDS = {
  image: {
    formats: { "image/png": "png", "image/jpeg": "jpeg", "image/webp": "webp", "image/gif": "gif", "image/bmp": "bmp" },
    words: "PNG, JPEG, WebP, GIF or BMP",
  },
  sound: {
    formats: {
      "audio/wav": "wav", "audio/x-wav": "wav", "audio/wave": "wav", "audio/vnd.wave": "wav",
      "audio/mpeg": "mp3", "audio/mp3": "mp3", "audio/flac": "flac", "audio/x-flac": "flac",
    },
    words: "WAV, MP3 or FLAC",
  },
};
const MOST_BYTES = 16 * 2 ** 20;

/**
 * A form that sends its text with Enter; Shift and Enter is a new line. Pictures and sounds are chosen, pasted or dropped
 * where the model reads them. `onSend`, which gets the text and the files, may refuse them with false.
 */
function composer(label, action, onSend) {
  const area = html("textarea", { rows: "2", "aria-label": label, placeholder: label });
  const note = html("p", { class: "error", role: "alert", hidden: true });
  const list = html("ul", { class: "attached", "aria-label": "Files to send", hidden: true });
  const input = html("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files" });
  const known = () => (element.closest("[data-reads]")?.dataset.reads ?? "").split(" ").filter(Boolean).map((kind) => ({ kind, ...KINDS[kind] }));
  const attach = () => {
    input.accept = known().flatMap(({ formats }) => Object.keys(formats)).join();
    input.click();
  };
  const choose = html("button", { type: "button", class: "attach", onclick: attach }, "Attach");
  let files = [];
  const draw = () => {
    list.replaceChildren(...files.map((each) => {
      const remove = () => {
        files = files.filter((other) => other !== each);
        draw();
        area.focus();
      };
      return html("li", {}, preview(each), html("button", { type: "button", class: "quiet", "aria-label": `Leave out ${each.name}`, onclick: remove }, "✕"));
    }));
    list.hidden = files.length === 0;
  };
  const add = async (given) => {
    const kinds = known();
    const found = [...given].map((file) => ({ file, of: kinds.find(({ formats }) => file.type in formats) }));
    const isGood = ({ file, of }) => of && file.size <= MOST_BYTES;
    const words = kinds.map((each) => each.words).join(", ");
    note.textContent = kinds.length
      ? found.filter((each) => !isGood(each)).map(({ file }) => `${file.name} is no ${words} file of at most 16 MB.`).join(" ")
      : "This model reads text alone. A server that is started with --mmproj reads pictures or sounds, too.";
    note.hidden = note.textContent === "";
    files.push(...(await Promise.all(found.filter(isGood).map(read))));
    draw();
  };
  const send = () => {
    const text = area.value.trim();
    if ((!text && files.length === 0) || onSend(text, files) === false) return;
    area.value = "";
    files = [];
    note.hidden = true;
    draw();
  };
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  area.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length === 0) return;
    event.preventDefault();
    add(event.clipboardData.files);
  });
  input.addEventListener("change", () => {
    add([...input.files]);
    input.value = "";
  });
  const button = html("button", { type: "button", class: "main", onclick: send }, action);
  const element = html("div", { class: "composer" }, note, list, area, input, choose, button);
  element.addEventListener("attach", ({ detail }) => add(detail));
  return element;
}

/** Lets files that are dropped on an element go to its composer. */
function takesDrops(element, composer) {
  for (const [name, isOver] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
    element.addEventListener(name, (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      element.classList.toggle("over", isOver);
      const { files } = event.dataTransfer;
      if (name === "drop") composer.dispatchEvent(new CustomEvent("attach", { detail: [...files] }));
    });
  }
}

/** A picture, or a sound with its name and the controls to play it. */
function preview({ name, url, kind }) {
  if (kind === "image") return html("img", { src: url, alt: name, title: name });
  const sound = html("audio", { src: url, controls: true, "aria-label": name });
  return html("figure", { class: "sound" }, sound, html("figcaption", {}, name));
}

function read({ file, of: { kind, formats } }) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result, kind, format: formats[file.type] });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
