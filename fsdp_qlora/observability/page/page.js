"use strict";
// Everything that a run has left comes as data and is put into the page as text, never as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs.map((run, index) => ({ ...run, color: `var(--c${index % 8})`, shown: true }));
const GIB = 2 ** 30;
const view = { axis: "step", smooth: RUNS.some((run) => (run.steps.step || []).length > 60) ? 0.9 : 0 };
const charts = []; // functions that draw a chart anew

// --- elements ---

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const dot = (run) => el("i", { class: "dot", style: { background: run.color } });
const named = (run) => el("span", { class: "run" }, dot(run), el("span", {}, run.name));

// --- numbers ---

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}B`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size !== 0 && size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e");
  return trim(value);
}
const trim = (value) => String(Number(value.toPrecision(4)));
const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : "–");
const percent = (share) => (isNumber(share) ? `${Number((100 * share).toPrecision(3))}%` : "–");
function bytes(count) {
  for (const [unit, size] of [["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 1024]])
    if (count >= size) return `${(count / size).toFixed(2)} ${unit}`;
  return `${Math.round(count)} B`;
}
function time(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 100) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
const last = (values) => (values || []).filter(isNumber).at(-1);
const lowest = (values) => ((values || []).some(isNumber) ? Math.min(...values.filter(isNumber)) : undefined);
const highest = (values) => ((values || []).some(isNumber) ? Math.max(...values.filter(isNumber)) : undefined);
function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => raw <= factor * power * 1.0001);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step)
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
  const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length > 7 ? inside.filter((tick) => Math.abs(Math.log10(tick) % 1) < 1e-9) : inside;
}

// --- curves ---

const AXES = { step: "step", epoch: "epoch", tokens: "tokens", hours: "hours of training" };
function across(run, kind) {
  // The x values of a run's records. Evaluations know their step alone.
  const steps = run.steps.step || [];
  if (kind === "steps") return run.steps[view.axis] || [];
  if (view.axis === "step" || view.axis === "epoch") return run.evaluations[view.axis] || [];
  return (run.evaluations.step || []).map((step) => {
    let index = steps.findIndex((other) => other >= step);
    if (index < 0) index = steps.length - 1;
    return step === 0 ? 0 : (run.steps[view.axis] || [])[index];
  });
}
function points(run, kind, column) {
  const xs = across(run, kind), ys = run[kind][column] || [];
  return ys.map((y, index) => [xs[index], y]).filter(([x, y]) => isNumber(x) && isNumber(y));
}
function smoothed(line, weight) {
  // An exponential mean whose start is not drawn to zero.
  let mean = 0, mass = 0;
  return line.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return [x, mean / mass];
  });
}
function linesOf(spec) {
  const lines = [];
  for (const run of RUNS.filter((one) => one.shown))
    for (const [index, [column, label]] of spec.columns.entries()) {
      const line = points(run, spec.kind, column);
      if (!line.length) continue;
      const isSmooth = spec.smooth && view.smooth > 0 && line.length > 2;
      const text = [RUNS.length > 1 ? run.name : null, label].filter(Boolean).join(" · ") || spec.title;
      if (isSmooth) lines.push({ color: run.color, line, faint: true });
      lines.push({ color: run.color, line: isSmooth ? smoothed(line, view.smooth) : line, text, dash: index,
        dots: spec.kind === "evaluations" && line.length < 80, few: spec.kind === "evaluations" && line.length < FEW });
    }
  return lines;
}
function chart(spec) {
  if (!RUNS.some((run) => spec.columns.some(([column]) => (run[spec.kind][column] || []).some(isNumber)))) return null;
  let isLog = false;
  const box = el("div", { class: "chart" });
  const log = el("button", { type: "button", "aria-pressed": "false", title: "logarithmic scale", onclick: () => {
    isLog = !isLog;
    log.setAttribute("aria-pressed", isLog);
    paint();
  } }, "log");
  const paint = () => paintChart(box, spec, isLog);
  charts.push(paint);
  const notes = spec.columns.length > 1 ? el("div", { class: "legend" }, spec.columns.map(([, label], index) =>
    el("span", {}, draw("svg", { width: 22, height: 8 }, draw("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: "currentColor",
      "stroke-width": 2, "stroke-dasharray": DASHES[index] })), label))) : null;
  return el("section", { class: "card" }, el("div", { class: "head" }, el("h3", {}, spec.title), log), box, notes);
}
const FEW = 4; // measurements, between which a line says nothing of the course
const DASHES = ["none", "5 4", "1.5 3", "9 3 2 3"];
function paintChart(box, spec, isLog) {
  const width = Math.max(240, box.clientWidth || 360), height = 218;
  const lines = linesOf(spec);
  let [low, high] = [Infinity, -Infinity], [left, right] = [Infinity, -Infinity];
  for (const { line } of lines)
    for (const [x, y] of line) {
      left = Math.min(left, x); right = Math.max(right, x);
      if (isLog && y <= 0) continue;
      low = Math.min(low, y); high = Math.max(high, y);
    }
  if (!lines.length || low === Infinity) return box.replaceChildren(el("p", { class: "dim small" }, "nothing to show"));
  if (low === high) { const more = Math.abs(low) * 0.05 || 0.5; low -= more; high += more; }
  else if (!isLog) { const room = (high - low) * 0.06; low = spec.zero || (low >= 0 && low < room) ? Math.min(0, low) : low - room; high += room; }
  if (isLog && low <= 0) low = high / 1e3;
  if (left > 0 && left < 0.1 * right) left = 0; // evaluations begin there: one axis for all curves
  if (left === right) { left -= 0.5; right += 0.5; }
  const marks = isLog ? logTicks(low, high) : ticks(low, high, 4);
  const edge = { left: 12 + Math.max(...marks.map((mark) => short(mark).length), 2) * 6.6, right: 10, top: 8, bottom: 24 };
  const scale = (value) => (isLog ? Math.log10(Math.max(value, low)) : value);
  const px = (x) => edge.left + ((x - left) / (right - left)) * (width - edge.left - edge.right);
  const py = (y) => height - edge.bottom - ((scale(y) - scale(low)) / (scale(high) - scale(low))) * (height - edge.top - edge.bottom);
  const parts = [];
  for (const mark of marks) {
    parts.push(draw("line", { x1: edge.left, x2: width - edge.right, y1: py(mark), y2: py(mark), stroke: "var(--line)" }));
    parts.push(draw("text", { x: edge.left - 6, y: py(mark) + 4, "text-anchor": "end" }, short(mark)));
  }
  const across = ticks(left, right, Math.max(2, Math.floor(width / 95)));
  for (const mark of across) {
    const x = px(mark), anchor = x > width - 26 ? "end" : "middle";
    parts.push(draw("text", { x: anchor === "end" ? width : x, y: height - 7, "text-anchor": anchor }, short(mark)));
    parts.push(draw("line", { x1: x, x2: x, y1: height - edge.bottom, y2: height - edge.bottom + 4, stroke: "var(--strong)" }));
  }
  parts.push(draw("line", { x1: edge.left, x2: width - edge.right, y1: height - edge.bottom, y2: height - edge.bottom, stroke: "var(--strong)" }));
  for (const { line, color, faint, dash, dots, few } of lines) {
    const path = line.filter(([, y]) => !isLog || y > 0).map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ");
    parts.push(draw("polyline", { points: path, fill: "none", "stroke-width": faint || few ? 1 : 1.8, "stroke-linejoin": "round",
      "stroke-dasharray": DASHES[dash || 0], style: { stroke: color, opacity: faint || few ? "0.28" : "1" } }));
    if (dots || line.length === 1)
      parts.push(...line.map(([x, y]) => draw("circle", { cx: px(x), cy: py(y), r: few ? 4 : 3, style: { fill: color } })));
  }
  const cursor = draw("line", { y1: edge.top, y2: height - edge.bottom, stroke: "var(--dim)", visibility: "hidden" });
  const tip = el("div", { class: "tip", hidden: "" });
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${spec.title} by ${AXES[view.axis]}` }, parts, cursor);
  box.replaceChildren(picture, tip);
  box.onpointermove = box.onpointerdown = (event) => {
    const at = left + ((event.clientX - box.getBoundingClientRect().left - edge.left) / (width - edge.left - edge.right)) * (right - left);
    const rows = lines.filter(({ faint }) => !faint).map(({ line, color, text }) => {
      const point = line.reduce((best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best));
      return { point, color, text };
    });
    const nearest = rows.reduce((best, one) => (Math.abs(one.point[0] - at) < Math.abs(best.point[0] - at) ? one : best));
    const x = px(nearest.point[0]);
    fill(cursor, { x1: x, x2: x, visibility: "visible" }, []);
    tip.replaceChildren(el("div", { class: "dim" }, `${AXES[view.axis]} ${short(nearest.point[0])}`), ...rows.map(({ point, color, text }) =>
      el("div", {}, el("i", { style: { background: color } }), `${text}: ${short(point[1])}`)));
    tip.hidden = false;
    tip.style.left = `${x > width / 2 ? Math.max(0, x - tip.offsetWidth - 12) : x + 12}px`;
  };
  box.onpointerleave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
}

// --- parts of the page ---

const section = (title, ...children) => {
  const shown = children.flat().filter(Boolean);
  return shown.length ? el("section", {}, el("h2", {}, title), shown) : null;
};
function table(head, rows) {
  return el("div", { class: "scroll" }, el("table", {},
    head ? el("thead", {}, el("tr", {}, head.map((cell) => el("th", {}, cell)))) : "", el("tbody", {}, rows)));
}
function summary() {
  const rows = [
    ["state", (run) => el("span", { class: `state ${/^\w+$/.test(run.status.state || "") ? run.status.state : ""}` },
      String(run.status.state || "unknown").replaceAll("_", " "))],
    ["steps", (run) => `${whole(last(run.steps.step))}${run.status.total_steps ? ` of ${whole(run.status.total_steps)}` : ""}`],
    ["training loss", (run) => short(last(run.steps.loss))],
    ["held-out loss, first → last", (run) => (run.evaluations.eval_loss || []).some(isNumber)
      ? `${short(run.evaluations.eval_loss.find(isNumber))} → ${short(last(run.evaluations.eval_loss))}` : null],
    ["lowest held-out loss", lowestHeldOut],
    ["held-out reward, first → last", (run) => (run.evaluations.eval_reward || []).some(isNumber)
      ? `${short(run.evaluations.eval_reward.find(isNumber))} → ${short(last(run.evaluations.eval_reward))}` : null],
    ["perplexity", (run) => { const loss = last(run.evaluations.eval_loss); return isNumber(loss) ? short(Math.exp(loss)) : null; }],
    ["tokens", (run) => short(run.totals.tokens)],
    ["tokens/s", (run) => short(run.totals.tokens_per_second)],
    ["planned tokens/s", (run) => { const planned = run.facts.measured?.planned_tokens_per_second; return isNumber(planned) ? short(planned) : null; }],
    ["time in steps", (run) => time(run.totals.seconds)],
    ["peak memory", (run) => { const peak = highest(memoryColumns().flatMap(([column]) => run.steps[column] || [])); return isNumber(peak) ? `${short(peak)} GiB` : null; }],
    ["planned memory", (run) => { const planned = run.facts.measured?.planned_gib?.reserved; return isNumber(planned) ? `${short(planned)} GiB` : null; }],
    ["steps skipped", (run) => (run.totals.skipped ? whole(run.totals.skipped) : null)],
  ].filter(([, value]) => RUNS.some((run) => { const text = value(run); return text !== null && text !== "–"; }));
  const reasons = RUNS.filter((run) => run.status.reason && run.status.state !== "running").map((run) =>
    el("p", { class: "small dim" }, RUNS.length > 1 ? `${run.name}: ` : "", String(run.status.reason)));
  const facts = RUNS.length > 1
    ? el("div", { class: "card" }, table(["", ...RUNS.map(named)], rows.map(([name, value]) =>
      el("tr", {}, el("th", {}, name), RUNS.map((run) => el("td", {}, value(run) ?? "–"))))))
    : el("div", { class: "tiles", style: { "--columns": Math.ceil(rows.length / Math.ceil(rows.length / 8)) } }, rows.map(([name, value]) => el("div", { class: "card tile" }, el("span", { class: "dim small" }, name), el("b", {}, value(RUNS[0])))));
  return el("section", { style: { "margin-top": "16px" } }, facts, reasons);
}
function lowestHeldOut(run) {
  // With its step. The evaluation before the first step is of the base, and no candidate.
  const steps = run.evaluations.step || [], losses = run.evaluations.eval_loss || [];
  const best = lowest(losses.filter((_, index) => steps[index] > 0));
  return isNumber(best) ? `${short(best)} at step ${whole(steps[losses.indexOf(best)])}` : null;
}
function memoryColumns() {
  const names = new Set(RUNS.flatMap((run) => Object.keys(run.steps).filter((name) => name.startsWith("memory/"))));
  return [...names].map((name) => [name, name.slice(7).replaceAll("_", " ")]);
}
function stacks(title, partsOf, show, note) {
  const found = RUNS.map((run) => [run, Object.entries(partsOf(run)).filter(([, value]) => isNumber(value) && value > 0)]).filter(([, parts]) => parts.length);
  if (!found.length) return null;
  const names = [...new Set(found.flatMap(([, parts]) => parts.map(([name]) => name)))];
  const color = (name) => `var(--c${names.indexOf(name) % 8})`;
  const longest = Math.max(...found.map(([, parts]) => parts.reduce((sum, [, value]) => sum + value, 0)));
  return el("section", { class: "card" }, el("h3", {}, title), note ? el("p", { class: "dim small" }, note) : null, found.map(([run, parts]) => {
    const total = parts.reduce((sum, [, value]) => sum + value, 0);
    return el("div", { class: "block" },
      el("div", { class: "small" }, RUNS.length > 1 ? [named(run), " "] : null, `${show(total)} in all`),
      el("div", { class: "stack", style: { width: `${(100 * total) / longest}%` } }, parts.map(([name, value]) =>
        el("div", { title: `${name}: ${show(value)}`, style: { background: color(name), width: `${(100 * value) / total}%` } }))),
      el("div", { class: "legend" }, parts.map(([name, value]) => el("span", {}, el("i", { style: { background: color(name) } }), `${name} ${show(value)}`))));
  }));
}
const PLANNED = "What stays allocated in every step: weights, adapters, gradients, optimizer state. The measured peak is higher: " +
  "it has the activations of the longest rows too and, on a CPU, the whole process with Python and its libraries.";
function phases(run) {
  const total = {};
  for (const start of run.facts.starts || [])
    for (const [name, seconds] of Object.entries(start.seconds || {})) total[name] = (total[name] || 0) + seconds;
  return total;
}
function histogram(run) {
  const data = run.facts.data;
  if (!data || !data.lengths || !(data.lengths.counts || []).length) return null;
  const { counts, edges } = data.lengths, most = Math.max(...counts, 1), width = 360, height = 120, size = (width - 8) / counts.length;
  const bars = counts.map((count, index) => draw("rect", { x: 4 + index * size, width: Math.max(1, size - 1), y: 8 + (1 - count / most) * (height - 30),
    height: (count / most) * (height - 30), style: { fill: run.color } }, draw("title", {}, `${edges[index]} to ${edges[index + 1]} tokens: ${whole(count)} rows`)));
  const label = (x, text, anchor) => draw("text", { x, y: height - 6, "text-anchor": anchor }, text);
  const facts = [
    ["rows trained on", whole(data.rows)], ["held out", whole(data.held_out)], ["tokens", whole(data.tokens)], ["learned", percent(data.learned / data.tokens)],
    ["longest row", `${whole(data.longest)} tokens`], ["truncated", `${whole(data.truncated)} rows, ${whole(data.tokens_cut)} tokens`],
    ["padding", percent(data.padding_share)], ["left out", whole(data.rejected)],
  ].filter(([, text]) => !text.startsWith("–"));
  return el("section", { class: "card" }, el("h3", {}, RUNS.length > 1 ? named(run) : "Tokens per row"), el("div", { class: "data" },
    el("div", { class: "chart" }, draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "lengths of the rows" }, bars,
      draw("line", { x1: 4, x2: width - 4, y1: height - 22, y2: height - 22, stroke: "var(--strong)" }),
      label(4, whole(edges[0]), "start"), label(width / 2, "tokens per row", "middle"), label(width - 4, whole(edges.at(-1)), "end"))),
    table(null, facts.map(([name, text]) => el("tr", {}, el("th", {}, name), el("td", {}, text))))));
}
function samples() {
  const prompts = [...new Set(RUNS.flatMap((run) => run.samples.map((row) => row.prompt)))];
  return prompts.slice(0, 50).map((prompt) => el("section", { class: "card", style: { "margin-bottom": "12px" } }, el("pre", { class: "prompt" }, prompt),
    el("div", { class: "answers" }, RUNS.map((run) => {
      const rows = run.samples.filter((row) => row.prompt === prompt);
      if (!rows.length) return null;
      const text = el("pre", {}), at = el("span", { class: "dim small" });
      const show = (index) => { text.textContent = rows[index].text; at.textContent = `after step ${rows[index].step}`; };
      const slider = rows.length > 1 ? el("input", { type: "range", min: 0, max: rows.length - 1, value: rows.length - 1, "aria-label": "step of the sample",
        style: { "accent-color": run.color, width: "130px" }, oninput: (event) => show(Number(event.target.value)) }) : null;
      show(rows.length - 1);
      return el("div", { style: { "border-color": run.color } }, el("div", { class: "head" }, RUNS.length > 1 ? named(run) : at, RUNS.length > 1 ? at : null, slider), text);
    }))));
}
const asText = (value) => (value === null || value === undefined ? "–" : Array.isArray(value) ? value.join(", ") : typeof value === "object" ? JSON.stringify(value) : String(value));
function comparison(get, isNotable) {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(get(run))))];
  const rows = names.map((name) => {
    const texts = RUNS.map((run) => asText(get(run)[name])), differs = new Set(texts).size > 1;
    return { differs, notable: differs || isNotable(name, texts),
      row: () => el("tr", { class: differs ? "differs" : null }, el("th", {}, name), texts.map((text) => el("td", {}, text))) };
  });
  return { rows, head: RUNS.length > 1 ? ["", ...RUNS.map(named)] : null };
}
function settings() {
  const { rows, head } = comparison((run) => run.settings, (name, texts) => !(name in DATA.defaults) || asText(DATA.defaults[name]) !== texts[0]);
  if (!rows.length) return null;
  const notable = rows.filter((row) => row.notable);
  return el("div", { class: "card" }, el("p", { class: "dim small" }, RUNS.length > 1 ? "Marked: what differs between the runs. The others differ from the default." : "What differs from the defaults."),
    table(head, notable.map((row) => row.row())), el("details", {}, el("summary", {}, "all settings"), table(head, rows.map((row) => row.row()))));
}
function environment() {
  const flat = (run) => Object.fromEntries(Object.entries(run.facts.environment || {}).flatMap(([heading, values]) =>
    Object.entries(values || {}).map(([name, value]) => [heading === "versions" ? name : `${heading}: ${name}`, value])));
  const { rows, head } = comparison(flat, () => true);
  if (!rows.length) return null;
  return el("details", { class: "card" }, el("summary", {}, "versions, machine, variables"), table(head, rows.map((row) => row.row())));
}
function controls() {
  const chips = RUNS.length > 1 ? RUNS.map((run) => {
    const chip = el("button", { type: "button", class: "run", "aria-pressed": "true", title: "show or hide", onclick: () => {
      run.shown = !run.shown;
      chip.setAttribute("aria-pressed", run.shown);
      repaint();
    } }, dot(run), el("span", {}, run.name));
    return chip;
  }) : null;
  const axes = Object.entries(AXES).filter(([name]) => RUNS.some((run) => (run.steps[name] || []).some(isNumber)));
  return el("div", { class: "bar" }, chips,
    el("label", {}, "by", el("select", { onchange: (event) => { view.axis = event.target.value; repaint(); } }, axes.map(([name, text]) => el("option", { value: name }, text)))),
    el("label", {}, "smoothing", el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth, oninput: (event) => { view.smooth = Number(event.target.value); repaint(); } })),
    el("button", { type: "button", title: "light or dark", onclick: () => {
      const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      document.documentElement.dataset.theme = isDark ? "light" : "dark";
    } }, "◐"));
}
const repaint = () => charts.forEach((paint) => paint());

function build() {
  const model = (run) => [run.settings.model_name, run.settings.train_type].filter(Boolean).map(asText).join(", ");
  const curves = [
    { title: "Training loss", kind: "steps", columns: [["loss", ""]], smooth: true },
    { title: "Held-out loss", kind: "evaluations", columns: [["eval_loss", ""]] },
    { title: "Share of pairs in which the chosen answer has the larger reward", kind: "steps", columns: [["rewards/accuracies", ""]], smooth: true, zero: true },
    { title: "The same of held-out pairs", kind: "evaluations", columns: [["rewards/accuracies", ""]], zero: true },
    { title: "Reward", kind: "steps", columns: [["reward", ""]], smooth: true },
    { title: "Held-out reward", kind: "evaluations", columns: [["eval_reward", ""]] },
    { title: "Tokens of an answer", kind: "steps", columns: [["completions/mean_length", ""]], smooth: true, zero: true },
    { title: "Share of answers that were cut", kind: "steps", columns: [["completions/clipped_ratio", ""]], smooth: true, zero: true },
    { title: "Entropy of the predictions", kind: "steps", columns: [["entropy", ""]], smooth: true },
    { title: "Rewards", kind: "steps", columns: [["rewards/chosen", "chosen"], ["rewards/rejected", "rejected"], ["rewards/margins", "margin"]], smooth: true },
    { title: "Learning rate", kind: "steps", columns: [["lr", ""]], zero: true },
    { title: "Gradient norm", kind: "steps", columns: [["grad_norm", ""]], smooth: true },
    { title: "Tokens per second", kind: "steps", columns: [["tokens_per_second", ""]], smooth: true, zero: true },
    { title: "Memory of the fullest rank, GiB", kind: "steps", columns: memoryColumns(), zero: true },
  ].map(chart).filter(Boolean);
  const shares = [
    stacks("Memory that was planned, per rank", (run) => run.facts.memory || {}, bytes, PLANNED),
    stacks("Time", phases, time, RUNS.some((run) => (run.facts.starts || []).length > 1) ? "Of all starts of a run." : null),
  ].filter(Boolean);
  const page = document.getElementById("page");
  page.replaceChildren(...[
    el("header", {}, el("h1", {}, RUNS.map((run) => run.name).join(" · ")), el("span", { class: "dim small" }, RUNS.length > 1 ? `${RUNS.length} runs` : model(RUNS[0]))),
    controls(), summary(),
    section("Curves", curves.length ? el("div", { class: "grid" }, curves) : el("p", { class: "dim" }, "No step has been recorded.")),
    section("Memory and time", shares.length ? el("div", { class: "grid" }, shares) : null),
    section("Data", (() => { const found = RUNS.map(histogram).filter(Boolean); return found.length ? el("div", { class: "grid" }, found) : null; })()),
    section("Samples", samples()),
    section("Settings", settings()),
    section("Environment", environment()),
    el("footer", {}, `Made by fsdp_qlora ${DATA.version}, ${DATA.made}. This file needs no network.`),
  ].filter(Boolean));
  repaint();
}
build();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; repaint(); } });
