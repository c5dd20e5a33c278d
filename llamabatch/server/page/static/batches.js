// Files of requests, run in the rows that nothing else needs: /v1/files and /v1/batches.

import { call, get } from "./api.js";
import { announce, download, html } from "./dom.js";

const POLL_MS = 1000;
const QUESTIONS = ["What is the capital of France?", "What is 12 plus 30?", "What is the opposite of hot?", "Write a short story about a fox."];
const OPEN = ["validating", "in_progress", "finalizing", "cancelling"];

export class BatchesView {
  #list = html("div", { class: "batches" });
  #error = html("p", { class: "error", role: "alert", hidden: true });
  #timer = 0;
  #isShown = false;
  #hasFailedLook = false; // the error that is shown is that of the last look
  #open = new Set(); // ids of batches that ran at the last look

  constructor(section) {
    const input = html("input", { type: "file", id: "batch-file", accept: ".jsonl,application/jsonl", class: "unseen" });
    input.addEventListener("change", () => {
      this.#send(input.files[0]);
      input.value = "";
    });
    const drop = html("label", { for: "batch-file", class: "drop" }, html("strong", {}, "Drop a JSONL file here"), html("span", {}, "or choose one: a request a line, with custom_id, method, url and body"), input);
    for (const kind of ["dragover", "dragleave", "drop"]) {
      drop.addEventListener(kind, (event) => {
        event.preventDefault();
        drop.classList.toggle("over", kind === "dragover");
        if (kind === "drop" && event.dataTransfer.files[0]) this.#send(event.dataTransfer.files[0]);
      });
    }
    section.append(
      html("div", { class: "bar" }, html("h2", {}, "Batches")),
      html("p", { class: "lead" }, "A batch runs in the background: its requests take the slots that nothing else needs. The live batch shows them as tier flex."),
      drop,
      html("p", { class: "row" }, html("button", { type: "button", onclick: () => this.#send(sample()) }, "Try a sample of four requests")),
      this.#error,
      this.#list,
    );
  }

  show() {
    this.#isShown = true;
    this.#look();
  }

  hide() {
    this.#isShown = false;
    clearTimeout(this.#timer);
  }

  stop() {
    return false;
  }

  async #send(file) {
    await this.#trying(async () => {
      const endpoint = endpointOf(await file.slice(0, 2 ** 20).text());
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", file);
      const { id } = await get("v1/files", { method: "POST", body: form });
      await call("v1/batches", { json: { input_file_id: id, endpoint, completion_window: "24h", metadata: { name: file.name.slice(0, 200) } } });
      announce(`${file.name} was sent.`);
    });
    this.#look();
  }

  /** Runs an action of the user; where it fails the user is told. */
  async #trying(action) {
    this.#tell("");
    try {
      await action();
    } catch (error) {
      this.#tell(error.message);
    }
  }

  async #look() {
    clearTimeout(this.#timer);
    try {
      const { data } = await get("v1/batches?limit=20");
      for (const each of data) if (this.#open.has(each.id) && !OPEN.includes(each.status)) announce(`${nameOf(each)}: ${each.status}`);
      this.#open = new Set(data.filter((each) => OPEN.includes(each.status)).map((each) => each.id));
      this.#draw(data);
      if (this.#hasFailedLook) this.#tell("");
    } catch (error) {
      this.#tell(error.message);
      this.#hasFailedLook = true;
    }
    if (this.#isShown) this.#timer = setTimeout(() => this.#look(), POLL_MS);
  }

  #tell(message) {
    this.#hasFailedLook = false;
    this.#error.hidden = !message;
    if (this.#error.textContent !== message) this.#error.textContent = message;
  }

  #draw(batches) {
    const shape = JSON.stringify(batches);
    if (this.#list.dataset.shape === shape) return; // a button that has the focus stays
    this.#list.dataset.shape = shape;
    const focused = document.activeElement?.dataset?.name;
    this.#list.replaceChildren(...(batches.length ? batches.map((each) => this.#batch(each)) : [html("p", { class: "hint" }, "There are no batches yet.")]));
    if (focused) this.#list.querySelector(`[data-name="${CSS.escape(focused)}"]`)?.focus();
  }

  #batch(batch) {
    const { total, completed, failed } = batch.request_counts;
    const done = completed + failed;
    const button = (kind, label, onclick) => html("button", { type: "button", "data-name": `${kind}-${batch.id}`, onclick }, label);
    const file = (kind, label, id) => (id ? button(kind, label, () => this.#trying(() => save(id, `${batch.id}-${kind}.jsonl`))) : null);
    const errors = (batch.errors?.data ?? []).slice(0, 5).map(({ line, message }) => html("p", { class: "error" }, line ? `Line ${line}: ${message}` : message));
    return html(
      "article",
      { class: "batch", "aria-label": nameOf(batch) },
      html("h3", {}, nameOf(batch), " ", html("span", { class: "badge", "data-state": batch.status }, batch.status.replaceAll("_", " "))),
      html("progress", { max: Math.max(1, total), value: done, "aria-label": "done" }),
      html("p", { class: "hint" }, `${done} of ${total} done${failed ? `, ${failed} failed` : ""} · ${batch.endpoint} · ${new Date(batch.created_at * 1000).toLocaleString()}`),
      errors,
      html(
        "div",
        { class: "row" },
        file("output", "Download results", batch.output_file_id),
        file("errors", "Download errors", batch.error_file_id),
        OPEN.slice(0, 2).includes(batch.status) ? button("cancel", "Cancel", () => this.#trying(() => call(`v1/batches/${batch.id}/cancel`, { method: "POST" }))) : null,
      ),
    );
  }
}

/** A file of requests to try. */
function sample() {
  const lines = QUESTIONS.map((content, at) => {
    const body = { messages: [{ role: "user", content }], max_tokens: 64 };
    return JSON.stringify({ custom_id: `sample-${at + 1}`, method: "POST", url: "/v1/chat/completions", body });
  });
  return new File([`${lines.join("\n")}\n`], "sample.jsonl");
}

const nameOf = (batch) => batch.metadata?.name ?? batch.id;

async function save(id, name) {
  download(name, await (await call(`v1/files/${id}/content`)).blob());
}

/** The url of the first line. Raises Error. */
function endpointOf(text) {
  const line = text.split("\n").find((each) => each.trim()) ?? "";
  let url;
  try {
    url = JSON.parse(line).url;
  } catch {
    throw new Error(`The first line is no JSON: ${line.slice(0, 80)}`);
  }
  if (typeof url !== "string") throw new Error('The first line has no "url", as "/v1/chat/completions".');
  return url;
}
