// The run: its curve, its commits and names, and what the server holds of it.
import { $, ask, make } from "/page/api.js";

const SPACE = "http://www.w3.org/2000/svg";
const [LEFT, RIGHT, TOP, BOTTOM] = [48, 890, 10, 232];

function draw(name, attributes, text) {
  const node = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const bytes = (count) => {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  while (count >= 1000 && at < units.length - 1) {
    count /= 1000;
    at += 1;
  }
  return `${at ? count.toFixed(1) : count} ${units[at]}`;
};
const number = (value) => value.toLocaleString("en");

function curve(run) {
  const place = $("curve");
  place.replaceChildren();
  const points = (name) =>
    run.step.map((step, at) => [step, run.series[name][at]]).filter(([, value]) => value !== null);
  const [losses, held] = [points("loss"), points("validation_loss")];
  const all = [...losses, ...held];
  if (!all.length) {
    place.append(draw("text", { x: 450, y: 120, "text-anchor": "middle" }, "no step was trained here"));
    return;
  }
  const [low, high] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  const [first, last] = [run.step[0], run.step.at(-1)];
  const x = (step) => LEFT + ((step - first) / Math.max(1, last - first)) * (RIGHT - LEFT);
  const y = (value) => BOTTOM - ((value - low) / (high - low || 1)) * (BOTTOM - TOP);
  for (let part = 0; part <= 4; part += 1) {
    const value = low + ((high - low) * part) / 4;
    place.append(
      draw("line", { x1: LEFT, x2: RIGHT, y1: y(value), y2: y(value), class: "grid" }),
      draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(2)));
    const step = Math.round(first + ((last - first) * part) / 4);
    place.append(draw("text", { x: x(step), y: BOTTOM + 18, "text-anchor": "middle" }, number(step)));
  }
  for (const [name, pin] of Object.entries(run.snapshots)) {
    if (pin.step < first || pin.step > last) continue;
    const line = draw("line", { x1: x(pin.step), x2: x(pin.step), y1: TOP, y2: BOTTOM, class: "pin" });
    line.append(draw("title", {}, name));
    place.append(line);
  }
  const path = (found, name) =>
    draw("polyline", { class: name, points: found.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" ") });
  place.append(path(losses, "train"));
  if (held.length) place.append(path(held, "held"));
}

function facts(run) {
  const told = run.scheduler;
  const loss = run.series.loss.filter((value) => value !== null).at(-1);
  const perSweep = told.sweeps ? (told.requests_in_sweeps / told.sweeps).toFixed(2) : "–";
  const rows = [
    ["steps committed", number(run.step_count)],
    ["last loss", loss === undefined ? "–" : loss.toFixed(4)],
    ["commits retained", number(run.commit_count)],
    ["requests running", `${told.requests_running} + ${told.requests_waiting} waiting`],
    ["requests a sweep", perSweep],
    ["tokens written", number(told.generated_tokens)],
    ["read from the store", bytes(told.bytes_read)],
  ];
  $("facts").replaceChildren(...rows.map(([name, value]) => {
    const fact = make("div", undefined, { class: "fact" });
    fact.append(make("b", value), make("span", name));
    return fact;
  }));
}

function resident(run) {
  const { stages, bytes: size, kv_bytes_used: used, kv_bytes_total: total } = run.resident;
  const meter = make("meter", undefined, { min: 0, max: Math.max(1, total), value: used });
  $("resident").replaceChildren(
    make("p", `${number(stages)} stages stay in memory: ${bytes(size)}. What does not stay is read once a sweep.`),
    make("p", `Keys and values: ${bytes(used)} of ${bytes(total)}.`), meter);
}

function table(place, heads, rows) {
  const top = make("tr");
  top.append(...heads.map((head) => make("th", head)));
  place.replaceChildren(top, ...rows.map((cells) => {
    const row = make("tr");
    row.append(...cells.map((cell) => {
      const box = make("td");
      box.append(cell);
      return box;
    }));
    return row;
  }));
}

function tryButton(role, ref) {
  const button = make("button", "try");
  button.onclick = () => document.dispatchEvent(new CustomEvent("try", { detail: `${role}@${ref}` }));
  return button;
}

function names(run) {
  const rows = (found, kind) =>
    Object.entries(found).toSorted((a, b) => b[1].step - a[1].step).map(([name, row]) => [name, kind, number(row.step), tryButton(run.role, name)]);
  table($("names"), ["name", "kind", "step", ""], [...rows(run.branches, "branch"), ...rows(run.snapshots, "snapshot")]);
  table($("commits"), ["step", "loss", "branch", "commit", "when", ""], run.commits.toReversed().slice(0, 40).map((row) => [
    number(row.step), row.loss === null ? "–" : row.loss.toFixed(4), row.branch, make("code", row.commit.slice(0, 12)),
    new Date(row.time * 1000).toLocaleString(), tryButton(run.role, row.commit)]));
}

function choose(select, values, wanted) {
  if ([...select.options].map((option) => option.value).join() !== values.join()) {
    select.replaceChildren(...values.map((value) => make("option", value)));
    select.value = values.includes(wanted) ? wanted : values[0];
  }
}

export async function showRun() {
  try {
    const stores = (await (await ask("/models")).json()).models;
    choose($("run-store"), stores.map((store) => store.id), "primary");
    const chosen = stores.find((store) => store.id === $("run-store").value);
    choose($("run-branch"), Object.keys(chosen.branches), chosen.branch);
    const place = new URLSearchParams({ store: $("run-store").value, branch: $("run-branch").value });
    const run = await (await ask(`/run?${place}`)).json();
    curve(run);
    facts(run);
    resident(run);
    names(run);
    $("run-note").textContent = chosen.follow ? "new requests follow the branch" : "";
  } catch (error) {
    $("run-note").textContent = error.message;
  }
}

$("run-store").onchange = showRun;
$("run-branch").onchange = showRun;
