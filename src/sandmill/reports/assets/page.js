// The sections from top to bottom, except the episode reader.
function header() {
  const run = data.run, figures = data.figures;
  at("name").textContent = run.name;
  const status = run.finished ? el("span", { class: "chip good" }, "finished") : el("span", { class: "chip warn" }, run.status);
  at("subtitle").append(status, `  ${[run.environment, run.model, run.at].filter(known).join(" · ")}`);
  at("lede").append(...lede());
  const tiles = [
    [known(figures.steps_planned) ? `${figures.steps_done} / ${figures.steps_planned}` : figures.steps_done, "training steps"],
    [secs(figures.training_seconds), "training time"],
    [secs(figures.seconds_per_step), "a step"],
    [whole(figures.tokens_per_s), "tokens/s sampled"],
    [whole(figures.episodes), "episodes trained"],
    [figures.failures, "failures, in no rate", figures.failures ? "bad" : ""],
    [figures.cost, "cost so far"],
    [figures.peak_memory || "–", "peak memory"],
  ];
  at("tiles").append(...tiles.map(([value, name, kind]) => el("div", { class: `tile ${kind || ""}` }, el("b", {}, value), el("span", {}, name))));
  const shown = data.warnings.slice(0, 8);
  at("warnings").append(...shown.map((one) => el("div", { class: "note" }, one)));
  if (data.warnings.length > shown.length) at("warnings").append(el("p", { class: "muted small" }, `and ${data.warnings.length - shown.length} more in metrics.jsonl`));
}

// The result in one sentence, from the held-out split if it was sampled before and after, else from another; without one, how far the run is.
function lede() {
  const compared = data.evaluations.filter((one) => one.change);
  const row = compared.find((one) => one.split === "heldout" && !one.greedy) || compared.find((one) => !one.greedy) || compared[0];
  if (!row && data.alone && data.evaluations.length) return ["An evaluation outside any training."];
  if (!row) return data.run.finished ? [] : ["This run has not come to its final evaluation yet."];
  const change = row.change, sure = change.low > 0 ? "up" : change.high < 0 ? "down" : "with no clear change";
  return ["On ", row.split, " tasks, never trained on, the pass rate went from ", el("b", {}, pct(row.before.rate, 1)), " to ", el("b", {}, pct(row.after.rate, 1)),
    `, ${sure}: ${signed(change.rate)} points, 95 % interval [${signed(change.low)}, ${signed(change.high)}].`];
}

function dotPlot(row, width) {
  const height = 30, px = (rate) => 6 + (width - 12) * rate, y = 15;
  const root = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${row.split}: before ${range(row.before)}, after ${range(row.after)}` });
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) root.append(sv("line", { class: "grid", x1: px(tick), x2: px(tick), y1: 2, y2: height - 2 }));
  if (row.before && row.after) root.append(sv("line", { class: "travel", x1: px(row.before.rate), x2: px(row.after.rate), y1: y, y2: y }));
  for (const name of ["before", "after"]) {
    const one = row[name];
    if (!one) continue;
    root.append(sv("line", { class: `${name}-line`, x1: px(one.low), x2: px(one.high), y1: y, y2: y }));
    const dot = sv("circle", { class: name, cx: px(one.rate), cy: y, r: 5.5 });
    dot.addEventListener("pointermove", (event) => showTip(event, `${data.alone ? "pass rate" : `${name} training`}\n${range(one)}\n${one.passed} of ${one.graded} attempts at ${one.tasks} tasks${known(one.pass_at_k) ? `\npass@${one.k}: ${pct(one.pass_at_k, 1)}` : ""}`));
    dot.addEventListener("pointerleave", hideTip);
    root.append(dot);
  }
  return root;
}

function results() {
  const body = at("results-body");
  if (!data.evaluations.length) { body.append(el("p", { class: "muted" }, "No held-out split has been evaluated yet.")); return; }
  const scale = el("th", { class: "plot" });
  const head = el("tr", {}, el("th", {}, "split"), el("th", {}, "sampling"), scale, ...(data.alone ? ["pass rate"] : ["before", "after", "change, points"]).map((name) => el("th", { class: "num" }, name)), el("th", { class: "num" }, "failures"));
  const rows = data.evaluations.map((row) => {
    const plot = el("td", { class: "plot" });
    const change = row.change ? el("td", { class: `num ${row.change.low > 0 ? "pos" : row.change.high < 0 ? "neg" : ""}` }, `${signed(row.change.rate)} [${signed(row.change.low)}, ${signed(row.change.high)}]`) : el("td", { class: "num" }, "–");
    const line = el("tr", {}, el("td", {}, row.split), el("td", { class: "muted" }, row.greedy ? "greedy" : row.samples > 1 ? `sampled × ${row.samples}` : "sampled"), plot, data.alone ? null : el("td", { class: "num" }, range(row.before)), el("td", { class: "num" }, range(row.after)), data.alone ? null : change, el("td", { class: "num" }, row.failures || el("span", { class: "muted" }, "0")));
    return [line, plot, row];
  });
  body.append(el("div", { class: "card table-scroll" }, el("table", { class: "results" }, el("thead", {}, head), el("tbody", {}, rows.map((one) => one[0])))));
  onWidth(scale, (width) => {
    const root = sv("svg", { viewBox: `0 0 ${width} 14`, height: 14, "aria-hidden": "true" });
    for (const tick of [0, 0.25, 0.5, 0.75, 1]) root.append(sv("text", { x: 6 + (width - 12) * tick, y: 11, "text-anchor": tick === 0 ? "start" : tick === 1 ? "end" : "middle" }, `${100 * tick} %`));
    return root;
  });
  rows.forEach(([, plot, row]) => onWidth(plot, (width) => dotPlot(row, width)));
  body.append(el("p", { class: "muted small" }, `${data.alone ? "" : "Hollow: before training. Filled: after. "}Brackets and bars are 95 % intervals: Wilson's for one attempt per task, over tasks for several; the change is paired by task. Failures of the infrastructure are in none of the rates.`));
}

function learning() {
  const body = at("learning-body"), steps = data.steps;
  if (!steps.step.length) { body.append(el("p", { class: "muted" }, "No training step has finished yet.")); return; }
  const counts = (index) => `${steps.passed[index]} passed of ${steps.graded[index]} graded${steps.failures[index] ? `, ${steps.failures[index]} failed` : ""}`;
  const pick = (step) => openStep(step);
  lineChart(body, "Reward", steps.step, steps.reward, { caption: "mean of a step's graded episodes; bold: of the last 5 steps", more: counts, pick });
  lineChart(body, "Pass rate", steps.step, steps.pass, { caption: "training tasks, sampled; points: held-out", low: 0, high: 1, format: (value) => pct(value), more: counts, marks: data.marks, pick });
  const small = el("div", { class: "charts three" });
  body.after(small);
  lineChart(small, "Entropy", steps.step, steps.entropy, { caption: "nats a token", height: 150 });
  lineChart(small, "Gradient norm", steps.step, steps.grad_norm, { height: 150 });
  lineChart(small, "Sampler against trainer", steps.step, steps.kl, { caption: "nats a token", height: 150, format: (value) => (known(value) ? value.toExponential(1) : "–") });
}

function halves() {
  const body = at("halves-body"), found = data.halves;
  if (!found.rows.length) { body.append(el("p", { class: "muted" }, "No task has been graded in both halves of training yet.")); return; }
  const change = found.change;
  body.append(el("p", {}, `Over ${whole(found.tasks)} tasks graded in both halves, the pass rate changed by `, el("b", {}, `${signed(change.rate)} points`), ` [${signed(change.low)}, ${signed(change.high)}].`));
  const cell = (half) => el("td", { class: "num" }, `${pct(half.rate)} (${half.passed} of ${half.graded})`);
  const rows = found.rows.map((row) => {
    const by = row.second.rate - row.first.rate, failures = row.first.failures + row.second.failures;
    return el("tr", {}, el("td", {}, row.title), cell(row.first), cell(row.second), el("td", { class: `num ${by > 0 ? "pos" : by < 0 ? "neg" : ""}` }, signed(by)), el("td", { class: "num" }, failures || el("span", { class: "muted" }, "0")));
  });
  const head = el("tr", {}, el("th", {}, "task"), ...["first half", "second half", "change, points", "failures"].map((name) => el("th", { class: "num" }, name)));
  body.append(el("div", { class: "card table-scroll tall" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
  const left = found.tasks - found.rows.length;
  if (left || found.one_half_only) body.append(el("p", { class: "muted small" }, `${left ? `${whole(left)} more tasks changed less. ` : ""}${found.one_half_only ? `${whole(found.one_half_only)} tasks were graded in one half only.` : ""}`));
}

function time() {
  const body = at("time-body"), steps = data.steps;
  if (!steps.step.length) { body.append(el("p", { class: "muted" }, "No training step has finished yet.")); return; }
  const totals = data.parts.map((_, part) => steps.parts.reduce((sum, row) => sum + row[part], 0) / steps.step.length);
  const bars = el("div");
  const stepCard = el("div", { class: "card" }, el("h3", {}, "A training step"), shareBar(data.parts, totals, " a step"), bars);
  const stack = el("div", { class: "stack" }, stepCard);
  body.append(stack);
  stackedBars(bars, data.parts, steps.step, steps.parts, (step) => openStep(step));
  if (data.episode_seconds.some((one) => one > 0)) {
    const caption = el("span", { class: "muted small" }, `  mean of ${whole(data.episode_count)} training episodes`);
    stack.append(el("div", { class: "card" }, el("h3", {}, "An episode", caption), shareBar(data.episode_parts, data.episode_seconds, " an episode")));
  }
  if (data.timelines.length) stack.append(timelines());
}

function timelines() {
  const slider = el("input", { type: "range", min: 0, max: data.timelines.length - 1, value: data.timelines.length - 1, "aria-label": "step of the timeline" });
  const name = el("b", {}), holder = el("div");
  const card = el("div", { class: "card" }, el("h3", {}, "Episodes of a step, side by side"), el("div", { class: "legend" }, data.episode_parts.map((part) => el("span", {}, el("i", { class: `s-${part.key}` }), part.label))), el("p", { class: "small" }, slider, "  ", name), holder);
  const redraw = onWidth(holder, (width) => {
    const one = data.timelines[Number(slider.value)];
    name.textContent = `step ${one.step}: ${one.rows.length} of ${one.count} episodes`;
    const start = Math.min(...one.rows.flatMap((row) => row.map((span) => span[1]))), end = Math.max(...one.rows.flatMap((row) => row.map((span) => span[2])));
    const high = one.rows.length > 32 ? 5 : 8, px = (t) => ((width - 2) * (t - start)) / Math.max(1e-9, end - start), height = one.rows.length * high + 22;
    const root = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `timeline of step ${one.step}` });
    for (const tick of niceTicks(0, end - start, 8)) root.append(sv("line", { class: "grid", x1: px(start + tick), x2: px(start + tick), y1: 0, y2: height - 18 }), sv("text", { x: px(start + tick), y: height - 4, "text-anchor": tick ? "middle" : "start" }, secs(tick)));
    one.rows.forEach((row, index) => row.forEach(([stage, from, to]) => {
      const part = data.episode_parts[stage];
      const rect = sv("rect", { class: `s-${part.key}`, x: px(from), y: index * high, width: Math.max(0.6, px(to) - px(from)), height: high - 1.5 });
      rect.addEventListener("pointermove", (event) => showTip(event, `${part.label}\n${secs(to - from)}`));
      rect.addEventListener("pointerleave", hideTip);
      root.append(rect);
    }));
    return root;
  });
  slider.addEventListener("input", redraw);
  return card;
}

function cost() {
  const rows = data.costs.map((row) => el("tr", {}, el("td", {}, row.what), el("td", { class: "num" }, whole(row.rows)), el("td", { class: "num" }, whole(row.failures)), el("td", { class: "num" }, row.cost)));
  const head = el("tr", {}, el("th", {}, "what"), el("th", { class: "num" }, "attempts"), el("th", { class: "num" }, "failures among them"), el("th", { class: "num" }, "USD"));
  const table = rows.length ? el("div", { class: "table-scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))) : null;
  const total = el("p", {}, "Total so far: ", el("b", {}, data.figures.cost));
  const why = data.figures.cost === "unknown" ? el("p", { class: "muted small" }, "A price is unknown, so the total is unknown too: set spec.prices to know it.") : null;
  at("cost-body").append(el("div", { class: "card" }, total, why, table));
}

function configuration() {
  at("configuration-body").append(el("div", { class: "card config" }, el("pre", {}, data.configuration || "manifest.json is missing or cannot be read")));
}
