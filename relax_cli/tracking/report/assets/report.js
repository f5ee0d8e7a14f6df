"use strict";
// Text of a run only ever becomes text nodes: nothing in a prompt or a response is read as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const PALETTE = ["#0b7285", "#d9480f", "#5f3dc4", "#2b8a3e", "#c2255c", "#1864ab", "#a87900", "#495057"];
const TOGETHER = ["reward/mean", "value_loss", "value_clip_frac", "pg_loss", "pg_clip_frac", "ppo_kl",
  "response_len/mean", "explained_variance", "entropy", "truncated_frac"];
const byId = (id) => document.getElementById(id);
const color = (i) => PALETTE[i % PALETTE.length];

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}
const number = (value) => value == null ? "–" : Number(value.toPrecision(4)).toString();

// --- overview ---------------------------------------------------------------------------------------------------

function definition(rows) {
  const list = make("dl");
  for (const [name, value] of rows) if (value != null && value !== "") list.append(make("dt", {}, name), make("dd", {}, value));
  return list;
}
function overview() {
  const cards = make("div", { className: "cards" });
  data.runs.forEach((run, i) => {
    const rewards = run.metrics["reward/mean"] || [];
    const seconds = (run.metrics.step_seconds || []).reduce((sum, value) => sum + (value || 0), 0);
    const evaluations = Object.entries(run.evaluations).map(([name, points]) =>
      `${name} ${number(points[0]["reward/mean"])} → ${number(points[points.length - 1]["reward/mean"])}`);
    const card = make("div", { className: "card" }, make("h3", {}, run.name), definition([
      ["folder", run.path], ["estimator", (run.config["algorithm.advantage_estimator"] || [""])[0]],
      ["model", (run.config["model.hf_checkpoint"] || [""])[0]], ["steps", String(run.steps.length)],
      ["seconds in steps", number(seconds)],
      ["reward", rewards.length ? `${number(rewards[0])} → ${number(rewards[rewards.length - 1])}` : null],
      ["held out", evaluations.join(", ")], ["warnings", String(run.warnings.length)],
    ]), make("details", {}, make("summary", {}, "Command and versions"), make("pre", { className: "text" }, run.command),
      definition(Object.entries(run.versions))));
    card.style.borderLeftColor = color(i);
    cards.append(card);
  });
  byId("overview").append(cards);
  if (data.differing.length && data.runs.length > 1) {
    byId("overview").append(make("h2", {}, "Differences of the configurations"), table(
      ["option", ...data.runs.map((run) => run.name)], data.differing.map(([key, values]) => [key, ...values])));
  }
}
function table(header, rows) {
  const head = make("tr", {}, ...header.map((cell) => make("th", { scope: "col" }, cell)));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, String(cell)))));
  return make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

// --- charts -----------------------------------------------------------------------------------------------------

const drawn = [];
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); entry.target.draw(); }
}, { rootMargin: "400px" });

function chart(parent, title, build) {
  const holder = make("div", { className: "chart" }, make("h3", {}, title));
  let plot = null;
  holder.dataset.title = title;
  holder.draw = () => {
    if (plot) plot.destroy();
    const style = getComputedStyle(document.documentElement);
    const axis = { stroke: style.getPropertyValue("--muted"), grid: { stroke: style.getPropertyValue("--grid"), width: 1 },
      ticks: { stroke: style.getPropertyValue("--grid"), width: 1 } };
    const { series, values, bands, label } = build();
    plot = new uPlot({
      width: Math.max(200, holder.clientWidth - 22), height: 180, bands, cursor: { sync: { key: "runs" } },
      scales: { x: { time: false } },
      axes: [axis, { ...axis, size: 58, values: (_, ticks) => ticks.map(number) }],
      series: [{ label, value: (_, v) => number(v) }, ...series.map((one) => ({ width: 1.5, spanGaps: true,
        points: { show: values[0].length < 40 }, value: (_, v) => number(v), ...one }))],
    }, values, holder);
    if (!drawn.includes(holder)) drawn.push(holder);
  };
  parent.append(holder);
  observer.observe(holder);
  return holder;
}
const redraw = () => drawn.forEach((holder) => holder.draw());

function smoothed(values, width) {
  if (width <= 1) return values;
  const kept = [];
  let sum = 0;
  return values.map((value) => {
    if (value == null) return null;
    kept.push(value);
    sum += value;
    if (kept.length > width) sum -= kept[kept.length - 1 - width];
    return sum / Math.min(kept.length, width);
  });
}
function places(run) {
  if (byId("axis").value === "step") return run.steps;
  const start = run.times[0] || 0;
  return run.times.map((time) => (time - start) / 60);
}
/** The runs that have `name`, on one axis. */
function joined(name) {
  const having = data.runs.map((run, i) => ({ run, i })).filter(({ run }) => run.metrics[name]);
  const width = Number(byId("smooth").value) || 1;
  const tables = having.map(({ run }) => [places(run), smoothed(run.metrics[name], width)]);
  return { label: byId("axis").value === "step" ? "step" : "minutes", values: tables.length > 1 ? uPlot.join(tables) : tables[0],
    series: having.map(({ run, i }) => ({ label: run.name, stroke: color(i) })) };
}
const GROUPS = [
  ["Read together", (name) => TOGETHER.includes(name)],
  ["Reward and length", (name) => /^(reward|response_len|prompt_len|truncated)/.test(name)],
  ["Sampling", (name) => /^(sampling|partial|curriculum|groups)/.test(name)],
  ["Critic", (name) => /^(critic|value|returns|explained)/.test(name)],
  ["Policy", (name) => /^(actor|pg_|ppo|kl|entropy|advantages|tis|train_rollout)/.test(name)],
  ["Memory", (name) => /memory/.test(name)],
  ["Speed", (name) => /(second|tokens)/.test(name)],
  ["Other", () => true],
];
function curves() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => !name.startsWith("phase_seconds/"));
  const rest = new Set(names);
  for (const [title, belongs] of GROUPS) {
    const chosen = [...rest].filter(title === "Memory" ? belongs : (name) => belongs(name) && (title === "Other" || !/memory/.test(name)));
    if (title === "Read together") chosen.sort((a, b) => TOGETHER.indexOf(a) - TOGETHER.indexOf(b));
    if (!chosen.length) continue;
    const group = make("div", { className: "group" });
    byId("charts").append(make("h3", {}, title), group);
    for (const name of chosen) { rest.delete(name); chart(group, name, () => joined(name)); }
  }
}
function phases() {
  const parent = document.querySelector("#phases .charts");
  for (const run of data.runs) {
    const names = Object.keys(run.metrics).filter((name) => name.startsWith("phase_seconds/"));
    if (!names.length) continue;
    chart(parent, run.name, () => {
      let below = run.steps.map(() => 0);
      const layers = names.map((name) => (below = run.metrics[name].map((value, i) => below[i] + (value || 0))));
      const series = names.map((name, i) => ({ label: name.slice("phase_seconds/".length), stroke: color(i), fill: color(i) + "88",
        points: { show: false }, value: (_, v, at, place) => place == null ? "–" : number(run.metrics[names[at - 1]][place]) }));
      // The highest layer first, so that those below are drawn over it; the legend keeps the order of a step.
      return { label: byId("axis").value === "step" ? "step" : "minutes", values: [places(run), ...layers], series,
        bands: names.slice(1).map((_, i) => ({ series: [i + 2, i + 1], fill: color(i + 1) + "88" })) };
    });
  }
}
function evaluations() {
  const parent = document.querySelector("#evaluations .charts");
  const sets = [...new Set(data.runs.flatMap((run) => Object.keys(run.evaluations)))];
  for (const set of sets) {
    const having = data.runs.map((run, i) => ({ run, i })).filter(({ run }) => run.evaluations[set]);
    const names = [...new Set(having.flatMap(({ run }) => run.evaluations[set].flatMap(Object.keys)))].filter((name) =>
      !["step", "reward/ci95", "reward/std", "reward/min", "reward/max", "prompts", "samples", "seconds"].includes(name));
    for (const name of names) {
      chart(parent, `${set}: ${name}`, () => {
        const withInterval = name === "reward/mean";
        const tables = having.map(({ run }) => {
          const points = run.evaluations[set];
          const mean = points.map((point) => point[name] ?? null);
          const off = (sign) => points.map((point, k) => mean[k] == null ? null : mean[k] + sign * (point["reward/ci95"] || 0));
          return [points.map((point) => point.step), mean, ...(withInterval ? [off(1), off(-1)] : [])];
        });
        const each = withInterval ? 3 : 1;
        const series = having.flatMap(({ run, i }) => [
          { label: run.name, stroke: color(i), points: { show: true } },
          ...(withInterval ? ["+95 %", "−95 %"].map((label) => ({ label, stroke: color(i) + "55", points: { show: false } })) : []),
        ]);
        const bands = withInterval ? having.map(({ i }, k) => ({ series: [k * each + 2, k * each + 3], fill: color(i) + "22" })) : [];
        return { label: "step", values: tables.length > 1 ? uPlot.join(tables) : tables[0], series, bands };
      });
    }
  }
  if (!sets.length) parent.append(make("p", { className: "muted" }, "None: --eval-prompt-data NAME PATH evaluates held-out prompts."));
}
function warnings() {
  const rows = data.runs.flatMap((run) => run.warnings.map((one) => [run.name, one.step, one.seen ?? "", one.look_at ?? ""]));
  byId("warnings").append(rows.length ? table(["run", "step", "seen", "look at"], rows) : make("p", { className: "muted" }, "None."));
}
function configuration() {
  for (const run of data.runs) {
    byId("configuration").append(make("details", { open: data.runs.length === 1 }, make("summary", {}, run.name),
      table(["option", "value", "from"], Object.entries(run.config).map(([key, [value, origin]]) => [key, value, origin]))));
  }
}

// --- samples ----------------------------------------------------------------------------------------------------

const chosen = { run: 0, step: 0, sample: 0, token: 0 };
function options(select, labels, current) {
  select.replaceChildren(...labels.map((label, i) => make("option", { value: String(i) }, label)));
  select.value = String(current);
}
function samples() {
  const having = data.runs.filter((run) => run.samples.length);
  if (!having.length) {
    byId("samples").replaceChildren(make("h2", {}, "Samples"), make("p", { className: "muted" }, "None were written (--dump-rollouts)."));
    return;
  }
  options(byId("sample-run"), having.map((run) => run.name), 0);
  byId("sample-run").addEventListener("change", (event) => { chosen.run = Number(event.target.value); showSteps(); });
  byId("sample-step").addEventListener("change", (event) => { chosen.step = Number(event.target.value); showList(); });
  byId("colour").addEventListener("change", paint);
  const current = () => having[chosen.run].samples[chosen.step];
  function showSteps() {
    const steps = having[chosen.run].samples;
    chosen.step = Math.max(0, steps.map((one) => one.set).lastIndexOf(null));
    options(byId("sample-step"), steps.map((one) => one.set == null ? String(one.step) : `${one.step}, held-out set ${one.set}`), chosen.step);
    showList();
  }
  function showList() {
    chosen.sample = 0;
    const { samples: list, of, set } = current();
    byId("sample-count").textContent = `${list.length} of ${of} samples: the first, the worst and the best; relax rollouts${set == null ? "" : " --evals"} shows all`;
    byId("sample-list").replaceChildren(...list.map((one, i) => make("li", {}, make("button", { type: "button",
      on: { click: () => { chosen.sample = i; showSample(); } } },
    `${one.row} · reward ${number(one.reward)}${one.advantage == null ? "" : ` · adv ${number(one.advantage)}`}`,
    make("br"), make("span", { className: "muted" }, `group ${one.group} · ${one.response.slice(0, 60)}`)))));
    showSample();
  }
  function showSample() {
    byId("sample-list").querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-current", String(i === chosen.sample)));
    const one = current().samples[chosen.sample];
    const names = Object.keys(one.numbers);
    const before = byId("colour").selectedOptions[0]?.textContent;
    const start = names.findIndex((name) => data.columns[name] === before);
    options(byId("colour"), names.map((name) => data.columns[name]), start >= 0 ? start : Math.max(0, names.indexOf("advantages")));
    const masked = new Set(one.masked);
    const tokens = make("div", { id: "tokens", className: "text", tabIndex: 0, role: "application",
      "aria-label": "Response by token; arrow keys move", on: { keydown: move } },
    ...one.tokens.map((token, i) => make("span", { className: masked.has(i) ? "masked" : "", on: { mouseenter: () => point(i) } }, token)));
    const group = current().samples.filter((other) => other.group === one.group);
    byId("sample").replaceChildren(
      definition([["reward", [number(one.reward), ...Object.entries(one.parts).map(([k, v]) => `${k} ${number(v)}`)].join(", ")],
        ["length", `${one.length} tokens, ${one.finish}`], ["label", one.label == null ? null : typeof one.label === "string" ? one.label : JSON.stringify(one.label)]]),
      make("h3", {}, "Prompt"), make("div", { className: "text" }, one.prompt),
      make("h3", {}, one.tokens.length < one.length ? `Response, the first ${one.tokens.length} tokens` : "Response"), tokens,
      make("div", { id: "readout", ariaLive: "polite" }),
      ...group.length < 2 ? [] : [make("h3", {}, `Group ${one.group}`),
        table(["row", "reward", "advantage", "response"], group.map((other) => [other.row, number(other.reward), number(other.advantage), other.response.slice(0, 400)]))]);
    paint();
    point(0);
  }
  function paint() {
    const one = current().samples[chosen.sample];
    const name = Object.keys(one.numbers)[Number(byId("colour").value)];
    const values = (one.numbers[name] || []).map((value) => value == null ? null : name === "ratio" ? value - 1 : value);
    const largest = Math.max(name === "ratio" ? 0.05 : 1e-12, ...values.map((value) => Math.abs(value || 0)));
    const signed = name === "advantages" || name === "ratio";
    [...byId("tokens").children].forEach((span, i) => {
      const value = values[i];
      const tone = !signed ? "--size" : value >= 0 ? "--good" : "--bad";
      span.style.background = value == null ? "" : `rgba(var(${tone}), ${(0.65 * Math.abs(value) / largest).toFixed(3)})`;
    });
  }
  function point(i) {
    const one = current().samples[chosen.sample];
    const spans = byId("tokens").children;
    if (!spans.length) return;
    chosen.token = Math.min(Math.max(i, 0), spans.length - 1);
    for (const span of byId("tokens").querySelectorAll(".now")) span.classList.remove("now");
    spans[chosen.token].classList.add("now");
    const what = one.masked.includes(chosen.token) ? " (not trained)" : "";
    byId("readout").replaceChildren(make("b", {}, `token ${chosen.token}: ${JSON.stringify(one.tokens[chosen.token])}${what}`),
      ...Object.entries(one.numbers).filter(([, values]) => values[chosen.token] != null)
        .map(([name, values]) => make("span", {}, `${data.columns[name]} ${number(values[chosen.token])}`)));
  }
  function move(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by) return;
    event.preventDefault();
    point(chosen.token + by);
    byId("tokens").children[chosen.token]?.scrollIntoView({ block: "nearest" });
  }
  showSteps();
}

// --- the page ---------------------------------------------------------------------------------------------------

const dark = window.matchMedia("(prefers-color-scheme: dark)");
function theme(name) { document.documentElement.dataset.theme = name; redraw(); }
theme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
byId("axis").addEventListener("change", redraw);
byId("smooth").addEventListener("change", redraw);
byId("search").addEventListener("input", (event) => {
  for (const holder of byId("charts").querySelectorAll(".chart")) holder.hidden = !holder.dataset.title.includes(event.target.value.trim());
});
let width = window.innerWidth;
window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; redraw(); } });
overview();
curves();
phases();
evaluations();
warnings();
samples();
configuration();
document.documentElement.dataset.milliseconds = Math.round(performance.now());
