"use strict";
// A chart: lines, dots with bars and marks into SVG, with a tooltip for mouse, finger and arrow keys. It knows nothing
// of privacy: `drawChart(box, spec)` draws what spec says, again whenever it is called or the box changes its width.
//
// spec = { name, x: {label, log, ticks?: [[value, text], ...]}, y: {label, log},
//   series: [{ name, colour, dash, dots, shape, faint, points: [{x, y, half, note}] }],   y null: diverged
//   marks: [{ x, text }], xText: value -> heading of the tooltip }

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, parent = null, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function brief(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === "inf" || value === Infinity) return "inf";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

// --- Axes ---------------------------------------------------------------------------------------------------------

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const steps = decades > 4 ? [1] : decades > 1.5 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const step of steps) {
      const value = Number((step * 10 ** power).toPrecision(6));
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  // Of a narrow range hardly one of these is in it: evenly spaced numbers are.
  return found.length < 3 ? linearTicks(low, high, 8) : found;
}

function scaleOf(values, axis, start, end, padding) {
  const through = axis.log ? Math.log : (value) => value;
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = axis.log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const margin = (through(high) - through(low)) * padding;
  const from = through(low) - margin, to = through(high) + margin;
  const scale = (value) => start + ((end - start) * (through(value) - from)) / (to - from);
  scale.low = axis.log ? Math.exp(from) : from;
  scale.high = axis.log ? Math.exp(to) : to;
  return scale;
}

// --- Drawing ------------------------------------------------------------------------------------------------------

const SHAPES = {
  circle: (x, y, r) => `M${x - r},${y}a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0Z`,
  square: (x, y, r) => `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
  triangle: (x, y, r) => `M${x},${y - 1.25 * r}L${x + 1.2 * r},${y + r}H${x - 1.2 * r}Z`,
  cross: (x, y, r) => `M${x - r},${y - r}l${2 * r},${2 * r}M${x + r},${y - r}l${-2 * r},${2 * r}`,
};

function round(value) {
  return Math.round(value * 10) / 10;
}

function drawChart(box, spec) {
  box.spec = spec;
  if (!box.watched) {
    box.watched = true;
    new ResizeObserver(() => { if (box.clientWidth !== box.drawnAt && box.clientWidth > 0) render(box); }).observe(box);
  }
  render(box);
}

function render(box) {
  const spec = box.spec, width = box.clientWidth;
  if (!width) return;
  box.drawnAt = width;
  const isNarrow = width < 560;
  const height = isNarrow ? 310 : Math.min(440, Math.round(width * 0.44));
  const frame = { left: 62, right: width - (isNarrow ? 14 : 104), top: 16, bottom: height - 50 };
  const had = box.querySelector("svg");
  const hadFocus = had === document.activeElement;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "group", "aria-roledescription": "chart",
    "aria-label": `${spec.name}. Left and right arrow keys read the values.` });
  const drawn = spec.series.map((s) => ({ ...s, points: s.points.filter((p) => spec.x.log ? p.x > 0 : true) }));
  const finite = drawn.flatMap((s) => s.points.filter((p) => p.y !== null));
  // No bar below 0 where no value is, as losses, norms and shares never are.
  const floor = finite.every((p) => p.y >= 0) ? 0 : -Infinity;
  if (!finite.length) {
    svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, root, "Nothing to draw: every run diverged, or was not made.");
    swap(box, had, root, null);
    return;
  }
  // A wide interval may leave the frame: the values decide what is seen.
  const values = finite.map((p) => p.y), reach = 0.5 * (Math.max(...values) - Math.min(...values)) || Infinity;
  const [least, most] = [spec.y.log ? Math.min(...values) / 1.5 : Math.min(...values) - reach, Math.max(...values) + reach];
  const ends = finite.flatMap((p) => (p.half ? [Math.max(least, floor, p.y - p.half), Math.min(most, p.y + p.half)] : []));
  const ys = [...values, ...ends].filter((y) => !spec.y.log || y > 0);
  const xs = [...new Set(drawn.flatMap((s) => s.points.map((p) => p.x)))].sort((a, b) => a - b);
  const x = scaleOf(xs, spec.x, frame.left + 8, frame.right - 8, 0.02);
  const y = scaleOf(ys, spec.y, frame.bottom, frame.top, 0.06);
  drawAxes(root, spec, x, y, frame, height, isNarrow);
  for (const mark of spec.marks || []) {
    if (mark.x < x.low || mark.x > x.high) continue;
    svg("line", { x1: round(x(mark.x)), x2: round(x(mark.x)), y1: frame.top, y2: frame.bottom, class: "mark" }, root);
    svg("text", { x: round(x(mark.x)) + 4, y: frame.top + 10, "font-size": 12, class: "halo" }, root, mark.text);
  }
  for (const series of drawn) drawSeries(root, series, x, y, frame, spec, floor);
  if (!isNarrow) labelEnds(root, drawn, x, y, frame);
  const cursor = svg("line", { y1: frame.top, y2: frame.bottom, class: "cursor", visibility: "hidden" }, root);
  swap(box, had, root, { xs, x, drawn, cursor, width, frame });
  if (hadFocus) root.focus();
}

function drawAxes(root, spec, x, y, frame, height, isNarrow) {
  const yTicks = spec.y.log ? logTicks(y.low, y.high) : linearTicks(y.low, y.high, isNarrow ? 4 : 6);
  for (const value of yTicks) {
    const at = round(y(value));
    svg("line", { x1: frame.left, x2: frame.right, y1: at, y2: at, class: "grid" }, root);
    svg("text", { x: frame.left - 8, y: at + 4, "text-anchor": "end", "font-size": 12, class: "soft-text" }, root, brief(value));
  }
  svg("line", { x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom, class: "axis" }, root);
  const ticks = spec.x.ticks || (spec.x.log ? logTicks(x.low, x.high) : linearTicks(x.low, x.high, isNarrow ? 4 : 7)).map((v) => [v, brief(v)]);
  let free = -Infinity;
  for (const [value, text] of ticks) {
    const at = round(x(value)), half = 4 * text.length;
    svg("line", { x1: at, x2: at, y1: frame.bottom, y2: frame.bottom + 5, class: "axis" }, root);
    if (at - half < free) continue;
    svg("text", { x: at, y: frame.bottom + 19, "text-anchor": "middle", "font-size": 12, class: "soft-text" }, root, text);
    free = at + half + 6;
  }
  const middle = (frame.left + frame.right) / 2, centre = (frame.top + frame.bottom) / 2;
  svg("text", { x: middle, y: height - 8, "text-anchor": "middle", "font-size": 13 }, root, spec.x.label);
  svg("text", { x: 13, y: centre, "text-anchor": "middle", "font-size": 13, transform: `rotate(-90 13 ${centre})` }, root, spec.y.label);
}

function drawSeries(root, series, x, y, frame, spec, floor) {
  const group = svg("g", { "data-series": series.name, opacity: series.faint ? 0.35 : 1 }, root);
  const there = series.points.filter((p) => p.y !== null && (!spec.y.log || p.y > 0)).sort((a, b) => a.x - b.x);
  const across = (p) => round(x(p.x) + (series.dodge || 0));
  const path = there.map((p, i) => `${i ? "L" : "M"}${across(p)},${round(y(p.y))}`).join("");
  // Dots are joined by a thin guide for the eye; a runner's own line has its dashes.
  svg("path", { d: path, fill: "none", stroke: series.colour, "stroke-width": series.dots ? 1 : 2, "stroke-dasharray": series.dash || null,
    "stroke-linejoin": "round", opacity: series.dots ? 0.45 : 1, class: "line" }, group);
  if (series.dots) for (const p of there) {
    const at = across(p);
    if (p.half) {
      const least = Math.max(floor, p.y - p.half), low = spec.y.log && least <= 0 ? frame.bottom : y(least);
      svg("line", { x1: at, x2: at, y1: round(Math.min(low, frame.bottom)), y2: round(Math.max(y(p.y + p.half), frame.top)), stroke: series.colour, "stroke-width": 1.5 }, group);
    }
    svg("path", { d: SHAPES[series.shape || "circle"](at, round(y(p.y)), series.faint ? 2.5 : 4.5), fill: series.colour }, group);
  }
  for (const p of series.points.filter((p) => p.y === null)) {
    const at = spec.y.more ? frame.bottom - 8 : frame.top + 8;
    svg("path", { d: SHAPES.cross(across(p), at, 4.5), stroke: series.colour, "stroke-width": 2, fill: "none", class: "diverged" }, group);
  }
}

function labelEnds(root, drawn, x, y, frame) {
  // Names at the lines' ends, moved apart where they would overlap; one name once.
  const seen = new Set();
  const labels = [];
  for (const series of drawn) {
    const last = series.points.filter((p) => p.y !== null).sort((a, b) => b.x - a.x)[0];
    if (series.faint || !last || seen.has(series.label)) continue;
    seen.add(series.label);
    labels.push({ text: series.label, at: y(last.y), x: x(last.x), colour: series.colour });
  }
  labels.sort((a, b) => a.at - b.at);
  for (let i = 1; i < labels.length; i++) labels[i].at = Math.max(labels[i].at, labels[i - 1].at + 16);
  const over = labels.length ? labels[labels.length - 1].at - frame.bottom : 0;
  for (const label of labels) {
    const at = label.at - Math.max(0, over) + 4;
    svg("line", { x1: frame.right + 2, x2: frame.right + 10, y1: round(at - 4), y2: round(at - 4), stroke: label.colour, "stroke-width": 3 }, root);
    svg("text", { x: frame.right + 14, y: round(at), "font-size": 12.5 }, root, label.text);
  }
}

// --- Reading ------------------------------------------------------------------------------------------------------

function swap(box, had, root, reading) {
  if (had) had.replaceWith(root); else box.prepend(root);
  let tip = box.querySelector(".tip");
  if (!tip) box.append((tip = html("div", { class: "tip", hidden: true, role: "status" })));
  tip.hidden = true;
  if (reading) makeReadable(box, root, tip, reading);
}

function makeReadable(box, root, tip, { xs, x, drawn, cursor, width }) {
  let place = -1;
  const show = (i) => {
    place = i;
    const at = x(xs[i]);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(html("b", {}, box.spec.xText(xs[i])), ...drawn.filter((s) => !s.faint).flatMap((s) => s.points
      .filter((p) => p.x === xs[i])
      .map((p) => html("div", {}, `${s.name}: ${p.y === null ? "diverged" : brief(p.y, 4)}${p.half ? ` ± ${brief(p.half, 2)}` : ""}${p.note ? `, ${p.note}` : ""}`))));
    tip.hidden = false;
    // On a phone below the chart, which it would cover; else beside the cursor, on the side that has room.
    tip.classList.toggle("below-chart", width < 560);
    if (width < 560) {
      tip.style.left = tip.style.top = "";
      return;
    }
    const left = at > width / 2 ? at - tip.offsetWidth - 12 : at + 12;
    tip.style.left = `${Math.max(0, Math.min(left, width - tip.offsetWidth))}px`;
    tip.style.top = "18px";
  };
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  const nearest = (event) => {
    const at = event.clientX - root.getBoundingClientRect().left;
    return xs.reduce((best, value, i) => (Math.abs(x(value) - at) < Math.abs(x(xs[best]) - at) ? i : best), 0);
  };
  root.addEventListener("pointermove", (event) => show(nearest(event)));
  root.addEventListener("pointerdown", (event) => show(nearest(event)));
  root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  root.addEventListener("blur", hide);
  root.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      event.preventDefault();
      show(Math.max(0, Math.min(xs.length - 1, place < 0 ? (move > 0 ? 0 : xs.length - 1) : place + move)));
    }
    if (event.key === "Escape") hide();
  });
}

// A legend: how every line looks. items = [{ text, colour, dash, dots, shape }]
function drawLegend(list, items) {
  list.replaceChildren(...items.map((item) => {
    const picture = svg("svg", { viewBox: "0 0 30 12", "aria-hidden": "true" });
    if (item.dots) svg("path", { d: SHAPES[item.shape || "circle"](15, 6, 4.5), fill: item.colour }, picture);
    else if (item.cross) svg("path", { d: SHAPES.cross(15, 6, 4.5), stroke: item.colour, "stroke-width": 2 }, picture);
    else svg("line", { x1: 0, x2: 30, y1: 6, y2: 6, stroke: item.colour, "stroke-width": item.width || 2, "stroke-dasharray": item.dash || null }, picture);
    return html("li", {}, picture, item.text);
  }));
}
