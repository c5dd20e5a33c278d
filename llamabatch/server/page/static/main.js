// The frame of the page: views and their tabs, the key, the state of the server.

import { call, get, onKeyNeeded, useModel } from "./api.js";
import { BatchesView } from "./batches.js";
import { ChatView } from "./chat.js";
import { CompareView } from "./compare.js";
import { LiveView } from "./live.js";

const MODEL = "llamabatch.model"; // in sessionStorage: the chosen one of several
const POLL_MS = { loading: 1000, ready: 15_000, restarting: 1000 };
const STATE_TITLES = {
  loading: "loading the model",
  ready: "ready",
  restarting: "restarting the engine",
  draining: "shutting down",
  failed: "failed",
};

const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------- views

/** A view has show() and hide(), and stop(), which ends what it runs and says whether there was any. */
const views = {
  chat: new ChatView(byId("view-chat")),
  live: new LiveView(byId("view-live")),
  compare: new CompareView(byId("view-compare")),
  batches: new BatchesView(byId("view-batches")),
};
let shown = null;
const wanted = location.hash.slice(1); // the tab of batches opens once the server has said that it has them

function show(name, { focus = false } = {}) {
  if (name !== shown) views[shown]?.hide();
  for (const each of Object.keys(views)) {
    const isIt = each === name;
    byId(`view-${each}`).hidden = !isIt;
    byId(`tab-${each}`).setAttribute("aria-selected", isIt);
    byId(`tab-${each}`).tabIndex = isIt ? 0 : -1;
  }
  if (focus) byId(`tab-${name}`).focus();
  if (name !== shown) views[name].show();
  shown = name;
  history.replaceState(null, "", `#${name}`);
}

function openTabs() {
  return Object.keys(views).filter((name) => !byId(`tab-${name}`).hidden);
}

for (const name of Object.keys(views)) byId(`tab-${name}`).addEventListener("click", () => show(name));

document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const tabs = openTabs();
  const last = tabs.length - 1;
  const at = tabs.indexOf(shown);
  const to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  show(tabs[to], { focus: true });
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open && views[shown].stop(event.target)) event.preventDefault();
});

// no element has a tab's name as its id, so that the browser moves neither the page nor the focus there
addEventListener("hashchange", () => {
  const name = location.hash.slice(1);
  if (openTabs().includes(name)) show(name);
});

// ---------------------------------------------------------------- the key

byId("key-cancel").addEventListener("click", () => byId("key-dialog").close("cancel"));

onKeyNeeded((wasRefused) => {
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = wasRefused ? "The last one was refused." : "Whoever started the server has it.";
  byId("key").value = "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    const given = () => (dialog.returnValue === "use" && byId("key").value.trim()) || null;
    dialog.addEventListener("close", () => resolve(given()), { once: true });
  }).then((key) => {
    if (key) isTold = false;
    return key;
  });
});

// ---------------------------------------------------------------- the server

let isTold = false; // the model's name is there, or the user has no key: then the page does not ask again by itself

let watching = 0; // the timer of the next look

async function watchServer() {
  let state = "gone";
  try {
    state = (await get("livez")).state;
  } catch (error) {
    if (error.status === 503) state = "failed";
  }
  const badge = byId("server-state");
  badge.textContent = STATE_TITLES[state] ?? "no answer";
  badge.dataset.state = state;
  if (state === "ready" && !isTold) tellModel();
  clearTimeout(watching);
  watching = setTimeout(watchServer, POLL_MS[state] ?? 3000);
}

async function tellModel() {
  isTold = true;
  try {
    const { data, models } = await get("v1/models");
    const names = data.map(({ id }) => id);
    const abilities = new Map(models?.map((each) => [each.name, each.capabilities ?? []]));
    const abilitiesOf = (name) => abilities.get(name) ?? abilities.get(data.find(({ id }) => id === name).parent) ?? [];
    const several = byId("server-models");
    several.replaceChildren(...names.map((name) => new Option(name)));
    several.hidden = names.length === 1;
    several.onchange = () => choose(several.value, names.length, abilitiesOf(several.value));
    const before = sessionStorage.getItem(MODEL);
    several.value = names.includes(before) ? before : names[0];
    several.onchange();
    await call("v1/batches?limit=1");
    byId("tab-batches").hidden = false;
    if (wanted === "batches") show(wanted);
  } catch {
    // no key yet, or a server without batches: the tab stays away
  }
}

/** The model that the page talks to from now on. A server names an adapter as a model, too. */
function choose(name, count, abilities) {
  useModel(count === 1 ? null : name);
  if (count > 1) sessionStorage.setItem(MODEL, name);
  byId("server-model").textContent = count === 1 ? name : "";
  document.title = `${name} · llamabatch`;
  views.chat.reads = [abilities.includes("vision") && "image", abilities.includes("audio") && "sound"].filter(Boolean);
  views.live.restart();
}

// a call of a view has failed: the state is looked at now, not with the next poll
addEventListener("unanswered", () => {
  if (byId("server-state").dataset.state === "ready") {
    byId("server-state").dataset.state = "gone";
    watchServer();
  }
});

show(openTabs().includes(wanted) ? wanted : "chat");
watchServer();
