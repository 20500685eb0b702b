"""The script inside the report's page: draws every chart as SVG from the data in the page.

Owns the drawing. It adds text to the document as text, never as markup, because names of shards,
snapshots and branches come from whoever made them.
"""

from __future__ import annotations

SCRIPT = r"""
"use strict";
const D = JSON.parse(document.getElementById("data").textContent);
const HUES = ["#2563eb","#ea580c","#16a34a","#9333ea","#dc2626","#0891b2","#ca8a04","#db2777",
  "#4d7c0f","#64748b","#7c3aed","#0d9488","#b45309"];
const KINDS = {snapshot:"#16a34a", recipe:"#ea580c", skip:"#dc2626", branch:"#9333ea",
  rewind:"#0891b2", other:"#64748b"};
const W = 1120, HALF = 540, L = 62, R = 12, T = 10, B = 24;
const svg = (name, attributes = {}, text) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
};
const el = (name, cls, text) => {
  const node = document.createElement(name);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
};
const short = v => {
  if (v === null || v === undefined) return "";
  const a = Math.abs(v);
  if (a >= 1e9) return (v / 1e9).toPrecision(3) + "G";
  if (a >= 1e6) return (v / 1e6).toPrecision(3) + "M";
  if (a >= 1e4) return (v / 1e3).toPrecision(3) + "k";
  if (a >= 100 || v === 0) return String(Math.round(v));
  return a < 1e-3 ? v.toExponential(1) : String(+v.toPrecision(3));
};
let axis = "step";
const xs = () => axis === "time" ? D.time : axis === "step" ? D.step : D.tokens_seen;
const xText = v => axis === "time" ? new Date(v * 1000).toLocaleString() : short(v);
const xTick = v => axis !== "time" ? short(v) :
  new Date(v * 1000).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});
const ticks = (low, high, count) => {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * base).find(s => s >= raw), found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) found.push(v);
  return found;
};
const range = lists => {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const v of list) if (v !== null && v !== undefined) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return low > high ? [0, 1] : [low, high];
};
function card(title, wide) {
  const box = el("section", wide ? "card wide" : "card");
  box.append(el("h2", "", title));
  const tip = el("div", "tip");
  box.append(tip);
  document.getElementById("charts").append(box);
  return {box, tip, width: wide ? W : HALF};
}
function frame(c, height, low, high) {
  const root = svg("svg", {viewBox: `0 0 ${c.width} ${height}`, role: "img"});
  const [x0, x1] = range([xs()]), inner = c.width - L - R;
  const X = v => L + (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5) * inner;
  const Y = v => height - B - (high > low ? (v - low) / (high - low) : 0.5) * (height - B - T);
  for (const v of ticks(low, high, 4)) {
    root.append(svg("line", {x1: L, x2: c.width - R, y1: Y(v), y2: Y(v), stroke: "var(--line)"}));
    root.append(svg("text", {x: L - 6, y: Y(v) + 4, "text-anchor": "end"}, short(v)));
  }
  for (const v of ticks(x0, x1, c.width > 700 ? 10 : 5))
    root.append(svg("text", {x: X(v), y: height - 7, "text-anchor": "middle"}, xTick(v)));
  c.box.append(root);
  return {root, X, Y, height, low, high};
}
function legend(c, items) {
  const box = el("div", "legend");
  for (const [name, color] of items) {
    const item = el("span"), dot = el("i");
    dot.style.background = color;
    item.append(dot, document.createTextNode(name));
    box.append(item);
  }
  c.box.append(box);
}
function hover(c, f, text) {
  f.root.addEventListener("mousemove", event => {
    const box = f.root.getBoundingClientRect(), x = xs();
    const at = (event.clientX - box.left) / box.width * c.width;
    let best = 0;
    for (let i = 1; i < x.length; i++)
      if (Math.abs(f.X(x[i]) - at) < Math.abs(f.X(x[best]) - at)) best = i;
    c.tip.textContent = `step ${D.step[best]}` + (axis === "step" ? "" : ` · ${xText(x[best])}`) +
      text(best);
    c.tip.style.display = "block";
    const left = event.clientX - c.box.getBoundingClientRect().left;
    c.tip.style.left = Math.min(left + 14, c.box.clientWidth - c.tip.offsetWidth - 6) + "px";
    c.tip.style.top = event.clientY - c.box.getBoundingClientRect().top + 14 + "px";
  });
  f.root.addEventListener("mouseleave", () => { c.tip.style.display = "none"; });
}
const has = list => list && list.some(v => v !== null && v !== undefined);
function lines(title, names, options = {}) {
  const drawn = names.filter(([, list]) => has(list));
  if (!drawn.length) return;
  const c = card(title, options.wide);
  let [low, high] = range(drawn.map(([, list]) => list));
  if (options.zero) low = Math.min(0, low);
  const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  const f = frame(c, options.wide ? 280 : 190, options.zero ? low : low - pad, high + pad);
  if (options.events) marks(f, c);
  drawn.forEach(([name, list], i) => {
    const points = [];
    xs().forEach((x, k) => {
      if (list[k] !== null && list[k] !== undefined) points.push([f.X(x), f.Y(list[k])]);
    });
    const color = HUES[i % HUES.length];
    f.root.append(svg("polyline", {class: "curve", "data-name": name, fill: "none", stroke: color,
      "stroke-width": i ? 2 : 1.4, points: points.map(p => p.map(v => v.toFixed(1))).join(" ")}));
    if (points.length < 60 && drawn.length > 1 && i)
      for (const [x, y] of points)
        f.root.append(svg("circle", {cx: x, cy: y, r: 2.5, fill: color}));
  });
  legend(c, drawn.map(([name], i) => [name, HUES[i % HUES.length]]));
  hover(c, f, k => drawn.map(([n, list]) => has([list[k]]) ?
    `\n${n} ${+list[k].toPrecision(5)}` : "").join(""));
}
const placeOf = new Map(D.step.map((step, i) => [step, i]));
const happened = () => [...D.events.map(e => [e.step, e.kind in KINDS ? e.kind : "other", e.text]),
  ...D.skips.map(s => [s.step, "skip", `skipped rows at ${s.position}: ${s.reason}`])]
  .filter(([step]) => placeOf.has(step));
function marks(f, c) {
  for (const [step, kind] of happened()) if (kind !== "snapshot" && kind !== "other") {
    const x = f.X(xs()[placeOf.get(step)]);
    f.root.append(svg("line", {x1: x, x2: x, y1: T, y2: f.height - B, stroke: KINDS[kind],
      "stroke-dasharray": "3 3", opacity: 0.7}));
  }
}
function timeline() {
  const c = card("Commits, snapshots and what happened", true), kinds = Object.keys(KINDS);
  const events = happened(), used = kinds.filter(k => events.some(([, kind]) => kind === k));
  const root = svg("svg", {viewBox: `0 0 ${W} ${46 + 20 * used.length}`, role: "img"});
  const [x0, x1] = range([xs()]);
  const X = v => L + (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5) * (W - L - R);
  root.append(svg("text", {x: L - 6, y: 18, "text-anchor": "end"}, "commits"));
  let path = "";
  for (const x of xs()) path += `M${X(x).toFixed(1)} 8v12`;
  root.append(svg("path", {class: "commits", d: path, stroke: HUES[0], "stroke-width": 0.8}));
  used.forEach((kind, row) => {
    const y = 36 + 20 * row;
    root.append(svg("text", {x: L - 6, y: y + 4, "text-anchor": "end"}, kind));
    for (const [step, k, text] of events) if (k === kind) {
      const dot = svg("circle", {class: "event", cx: X(xs()[placeOf.get(step)]), cy: y, r: 4,
        fill: KINDS[kind]});
      dot.append(svg("title", {}, `step ${step}: ${text}`));
      root.append(dot);
    }
  });
  for (const v of ticks(x0, x1, 10)) root.append(svg("text", {x: X(v), y: 42 + 20 * used.length,
    "text-anchor": "middle"}, xTick(v)));
  c.box.append(root);
}
function stacked() {
  const known = D.series.commit_seconds, waited = D.series.publish_seconds;
  const parts = Object.entries(D.timings).concat([["commit_seconds", known],
    ["publish_seconds", waited]]).filter(([, list]) => list.some(v => v > 0));
  if (!parts.length) return;
  const total = ([, list]) => list.reduce((sum, v) => sum + (v || 0), 0);
  parts.sort((a, b) => total(b) - total(a));
  const c = card("Where a step's seconds go", true);
  const sums = D.step.map((_, i) => parts.reduce((sum, [, list]) => sum + (list[i] || 0), 0));
  const sorted = [...sums].sort((a, b) => a - b);
  const top = Math.min(sorted[sorted.length - 1], 3 * sorted[sorted.length >> 1]) || 1;
  const f = frame(c, 240, 0, top), base = D.step.map(() => 0);
  parts.forEach(([name, list], i) => {
    const under = base.map((b, k) => [f.X(xs()[k]), f.Y(Math.min(b, top))]);
    list.forEach((v, k) => { base[k] += v || 0; });
    const over = base.map((b, k) => [f.X(xs()[k]), f.Y(Math.min(b, top))]);
    f.root.append(svg("polygon", {class: "area", fill: HUES[i % HUES.length], opacity: 0.85, points:
      [...over, ...under.reverse()].map(p => p.map(v => v.toFixed(1))).join(" ")}));
  });
  const all = parts.reduce((sum, part) => sum + total(part), 0);
  const label = name => name.replace(/_seconds$/, "").replaceAll("_", " ");
  legend(c, parts.map((p, i) => [`${label(p[0])} ${(100 * total(p) / all).toFixed(1)} %`,
    HUES[i % HUES.length]]));
  hover(c, f, k => `\n${short(sums[k])} s in named parts`);
}
function heat() {
  const names = Object.keys(D.norms);
  if (!names.length) return;
  const c = card("Gradient norm of each shard, before clipping", true), columns = 140, high = 14;
  const tall = names.length * high + 26, left = 110;
  const root = svg("svg", {viewBox: `0 0 ${W} ${tall}`, role: "img"});
  const [x0, x1] = range([xs()]), [low, top] = range(Object.values(D.norms).map(list =>
    list.map(v => v > 0 ? Math.log10(v) : null)));
  const bins = Math.min(columns, D.step.length), wide = (W - left - R) / bins;
  names.forEach((name, row) => {
    root.append(svg("text", {x: left - 6, y: row * high + 11, "text-anchor": "end"}, name));
    const sums = Array(bins).fill(0), counts = Array(bins).fill(0);
    xs().forEach((x, k) => {
      const at = Math.min(bins - 1, x1 > x0 ? Math.floor((x - x0) / (x1 - x0) * bins) : 0);
      if (D.norms[name][k] > 0) { sums[at] += Math.log10(D.norms[name][k]); counts[at]++; }
    });
    sums.forEach((sum, at) => {
      if (!counts[at]) return;
      const mean = sum / counts[at], part = top > low ? (mean - low) / (top - low) : 0.5;
      const cell = svg("rect", {class: "cell", x: (left + at * wide).toFixed(1), y: row * high,
        width: (wide + 0.3).toFixed(1), height: high - 1,
        fill: `hsl(${(240 - 215 * part).toFixed(0)} 75% ${(38 + 18 * part).toFixed(0)}%)`});
      cell.append(svg("title", {}, `${name}: ${(10 ** mean).toPrecision(3)}`));
      root.append(cell);
    });
  });
  for (const v of ticks(x0, x1, 10)) root.append(svg("text", {x: left + (x1 > x0 ? (v - x0) /
    (x1 - x0) : 0.5) * (W - left - R), y: names.length * high + 16, "text-anchor": "middle"},
    xTick(v)));
  c.box.append(root);
  legend(c, [[`lowest ${(10 ** low).toPrecision(3)}`, "hsl(240 75% 38%)"],
    [`highest ${(10 ** top).toPrecision(3)}`, "hsl(25 75% 56%)"]]);
}
function table(title, heads, rows) {
  const c = card(title, true);
  if (!rows.length) { c.box.append(el("p", "none", "none")); return; }
  const made = el("table"), head = el("tr");
  for (const h of heads) head.append(el("th", "", h));
  made.append(head);
  for (const row of rows.slice(-200)) {
    const line = el("tr");
    for (const value of row) line.append(el("td", "", String(value)));
    made.append(line);
  }
  c.box.append(made);
}
function draw() {
  document.getElementById("charts").replaceChildren();
  const s = D.series;
  lines("Loss", [["loss", s.loss], ["validation loss", s.validation_loss]],
    {wide: true, events: true});
  timeline();
  lines("Learning rate", [["learning rate", s.learning_rate]], {zero: true});
  lines("Gradient norm of the model, before clipping", [["norm", s.grad_norm]], {zero: true});
  heat();
  stacked();
  lines("Tokens a second", [["tokens a second", s.tokens_per_second]], {zero: true});
  lines("Percent of the machine's own ceiling", [["percent", s.ceiling_percent]], {zero: true});
  lines("Memory", [["process", s.host_memory_bytes],
    ["device, peak", has(s.device_peak_bytes) && s.device_peak_bytes.some(v => v > 0) ?
      s.device_peak_bytes : null]], {zero: true});
  lines("Bytes written", [["a step", s.bytes_written]], {zero: true});
  lines("Loss scale", [["loss scale", s.loss_scale]], {zero: true});
  table("Changes of the recipe", ["step", "change"],
    D.events.filter(e => e.kind === "recipe").map(e => [e.step, e.text]));
  table("Skipped batches (counted before the step that was committed next)",
    ["step", "row", "reason", "why"], D.skips.map(k => [k.step, k.position, k.reason, k.why]));
  if (D.faults.length) table("Damage in the log", ["what"], D.faults.map(t => [t]));
}
document.getElementById("axis").addEventListener("change", event => {
  axis = event.target.value;
  draw();
});
draw();
"""
