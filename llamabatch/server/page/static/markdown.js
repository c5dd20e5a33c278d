// A little of markdown as elements: headings, lists, code, emphasis. All else is text, links included: an answer of a
// model is never markup and never an address.

import { copyButton, html } from "./dom.js";

const BULLET = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const SPAN = /(`+)(.+?)\1|\*\*(.+?)\*\*|(?<![\w*])\*([^*\s](?:[^*]*[^*\s])?)\*(?![\w*])/g;

/** The blocks of a text. A code block may still lack its end: the text is coming in. */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const [block, next] = readFence(lines, at) ?? readHeading(lines, at) ?? readList(lines, at) ?? readParagraph(lines, at);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

function readFence(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]) ?? [];
  if (!fence) return null;
  let end = at + 1;
  while (end < lines.length && !lines[end].trimStart().startsWith(fence)) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const code = html("pre", { tabindex: "0", "aria-label": language ? `${language} code` : "code" }, html("code", {}, text));
  return [html("div", { class: "code" }, code, copyButton("Copy the code", text)), end + 1];
}

function readHeading(lines, at) {
  const [, signs, title] = HEADING.exec(lines[at]) ?? [];
  // headings of the page itself are h1 to h3
  return signs ? [html(`h${Math.min(6, signs.length + 3)}`, {}, ...spans(title)), at + 1] : null;
}

function readList(lines, at) {
  const first = BULLET.exec(lines[at]);
  if (!first) return null;
  const items = [];
  let item;
  for (; (item = BULLET.exec(lines[at] ?? "")) && !item[1] === !first[1]; at += 1) {
    items.push(html("li", {}, ...spans(item[2])));
  }
  return [first[1] ? html("ol", { start: first[1] }, items) : html("ul", {}, items), at];
}

function readParagraph(lines, at) {
  if (!lines[at].trim()) return [null, at + 1];
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && ![FENCE, HEADING, BULLET].some((form) => form.test(lines[end]))) {
    end += 1;
  }
  return [html("p", {}, ...spans(lines.slice(at, end).join("\n"))), end];
}

function spans(text) {
  const found = [];
  let last = 0;
  for (const match of text.matchAll(SPAN)) {
    const [whole, ticks, code, strong, emphasis] = match;
    found.push(text.slice(last, match.index));
    if (ticks) found.push(html("code", {}, code));
    else if (strong) found.push(html("strong", {}, strong));
    else found.push(html("em", {}, emphasis));
    last = match.index + whole.length;
  }
  found.push(text.slice(last));
  return found;
}
