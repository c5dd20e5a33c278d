// The picture of a comparison: both runs on one axis of time. It stands alone: its styles are attributes, so that it can
// be saved as a file.

import { svg } from "./dom.js";

export const WIDE = { width: 1200, height: 630, isNarrow: false }; // the shape of a card in a feed
export const NARROW = { width: 600, height: 860, isNarrow: true };
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";
const LIGHT = { paper: "#ffffff", ink: "#0f172a", soft: "#52607a", line: "#dbe2ec", alone: "#c2570c", company: "#1d4ed8", differs: "#b91c1c" };
const DARK = { paper: "#0f1522", ink: "#eef2f9", soft: "#a3b0c6", line: "#2b3650", alone: "#f59e5b", company: "#7da6ff", differs: "#ff8f8f" };

/** The picture of a run (as in comparison.js) as an <svg>. `facts`: texts for its foot, as the model's name. */
export function figure(run, facts, shape, isDark) {
  const colors = isDark ? DARK : LIGHT;
  const { width, height, isNarrow } = shape;
  const text = (x, y, content, more = {}) => svg("text", { x, y, fill: colors.ink, ...more }, content);
  const edge = isNarrow ? 28 : 48;
  const chart = isNarrow
    ? { left: edge, right: width - edge, top: 330, bottom: height - 90 }
    : { left: edge, right: 790, top: 172, bottom: height - 92 };
  const seconds = Math.max(run.alone?.seconds ?? 0, run.company?.seconds ?? 0, 0.001);
  const parts = [
    svg("rect", { width, height, fill: colors.paper }),
    text(edge, isNarrow ? 56 : 72, `${run.prompts.length} prompts, alone and in company`, { "font-size": isNarrow ? 28 : 38, "font-weight": 700 }),
    text(edge, isNarrow ? 86 : 106, "The same model, the same prompts, the same server", { "font-size": isNarrow ? 18 : 20, fill: colors.soft }),
    ...axis(chart, seconds, colors, text),
    ...rows(run, chart, seconds, colors, text),
    ...figures(run, isNarrow ? { x: edge, y: 130, width: width - 2 * edge } : { x: 850, y: 160, width: 302 }, isNarrow, colors, text),
    text(edge, height - 24, facts.join("  ·  "), { "font-size": isNarrow ? 14 : 16, fill: colors.soft }),
    text(width - edge, height - 24, "llamabatch", { "font-size": isNarrow ? 14 : 18, "font-weight": 700, "text-anchor": "end", fill: colors.company }),
  ];
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": sentence(run), "font-family": FONT, class: "figure" }, parts);
}

/** What the picture shows, in words. */
export function sentence(run) {
  const { alone, company, equal } = run;
  if (!alone || !company || !equal) return "A comparison that is under way.";
  const nEqual = equal.filter((each) => each === true).length;
  return (
    `${run.prompts.length} prompts took ${alone.seconds.toFixed(1)} s one by one, ${speed(alone)} tokens/s, and ` +
    `${company.seconds.toFixed(1)} s together, ${speed(company)} tokens/s: ${factor(run)} times as fast. ` +
    `${nEqual} of ${equal.length} texts are equal.`
  );
}

const speed = ({ tokens, seconds }) => Math.round(tokens / seconds).toLocaleString("en");

export function factor({ alone, company }) {
  const found = company.tokens / company.seconds / (alone.tokens / alone.seconds);
  return found < 10 ? found.toFixed(1) : found.toFixed(0);
}

function axis({ left, right, top, bottom }, seconds, colors, text) {
  const step = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100].find((each) => seconds / each <= 6) ?? 200;
  const parts = [];
  for (let at = 0; at <= seconds + 1e-9; at += step) {
    const x = left + ((right - left) * at) / seconds;
    parts.push(svg("path", { d: `M${x} ${top}V${bottom}`, stroke: colors.line }));
    const label = `${Number(at.toFixed(2))} s`;
    parts.push(text(x, bottom + 22, label, { "font-size": 15, fill: colors.soft, "text-anchor": at ? "middle" : "start" }));
  }
  return parts;
}

/** Two panels, a thin bar a prompt: a staircase above, a block below. */
function rows(run, { left, right, top, bottom }, seconds, colors, text) {
  const gap = 40;
  const panel = (bottom - top - gap) / 2;
  const parts = [];
  for (const [name, label, y] of [["alone", "One by one", top], ["company", "Together", top + panel + gap]]) {
    const pass = run[name];
    parts.push(text(left, y - 10, label, { "font-size": 18, "font-weight": 600, fill: colors[name] }));
    if (!pass) continue;
    const row = panel / pass.spans.length;
    pass.spans.forEach(({ start, end }, at) => {
      if (start === null) return;
      const x = left + ((right - left) * start) / seconds;
      const width = Math.max(1, ((right - left) * ((end ?? pass.seconds) - start)) / seconds);
      const [height, corner] = [Math.max(1, row * 0.72), Math.min(3, row * 0.3)];
      parts.push(svg("rect", { x, y: y + at * row, width, height, rx: corner, fill: colors[name] }));
    });
  }
  return parts;
}

function figures(run, { x, y, width }, isNarrow, colors, text) {
  const { alone, company, equal } = run;
  const half = width / 2;
  const parts = [];
  const one = (pass, label, color, at) => {
    if (!pass?.tokens) return;
    parts.push(text(x + at, y + (isNarrow ? 26 : 150), speed(pass), { "font-size": 34, "font-weight": 700, fill: color }));
    parts.push(text(x + at, y + (isNarrow ? 50 : 176), "tokens/s", { "font-size": 16, fill: colors.soft }));
    parts.push(text(x + at, y + (isNarrow ? 72 : 198), label, { "font-size": 16, fill: colors.soft }));
  };
  const third = isNarrow ? width / 3 : 0;
  one(alone, "one by one", colors.alone, third);
  one(company, "together", colors.company, isNarrow ? 2 * third : half);
  if (!equal) return parts;
  parts.push(text(x, y + (isNarrow ? 44 : 62), `${factor(run)}×`, { "font-size": isNarrow ? 60 : 84, "font-weight": 800 }));
  parts.push(text(x, y + (isNarrow ? 72 : 88), "as fast", { "font-size": 16, fill: colors.soft }));
  const nEqual = equal.filter((each) => each === true).length;
  const below = y + (isNarrow ? 122 : 262);
  const verdict = nEqual === equal.length ? `All ${nEqual} texts are equal` : `${nEqual} of ${equal.length} texts are equal`;
  parts.push(text(x, below, verdict, { "font-size": 20, "font-weight": 600 }));
  const [columns, size] = isNarrow ? [32, Math.min(16, width / 32)] : [16, width / 16];
  equal.forEach((each, at) => {
    const [cx, cy] = [x + (at % columns) * size + size / 2, below + 20 + Math.floor(at / columns) * size];
    parts.push(each === true ? tick(cx, cy, size * 0.3, colors.company) : cross(cx, cy, size * 0.25, colors.differs));
  });
  return parts;
}

const tick = (x, y, r, stroke) => svg("path", { d: `M${x - r} ${y}L${x - r * 0.25} ${y + r * 0.75}L${x + r} ${y - r * 0.8}`, fill: "none", stroke, "stroke-width": r * 0.55, "stroke-linecap": "round", "stroke-linejoin": "round" });

const cross = (x, y, r, stroke) => svg("path", { d: `M${x - r} ${y - r}L${x + r} ${y + r}M${x + r} ${y - r}L${x - r} ${y + r}`, stroke, "stroke-width": r * 0.6, "stroke-linecap": "round" });

/** The picture as a file of SVG. */
export function svgBlob(picture) {
  return new Blob([new XMLSerializer().serializeToString(picture)], { type: "image/svg+xml" });
}

/** The picture as a file of PNG, twice as fine as its units. */
export async function pngBlob(picture) {
  const address = URL.createObjectURL(svgBlob(picture));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  } finally {
    URL.revokeObjectURL(address);
  }
}
