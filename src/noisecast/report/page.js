// What the page does with its table: sliders choose cells, charts show them. Everything read here was computed before.

const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const number = (value) => (value === "inf" ? Infinity : value);
const EXTRAPOLATED = new Set(DATA.extrapolated || []); // numbers of cells
// A cell is a row of these.
const [PROBLEM, SHAPE, RUNNER, OPTIMIZER, LEVEL, RATE, CLIP, SEEDS, DIVERGED, PLACE] = Array(10).keys();

// A label without its unit.
function plain(column) {
  return DATA.labels[column].replace(/ \[.*\]$/, "");
}

function keyOf(...parts) {
  return parts.join("|");
}

// --- Controls -----------------------------------------------------------------------------------------------------

function slider(label, values, texts, place, changed, of = "") {
  const output = html("output", {}, texts[place]);
  const input = html("input", { type: "range", min: 0, max: values.length - 1, step: 1, value: place, "aria-label": of ? `${label}, ${of}` : label, "aria-valuetext": texts[place] });
  const show = () => {
    output.textContent = texts[input.value];
    input.setAttribute("aria-valuetext", texts[input.value]);
  };
  input.addEventListener("input", () => { show(); changed(Number(input.value)); });
  const box = html("div", { class: "slider" }, html("span", { class: "label" }, label, output), input);
  box.set = (i) => { input.value = i; show(); };
  return box;
}

function picker(label, names, texts, chosen, changed) {
  const select = html("select", { "aria-label": label }, ...names.map((name, i) => html("option", { value: name, selected: name === chosen }, texts[i])));
  select.addEventListener("change", () => changed(select.value));
  return html("label", {}, label, html("br"), select);
}

function segments(label, name, options, chosen, changed) {
  const box = html("div", { class: "segments" }, ...options.map(([value, text]) => {
    const input = html("input", { type: "radio", name, value, checked: value === chosen });
    input.addEventListener("change", () => changed(value));
    return html("label", {}, input, html("span", {}, text));
  }));
  const set = html("fieldset", {}, html("legend", {}, label), box);
  set.choose = (value) => { for (const input of box.querySelectorAll("input")) input.checked = input.value === value; };
  return set;
}

// --- A store ------------------------------------------------------------------------------------------------------

function storePage() {
  const best = new Map(), byCell = new Map();
  DATA.cells.forEach((cell, i) => {
    const contest = keyOf(...cell.slice(PROBLEM, RATE));
    if (cell[PLACE] === 1) best.set(contest, i);
    byCell.set(keyOf(contest, cell[RATE], cell[CLIP]), i);
  });
  const state = { problem: 0, shape: DATA.shape, metric: DATA.metric, mode: "best", kept: 0, level: 0, hand: {} };
  const shape = () => DATA.problems[state.problem].shapes[state.shape];
  const modeControl = segments("Settings shown", "mode",
    [["best", "Re-tuned at each ε"], ["kept", "Tuned at one ε and kept"], ["hand", "By hand"]], state.mode, (mode) => { state.mode = mode; draw(); });

  function settingsOf(optimizer) {
    const here = DATA.cells.filter((c) => c[PROBLEM] === state.problem && c[SHAPE] === state.shape && c[OPTIMIZER] === optimizer);
    const distinct = (column) => [...new Set(here.map((c) => c[column]))].sort((a, b) => a - b);
    return { rates: distinct(RATE), clips: distinct(CLIP) };
  }

  // The settings that an optimizer is shown with at a level: a cell's number, or none.
  function cellAt(runner, optimizer, level) {
    const contest = (at) => keyOf(state.problem, state.shape, runner, optimizer, at);
    if (state.mode === "best") return best.get(contest(level));
    if (state.mode === "kept") {
      const tuned = DATA.cells[best.get(contest(state.kept))];
      return tuned && !tuned[DIVERGED] ? byCell.get(keyOf(contest(level), tuned[RATE], tuned[CLIP])) : undefined;
    }
    const hand = state.hand[optimizer];
    return byCell.get(keyOf(contest(level), hand.rates[hand.rate], hand.clips[hand.clip]));
  }

  function lines(points, faint = false) {
    const found = [];
    DATA.runners.forEach((runner, r) => DATA.optimizers.forEach((optimizer, o) => {
      const its = points(r, o);
      if (its.length) found.push({ name: `${optimizer.name}, ${runner.name === "moments" ? "forecast" : runner.name}`, label: optimizer.name,
        colour: optimizer.colour, shape: optimizer.shape, dodge: runner.dots ? 7 * (o - (DATA.optimizers.length - 1) / 2) : 0, dash: runner.dash, dots: runner.dots, points: its, faint, runner: r, optimizer: o });
    }));
    return found;
  }

  function endPoints(choose) {
    return (r, o) => shape().levels.flatMap((level, l) => {
      const i = choose(r, o, l);
      if (i === undefined || !Number.isFinite(number(level.epsilon))) return [];
      const cell = DATA.cells[i], end = DATA.ends[state.metric][i];
      if (!end && !cell[DIVERGED]) return [];
      const note = `rate ${brief(cell[RATE])}, clip ${brief(cell[CLIP])}${EXTRAPOLATED.has(i) ? ", extrapolated" : ""}`;
      return [{ x: number(level.epsilon), z: level.z, y: end ? end[0] : null, half: end ? end[1] : null, one: cell[SEEDS] === 1, note, loose: EXTRAPOLATED.has(i) }];
    });
  }

  function axisOf(name, points) {
    const values = points.map((p) => p.y).filter((y) => y !== null);
    const metric = DATA.metrics[name];
    const log = values.length > 0 && Math.min(...values) > 0 && Math.max(...values) > 8 * Math.min(...values);
    return { label: metric.label, log, more: metric.more };
  }

  function drawEnds() {
    const shown = lines(endPoints(cellAt));
    const beside = state.mode === "best" ? [] : lines(endPoints((r, o, l) => best.get(keyOf(state.problem, state.shape, r, o, l))), true);
    const levels = shape().levels.filter((level) => Number.isFinite(number(level.epsilon)));
    const found = crossingsOf(shown);
    drawChart($("ends-chart"), {
      name: `${DATA.metrics[state.metric].label} against epsilon`,
      x: { label: `ε of one run (δ = ${brief(shape().delta)})`, log: true, ticks: levels.map((l) => [number(l.epsilon), l.text]) },
      y: axisOf(state.metric, [...shown, ...beside].flatMap((s) => s.points)),
      series: [...beside, ...shown],
      marks: found.flatMap((f) => f.at).filter((c) => state.metric === DATA.metric).map((c) => ({ x: c.epsilon, text: "" })),
      xText: (x) => { const l = levels.find((level) => number(level.epsilon) === x); return `ε = ${l.text}, noise multiplier ${brief(l.z, 4)}`; },
    });
    $("ends-thresholds").replaceChildren(...found.map((f) => html("li", {}, f.words)));
    const how = { best: `each optimizer with its best settings at each ε, chosen by ${DATA.metrics[DATA.metric].label}`,
      kept: `each optimizer with the settings that are best at ε = ${shape().levels[state.kept].text}, kept at every ε`,
      hand: "the settings of the sliders" }[state.mode];
    $("ends-say").textContent = `Shown: ${how}.${state.mode === "best" ? "" : " Pale: re-tuned at each ε."} Batch size ${brief(shape().batch)}, ${shape().steps.toLocaleString("en")} steps.${looseWords(shown)}${DATA.left_out ? ` ${DATA.left_out.toLocaleString("en")} of the worse settings are left out to keep the page small.` : ""}`;
  }

  // What a forecast says outside the range in which it is known to hold is drawn, and said to be so.
  function looseWords(shown) {
    const loose = shown.flatMap((s) => s.points).filter((p) => p.loose).length;
    return loose ? ` ${loose} of the forecasts shown ${loose === 1 ? "is" : "are"} extrapolated: outside the range in which forecasts are known to hold.` : "";
  }

  // The same rule as thresholds.py: a change of the better one between two levels, interpolated in log z and log ε.
  function crossingsOf(shown) {
    const more = DATA.metrics[state.metric].more, found = [];
    for (const one of shown) for (const other of shown) {
      if (one.runner !== other.runner || one.optimizer >= other.optimizer) continue;
      const gaps = one.points.flatMap((p) => {
        const q = other.points.find((q) => q.x === p.x);
        if (!q || (p.y === null && q.y === null)) return [];
        const gap = p.y === null ? -Infinity : q.y === null ? Infinity : (p.y - q.y) * (more ? 1 : -1);
        return gap ? [{ epsilon: p.x, z: p.z, gap }] : [];
      }).sort((a, b) => a.epsilon - b.epsilon);
      const at = [];
      for (let i = 1; i < gaps.length; i++) {
        const [a, b] = [gaps[i - 1], gaps[i]];
        if (a.gap * b.gap >= 0) continue;
        const share = Number.isFinite(a.gap) && Number.isFinite(b.gap) ? a.gap / (a.gap - b.gap) : 0.5;
        const between = (from, to) => Math.exp((1 - share) * Math.log(from) + share * Math.log(to));
        at.push({ epsilon: between(a.epsilon, b.epsilon), z: between(a.z, b.z), below: a.gap > 0 ? one.label : other.label });
      }
      const pair = `${one.label} or ${other.name}`;
      const count = ["none", "one", "two", "three"][at.length] || String(at.length);
      const words = !gaps.length ? "nothing to compare"
        : at.length ? `${count}: ${at.map((c) => `ε* ≈ ${brief(c.epsilon)}, ${c.below} better below`).join("; ")}`
          : `none, ${gaps[0].gap > 0 ? one.label : other.label} better at every ε`;
      found.push({ at, words: `${pair}: ${words}.` });
    }
    return found;
  }

  function drawCurves() {
    const metric = DATA.curves[state.metric] ? state.metric : Object.keys(DATA.curves)[0];
    const level = shape().levels[state.level];
    let missing = 0;
    const shown = !metric ? [] : lines((r, o) => {
      const i = cellAt(r, o, state.level);
      if (i === undefined) return [];
      const curve = DATA.curves[metric][i];
      if (!curve) missing += 1;
      return (curve || []).map(([step, y, half]) => ({ x: step, y, half }));
    });
    drawChart($("curves-chart"), {
      name: `${metric ? DATA.metrics[metric].label : "Nothing"} over the steps`,
      x: { label: DATA.labels.step, log: false },
      y: axisOf(metric || DATA.metric, shown.flatMap((s) => s.points)),
      series: shown,
      xText: (x) => `step ${x.toLocaleString("en")}`,
    });
    const settings = DATA.optimizers.map((optimizer, o) => {
      // Each runner has its own best settings.
      const its = DATA.runners.flatMap((runner, r) => {
        const i = cellAt(r, o, state.level);
        if (i === undefined) return [];
        const name = runner.name === "moments" ? "forecast" : runner.name;
        return [[brief(DATA.cells[i][RATE]), EXTRAPOLATED.has(i) ? `${name}, extrapolated` : name]];
      });
      if (!its.length) return null;
      const same = its.every(([rate, name]) => rate === its[0][0] && !name.includes(","));
      return `${optimizer.name} at rate ${same ? its[0][0] : its.map(([rate, name]) => `${rate} (${name})`).join(" and ")}`;
    }).filter((text) => text);
    $("curves-say").textContent = `At ε = ${level.text}: ${settings.join(", ")}.${missing ? " Curves of some of these settings are left out to keep the page small." : ""}`;
  }

  function rebuild() {
    const levels = shape().levels, texts = levels.map((l) => l.text);
    state.kept = levels.length - 1;
    state.level = Math.floor((levels.length - 1) / 2);
    DATA.optimizers.forEach((_, o) => {
      const { rates, clips } = settingsOf(o);
      const start = DATA.cells[best.get(keyOf(state.problem, state.shape, 0, o, state.level))];
      state.hand[o] = { rates, clips, rate: Math.max(0, start ? rates.indexOf(start[RATE]) : 0), clip: Math.max(0, start ? clips.indexOf(start[CLIP]) : 0) };
    });
    const shapes = DATA.problems[state.problem].shapes;
    const asText = (s) => `${brief(s.batch)} (${s.steps.toLocaleString("en")} steps)`;
    const first = [];
    if (DATA.problems.length > 1) first.push(picker("Problem", DATA.problems.map((_, i) => String(i)), DATA.problems.map((p) => p.name), String(state.problem), (i) => { state.problem = Number(i); state.shape = 0; rebuild(); draw(); }));
    const metrics = Object.keys(DATA.metrics);
    if (metrics.length > 1) first.push(picker("Shown", metrics, metrics.map((m) => DATA.metrics[m].label), state.metric, (m) => { state.metric = m; draw(); }));
    if (shapes.length > 1) first.push(slider(plain("expected_batch_size"), shapes, shapes.map(asText), state.shape, (s) => { state.shape = s; rebuild(); draw(); keepFocus("ends-controls", plain("expected_batch_size")); }));
    const kept = slider("tuned at ε", levels, texts, state.kept, (l) => { state.kept = l; draw(); });
    kept.id = "kept-slider";
    const hand = html("div", { class: "hand", id: "hand" }, ...DATA.optimizers.flatMap((optimizer, o) => {
      const its = state.hand[o];
      const picture = svg("svg", { viewBox: "0 0 12 12", class: "swatch", "aria-hidden": "true" });
      svg("path", { d: SHAPES[optimizer.shape](6, 6, 5), fill: optimizer.colour }, picture);
      const row = [html("span", { class: "name" }, picture, optimizer.name)];
      const turn = (what) => (i) => { its[what] = i; state.mode = "hand"; modeControl.choose("hand"); draw(); };
      const add = (what, column, values) => {
        if (values.length > 1) row.push(slider(plain(column), values, values.map((v) => brief(v, 4)), its[what], turn(what), optimizer.name));
        else row.push(html("span", { class: "label" }, `${plain(column)} ${brief(values[0], 4)}, the only one`));
      };
      add("rate", "learning_rate", its.rates);
      add("clip", "l2_clip_norm", its.clips);
      return row;
    }));
    $("ends-controls").replaceChildren(html("div", { class: "row" }, ...first), html("div", { class: "row" }, modeControl, kept), html("p", { class: "note hint" }, "Or turn any of these; the chart follows:"), hand);
    if (levels.length > 1) $("curves-controls").replaceChildren(slider("ε of one run", levels, texts, state.level, (l) => { state.level = l; drawCurves(); }));
    $("curves-controls").hidden = levels.length < 2;
  }

  function keepFocus(where, label) {
    const again = [...$(where).querySelectorAll("input")].find((input) => input.getAttribute("aria-label") === label);
    if (again) again.focus();
  }

  function draw() {
    $("kept-slider").hidden = state.mode !== "kept";
    $("hand").classList.toggle("idle", state.mode !== "hand");
    drawEnds();
    drawCurves();
  }

  const ink = "currentColor";
  const legend = [
    ...DATA.optimizers.map((o) => ({ text: o.name, colour: o.colour, dots: true, shape: o.shape })),
    ...DATA.runners.map((r) => ({ text: r.label, colour: ink, dash: r.dash, dots: r.dots })),
    { text: "diverged", colour: ink, cross: true },
  ];
  for (const list of document.querySelectorAll(".legend[data-of=cells]")) drawLegend(list, legend);
  rebuild();
  draw();
  if (DATA.prices.length) drawPrices();
}

function drawPrices() {
  const style = getComputedStyle(document.documentElement);
  const kinds = [
    ["run", "tuned on public data", "1", "", "public data"],
    ["random", "best of random trials", "2", "7 3 1.5 3", "random trials"],
    ["composed", "every run counted", "3", "6 4", "all counted"],
  ];
  const series = kinds.map(([key, name, i, dash, label]) => ({
    name, label, colour: style.getPropertyValue(`--price-${i}`).trim(), dash, dots: false,
    points: DATA.prices.map((p) => ({ x: p.run, y: Number.isFinite(number(p[key])) ? p[key] : null })),
  }));
  drawChart($("prices-chart"), {
    name: "Epsilon of the procedure against epsilon of one run",
    x: { label: "ε of one run", log: true, ticks: DATA.prices.map((p) => [p.run, p.text]) },
    y: { label: "ε of choosing and training", log: true },
    series, xText: (x) => `ε of one run ${DATA.prices.find((p) => p.run === x).text}`,
  });
  drawLegend($("prices-legend"), series.map((s) => ({ text: s.name, colour: s.colour, dash: s.dash })));
}

// --- A model ------------------------------------------------------------------------------------------------------

function modelPage() {
  if (!DATA.budget) return;
  const { multipliers, texts, steps, epsilons, own } = DATA.budget;
  let chosen = own;
  const line = (i, faint) => ({ name: `noise multiplier ${texts[i]}`, label: i === own ? "this model" : `z = ${texts[i]}`, colour: i === own ? "#0072B2" : "#D55E00",
    dash: i === own ? "" : "6 4", dots: false, faint, points: steps.map((s, k) => ({ x: s, y: number(epsilons[i][k]) })).filter((p) => Number.isFinite(p.y) && p.y > 0) });
  const draw = () => {
    drawChart($("budget-chart"), {
      name: "Epsilon against steps", x: { label: DATA.labels.step, log: false }, y: { label: `ε at δ = ${brief(DATA.delta)}`, log: true },
      series: chosen === own ? [line(own)] : [line(own), line(chosen)], xText: (x) => `after ${x.toLocaleString("en")} steps`,
    });
    const last = epsilons[chosen][steps.length - 1];
    $("budget-say").textContent = `Noise multiplier ${texts[chosen]}: ε ≤ ${DATA.budget.ends[chosen]} after all ${steps[steps.length - 1].toLocaleString("en")} steps${last === "inf" ? " (no guarantee)" : ""}.`;
  };
  $("budget-controls").replaceChildren(slider(DATA.labels.noise_multiplier, multipliers, texts, own, (i) => { chosen = i; draw(); }));
  draw();
}

// --- Everywhere ---------------------------------------------------------------------------------------------------

function copyButtons() {
  for (const block of document.querySelectorAll(".snippet")) {
    const pre = block.querySelector("pre");
    if (!pre) continue;
    const button = html("button", { class: "copy", type: "button", "aria-label": `Copy for ${block.dataset.tool}` }, "Copy");
    button.addEventListener("click", async () => {
      let done = true;
      try {
        await navigator.clipboard.writeText(pre.textContent);
      } catch {
        getSelection().selectAllChildren(pre);
        done = document.execCommand("copy");
      }
      button.textContent = done ? "Copied" : "Press Ctrl-C";
      $("announce").textContent = button.textContent;
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    block.querySelector(".bar").append(button);
  }
}

function toolPicker() {
  const box = $("tools");
  if (!box) return;
  const names = [...new Set([...document.querySelectorAll(".snippet")].map((block) => block.dataset.tool))];
  const show = (name) => { for (const block of document.querySelectorAll(".snippet")) block.hidden = block.dataset.tool !== name; };
  box.replaceChildren(segments("Library", "tool", names.map((n) => [n, n]), names[0], show));
  show(names[0]);
}

for (const element of document.querySelectorAll(".scripted")) element.hidden = false;
if (DATA.kind === "store") storePage();
if (DATA.kind === "model") modelPage();
copyButtons();
toolPicker();
addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("details")) details.open = true; });
// Colours of the price chart are the theme's.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (DATA.kind === "store" && DATA.prices.length) drawPrices(); });
// Only now, when everything is drawn, is what stood in for it out of the way.
for (const element of document.querySelectorAll(".unscripted")) element.hidden = true;
