"use strict";
// In: numbers and text of the page's data. Out: elements. Text only ever becomes text nodes, so nothing in it can act.
const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const sv = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const at = (id) => document.getElementById(id);

const known = (value) => value !== null && value !== undefined;
const pct = (value, digits = 0) => (known(value) ? `${(100 * value).toFixed(digits)}\u00a0%` : "–");
const num = (value, digits = 2) => (known(value) ? value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–");
const whole = (value) => num(value, 0);
function secs(value) {
  if (!known(value)) return "–";
  if (value < 0.1) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
const range = (interval, digits = 1) => (interval ? `${(100 * interval.rate).toFixed(digits)} % [${(100 * interval.low).toFixed(digits)}, ${(100 * interval.high).toFixed(digits)}]` : "–");
const signed = (value) => `${value >= 0 ? "+" : "−"}${Math.abs(100 * value).toFixed(1)}`;

const tip = at("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(window.innerWidth - box.width - 8, event.clientX + 14))}px`;
  tip.style.top = `${Math.max(4, Math.min(window.innerHeight - box.height - 8, event.clientY + 14))}px`;
}
const hideTip = () => { tip.hidden = true; };

// Draws into `holder` whenever its width becomes another; returns a function that draws it again at once.
function onWidth(holder, draw) {
  let drawnAt = -1;
  const room = () => { const style = getComputedStyle(holder); return holder.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight); };
  const redraw = () => { drawnAt = room(); holder.replaceChildren(draw(Math.max(180, drawnAt))); };
  new ResizeObserver(() => { if (room() !== drawnAt) redraw(); }).observe(holder);
  return redraw;
}

function niceTicks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return ticks;
}

// The mean of the last `window` known values at every position.
function smoothed(values, window) {
  return values.map((value, index) => {
    const recent = values.slice(Math.max(0, index - window + 1), index + 1).filter(known);
    return known(value) && recent.length ? recent.reduce((sum, one) => sum + one, 0) / recent.length : null;
  });
}

function path(xs, ys, px, py) {
  let text = "", pen = false;
  ys.forEach((y, index) => {
    if (!known(y)) { pen = false; return; }
    text += `${pen ? "L" : "M"}${px(xs[index]).toFixed(1)} ${py(y).toFixed(1)}`;
    pen = true;
  });
  return text;
}

function bounds(values, options) {
  const all = values.filter(known);
  let low = known(options.low) ? options.low : Math.min(...all), high = known(options.high) ? options.high : Math.max(...all);
  if (low === high) { low -= 0.5 * (Math.abs(low) || 1); high += 0.5 * (Math.abs(high) || 1); }
  const pad = 0.06 * (high - low);
  return [known(options.low) ? low : low - pad, known(options.high) ? high : high + pad];
}

// A line over steps with hover; `marks` are evaluations drawn as points with their intervals.
function lineChart(holder, title, xs, ys, options) {
  const body = el("div");
  holder.append(el("div", { class: "card" }, el("h3", {}, title, options.caption ? el("span", { class: "muted small" }, `  ${options.caption}`) : null), body));
  if (!ys.some(known)) { body.append(el("p", { class: "muted small" }, "not recorded")); return; }
  const marks = options.marks || [];
  const [low, high] = bounds([...ys, ...marks.map((mark) => mark.rate)], options);
  const show = options.format || ((value) => num(value));
  if (marks.length) {
    const splits = [...new Set(marks.map((mark) => mark.split))];
    body.before(el("div", { class: "legend" }, el("span", {}, el("i", { class: "m-train" }), "training"), splits.map((split, index) => el("span", {}, el("i", { class: `m${index % 4}` }), split))));
  }
  onWidth(body, (width) => {
    const height = options.height || 220, left = 46, right = 10, top = 8, bottom = 24;
    const lastX = Math.max(xs[xs.length - 1], ...marks.map((mark) => mark.step)), firstX = Math.min(xs[0], ...marks.map((mark) => mark.step));
    const px = (x) => left + ((width - left - right) * (x - firstX)) / Math.max(1e-9, lastX - firstX || 1);
    const py = (y) => top + (height - top - bottom) * (1 - (y - low) / (high - low));
    const root = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title} over training steps` });
    for (const tick of niceTicks(low, high, 4)) {
      root.append(sv("line", { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }), sv("text", { x: left - 7, y: py(tick) + 4, "text-anchor": "end" }, show(tick)));
    }
    for (const tick of niceTicks(firstX, lastX, Math.min(8, width / 70)).filter(Number.isInteger)) root.append(sv("text", { x: px(tick), y: height - 6, "text-anchor": "middle" }, tick));
    root.append(sv("path", { class: "raw", d: path(xs, ys, px, py) }));
    root.append(sv("path", { class: "smooth", d: path(xs, smoothed(ys, options.window || 5), px, py) }));
    const splits = [...new Set(marks.map((mark) => mark.split))];
    splits.forEach((split, index) => {
      const mine = marks.filter((mark) => mark.split === split).sort((a, b) => a.step - b.step);
      root.append(sv("path", { class: `route m${index % 4}`, d: path(mine.map((mark) => mark.step), mine.map((mark) => mark.rate), px, py) }));
      for (const mark of mine) {
        root.append(sv("line", { class: `whisker m${index % 4}`, x1: px(mark.step), x2: px(mark.step), y1: py(mark.low), y2: py(mark.high) }));
        const dot = sv("circle", { class: `mark m${index % 4}`, cx: px(mark.step), cy: py(mark.rate), r: 4.5 });
        dot.addEventListener("pointermove", (event) => { showTip(event, `${mark.name}\n${range(mark)}`); event.stopPropagation(); });
        root.append(dot);
      }
    });
    const line = sv("line", { class: "hover", y1: top, y2: height - bottom, visibility: "hidden" });
    root.append(line);
    root.addEventListener("pointermove", (event) => {
      const place = event.clientX - root.getBoundingClientRect().left;
      let best = 0;
      xs.forEach((x, index) => { if (Math.abs(px(x) - place) < Math.abs(px(xs[best]) - place)) best = index; });
      line.setAttribute("x1", px(xs[best])); line.setAttribute("x2", px(xs[best])); line.setAttribute("visibility", "visible");
      showTip(event, `step ${xs[best]}\n${show(ys[best])}${options.more ? `\n${options.more(best)}` : ""}`);
    });
    root.addEventListener("pointerleave", () => { line.setAttribute("visibility", "hidden"); hideTip(); });
    if (options.pick) root.addEventListener("click", (event) => {
      const place = event.clientX - root.getBoundingClientRect().left;
      options.pick(xs.reduce((best, x) => (Math.abs(px(x) - place) < Math.abs(px(best) - place) ? x : best), xs[0]));
    });
    return root;
  });
}

// One bar whose parts add up to the whole, with its legend.
function shareBar(parts, seconds, perWhat) {
  const total = seconds.reduce((sum, one) => sum + one, 0);
  if (!(total > 0)) return el("p", { class: "muted small" }, "not measured yet");
  const bar = el("div", { class: "share", role: "img" }), legend = el("div", { class: "legend" });
  parts.forEach((part, index) => {
    const share = seconds[index] / total;
    if (share < 0.0005) return;
    const piece = el("i", { class: `s-${part.key}` });
    piece.style.width = `${100 * share}%`;
    piece.addEventListener("pointermove", (event) => showTip(event, `${part.label}\n${pct(share, 1)} · ${secs(seconds[index])}${perWhat}`));
    piece.addEventListener("pointerleave", hideTip);
    bar.append(piece);
    legend.append(el("span", {}, el("i", { class: `s-${part.key}` }), `${part.label} ${pct(share, share < 0.1 ? 1 : 0)}`, el("span", { class: "muted" }, `  ${secs(seconds[index])}`)));
  });
  return el("div", {}, bar, legend);
}

// Stacked bars over steps; many steps are averaged into as many bars as fit.
function stackedBars(holder, parts, steps, rows, pick) {
  onWidth(holder, (width) => {
    const height = 200, left = 46, right = 10, top = 8, bottom = 24;
    const room = width - left - right, count = Math.min(steps.length, Math.floor(room / 4));
    const bins = Array.from({ length: count }, (_, bin) => {
      const from = Math.floor((bin * steps.length) / count), to = Math.max(from + 1, Math.floor(((bin + 1) * steps.length) / count));
      return { from: steps[from], to: steps[to - 1], values: parts.map((_, part) => rows.slice(from, to).reduce((sum, row) => sum + row[part], 0) / (to - from)) };
    });
    const most = Math.max(...bins.map((bin) => bin.values.reduce((sum, one) => sum + one, 0))) || 1;
    const py = (y) => top + (height - top - bottom) * (1 - y / most), wide = room / count;
    const root = sv("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "seconds per step by part" });
    for (const tick of niceTicks(0, most, 4)) root.append(sv("line", { class: "grid", x1: left, x2: width - right, y1: py(tick), y2: py(tick) }), sv("text", { x: left - 7, y: py(tick) + 4, "text-anchor": "end" }, `${num(tick, tick < 10 && tick % 1 ? 1 : 0)} s`));
    bins.forEach((bin, index) => {
      let base = 0;
      const group = sv("g", {});
      bin.values.forEach((value, part) => {
        if (value <= 0) return;
        group.append(sv("rect", { class: `s-${parts[part].key}`, x: left + index * wide + Math.min(1, wide * 0.1), width: Math.max(1, wide - Math.min(2, wide * 0.2)), y: py(base + value), height: Math.max(0, py(base) - py(base + value)) }));
        base += value;
      });
      const name = bin.from === bin.to ? `step ${bin.from}` : `steps ${bin.from}–${bin.to}, mean`;
      const lines = parts.map((part, at) => [part.label, bin.values[at]]).filter((one) => one[1] > 0).map((one) => `${one[0]}: ${secs(one[1])}`);
      group.addEventListener("pointermove", (event) => showTip(event, [`${name}: ${secs(base)}`, ...lines].join("\n")));
      group.addEventListener("pointerleave", hideTip);
      group.addEventListener("click", () => pick(bin.from));
      root.append(group);
    });
    for (const tick of niceTicks(1, count, Math.min(10, width / 70)).filter((t) => Number.isInteger(t) && t >= 1)) root.append(sv("text", { x: left + (tick - 0.5) * wide, y: height - 6, "text-anchor": "middle" }, bins[tick - 1].from));
    return root;
  });
}
