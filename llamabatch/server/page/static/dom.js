// Elements of HTML and SVG, made of plain values. Texts become text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `attributes` that begin with "on" are listeners, booleans are switches, the rest is text. */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, likewise. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Tells users of a screen reader something that has just come about. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** Gives the user a file. */
export function download(name, blob) {
  const address = URL.createObjectURL(blob);
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** A button that copies a text, and says so for a moment. */
export function copyButton(label, text) {
  const button = html("button", { type: "button", class: "quiet", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    await copy(text);
    button.textContent = "Copied";
    announce("Copied.");
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

/** Copies a text; also where the page came over plain HTTP from another machine and has no clipboard. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = html("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
