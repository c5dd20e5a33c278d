// A line of the last minute.

import { html, svg } from "./dom.js";

const SECONDS = 60;
const [WIDTH, HEIGHT] = [600, 60];

export class Sparkline {
  #points = []; // [seconds, value]
  #line = svg("path", { class: "line" });
  #area = svg("path", { class: "area" });
  #label;
  #title;

  constructor(title) {
    this.#title = title;
    this.#label = html("figcaption", {}, title);
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.#area, this.#line);
    this.element = html("figure", { class: "sparkline" }, this.#label, picture);
  }

  add(seconds, value) {
    this.#points.push([seconds, value]);
    while (this.#points[0][0] < seconds - SECONDS) this.#points.shift();
  }

  draw() {
    const now = this.#points.at(-1)[0];
    const most = Math.max(1, ...this.#points.map(([, value]) => value));
    const places = this.#points.map(([seconds, value]) => {
      const x = WIDTH * (1 - (now - seconds) / SECONDS);
      const y = HEIGHT - 2 - (HEIGHT - 4) * (value / most);
      return `${x.toFixed(1)} ${y.toFixed(1)}`;
    });
    const first = places[0].split(" ")[0];
    this.#line.setAttribute("d", `M${places.join("L")}`);
    this.#area.setAttribute("d", `M${first} ${HEIGHT}L${places.join("L")}L${WIDTH} ${HEIGHT}Z`);
    this.#label.textContent = `${this.#title}, last minute, at most ${most.toLocaleString("en", { maximumFractionDigits: 1 })}`;
  }
}
