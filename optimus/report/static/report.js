/* Draws the data of `report_data`. NaN and infinity come as text, and a missing value comes as null. */
const RUN_COLOURS = Array.from({ length: 8 }, (_, number) => "--run-" + number);  // of the style sheet
const runColour = number => RUN_COLOURS[number % RUN_COLOURS.length];
const KIND_COLOURS = { forward: "#8fb8de", backward: "#f2b880", backward_input: "#f2d479", backward_weights: "#9fce9f",
  embed: "#c9c9c9", logits: "#c8a2c8", loss: "#a880b8", embed_backward: "#a9a9a9" };
const BYTES = Array.from({ length: 50 }, (_, power) => 2 ** power);  // between the ticks of an axis of memory
const HEIGHT = 240;  // pixels of a chart
const FEW = 40;  // a curve with fewer points shows each point and is not smoothed
const AXES = { step: "steps", tokens: "tokens", seconds: "training time", share: "share of the run" };
let axis = "step", smoothing = 0.9, drawn = [];
const views = new Map();  // zoom and hidden curves of charts by their labels, to restore when a chart is drawn again

/* Returns a step's position on the axis: steps, per cent of the planned steps, or tokens and seconds by the run's clock,
   interpolated linearly between the points of the clock. */
function along(run, step) {
  if (axis === "step") return step;
  if (axis === "share") return 100 * step / Math.max(1, run.facts.step, run.facts.steps ?? 0);
  const at = run.clock.step, to = run.clock[axis];
  let low = 0, high = at.length - 1;
  if (high < 0) return step;
  while (high - low > 1) { const middle = (low + high) >> 1; if (at[middle] <= step) low = middle; else high = middle; }
  if (at[high] === at[low]) return to[low];
  return to[low] + (to[high] - to[low]) * (step - at[low]) / (at[high] - at[low]);
}
/* Lists the axes that all runs have; the clock of older runs may lack the tokens. */
function axesOfAll() {
  const has = name => data.runs.every(run => run.clock.step.length && run.clock[name].every(value => typeof value === "number"));
  return Object.keys(AXES).filter(name => name === "step" || name === "share" || has(name));
}
function firstAxis() {
  const lengths = new Set(data.runs.map(run => run.facts.step)), tokens = new Set(data.runs.map(run => run.facts.tokens));
  return (lengths.size > 1 || tokens.size > 1) && axesOfAll().includes("tokens") ? "tokens" : "step";
}
function finite(values) { return values.map(value => typeof value === "number" ? value : null); }
function smooth(values) {
  if (!smoothing) return values;
  let mean = 0, weight = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = smoothing * mean + (1 - smoothing) * value; weight = smoothing * weight + 1 - smoothing;
    return mean / weight;
  });
}

function controls() {
  const bar = make("div", { className: "controls" });
  const select = make("select", { onchange: event => { axis = event.target.value; redraw(); } });
  for (const value of axesOfAll()) select.append(make("option", { value, selected: value === axis }, AXES[value]));
  const slider = attributes(make("input", { type: "range", oninput: event => { smoothing = +event.target.value; redraw(); } }),
    { min: 0, max: 0.98, step: 0.02, value: smoothing });
  bar.append(make("label", {}, "Along ", select), make("label", {}, "Smoothing ", slider),
    make("button", { type: "button", onclick: () => drawn.forEach(each => each.reset()) }, "Whole curves"),
    make("span", { className: "soft" }, "Drag to zoom; or with the keys: Tab to a chart, arrows, + and −, 0 for all." +
      (data.runs.some(run => run.events.length) ? (data.runs.length > 1 ? " Short vertical lines, each on the curve of its own run: " : " Vertical lines: ") +
        "failures, exclusions and rollbacks (red), resumes, restarts and recoveries (dashed), other events." : "") +
      (data.charts.length ? " Red triangles: values that are not finite." : "")));
  return bar;
}

const alongName = () => axis === "seconds" || axis === "share" ? AXES[axis] : axis;
const alongText = (x, number) => x === null ? "-" : axis === "seconds" ? duration(x) : axis === "share" ? +x.toFixed(1) + " %" : number(x);
/* A legend shows the values under the cursor or, without a cursor, the last values. */
const alongSeries = () => ({ label: alongName(), value: (_, x, __, at) => at === null ? "last" : alongText(x, text) });
/* Returns a curve's value at the cursor: the latest value at or before this point of the axis, with "(last)" beyond the end of
   the curve. The index that uPlot gives a legend is the index of the nearest value, which may come later. */
function valueAt(chart, series) {
  const values = chart.data[series];
  const at = chart.cursor.idx;
  let here = at;
  while (here >= 0 && values[here] === undefined) here--;
  const last = here === values.findLastIndex(value => value !== undefined);
  return (here < 0 ? "-" : text(values[here])) + (here >= 0 && here < at && last ? " (last)" : "");
}
function axes(size) {
  const font = "12px system-ui, sans-serif", grid = { stroke: shade("--grid"), width: 1 }, soft = { stroke: shade("--soft"), font, grid };
  return [
    { ...soft, label: alongName(), labelFont: font, labelSize: 18, size: 32, values: (_, ticks) => ticks.map(tick => alongText(tick, short)), space: 56 },
    { ...soft, size, values: (_, ticks) => ticks.map(tick => tick === null ? "" : short(tick)) },
  ];
}
/* Returns the range of the y axis, which goes to 1 for a curve that is 0 everywhere, or without curves. */
function height(_, low, high) { return !low && !high ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true); }
/* Draws events, and steps whose value is not finite, over a chart. The events of one run are lines over the whole height. With
   several runs, whose curves are `series`, each event is a short line on the curve of its own run. */
function marks(runs, bad) {
  return { hooks: { draw: chart => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.lineWidth = 1.5;
    const wrong = shade("--bad"), half = 9 * devicePixelRatio;
    for (const [run, colour, series] of runs) for (const event of run.events) {
      if (typeof event.step !== "number" || (series !== undefined && !chart.series[series].show)) continue;
      const x = chart.valToPos(along(run, event.step), "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      let top = bbox.top, bottom = bbox.top + bbox.height;
      if (series !== undefined) {
        const y = heightAt(chart, series, along(run, event.step));
        if (y === null) continue;
        top = Math.max(top, y - half); bottom = Math.min(bottom, y + half);
      }
      ctx.strokeStyle = ["failure", "error", "exclusion", "rollback"].includes(event.kind) ? wrong : colour;
      ctx.setLineDash(["recovered", "restart", "resume"].includes(event.kind) ? [4, 4] : []);
      ctx.beginPath(); ctx.moveTo(x, top); ctx.lineTo(x, bottom); ctx.stroke();
    }
    ctx.setLineDash([]);
    ctx.fillStyle = wrong;
    for (const [run, step] of bad) {
      const x = chart.valToPos(along(run, step), "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x - 5, bbox.top - 9); ctx.lineTo(x + 5, bbox.top - 9); ctx.fill();
    }
    ctx.restore();
  } } };
}
/* Returns the height of the series' point nearest to x, in pixels of the canvas; null if the series has no point. */
function heightAt(chart, series, x) {
  const xs = chart.data[0], values = chart.data[series];
  let best = -1;
  for (let i = 0; i < xs.length; i++) if (typeof values[i] === "number" && (best < 0 || Math.abs(xs[i] - x) < Math.abs(xs[best] - x))) best = i;
  return best < 0 ? null : chart.valToPos(values[best], "y", true);
}
/* Makes the entries of a legend show and hide their curves by keys, too. A smoothed curve shows and hides its raw values with it. */
function byKeys(chart, holder) {
  const rows = [...holder.querySelectorAll(".u-series")];
  rows.forEach((row, number) => { if (chart.series[number].measured) row.style.display = "none"; });
  const numbers = rows.map((_, number) => number).filter(number => number && !chart.series[number].measured);
  const entry = number => rows[number].querySelector("th");
  if (numbers.length < 2) { numbers.forEach(number => { entry(number).style.pointerEvents = "none"; }); return; }  // a single curve stays visible
  numbers.forEach(number => {
    const say = () => entry(number).setAttribute("aria-pressed", chart.series[number].show);
    attributes(entry(number), { role: "button", tabindex: 0 });
    entry(number).addEventListener("click", () => {
      const show = chart.series[number].show;
      if (chart.series[number - 1].measured) chart.setSeries(number - 1, { show });
      say();
    });
    entry(number).addEventListener("keydown", event => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault(); event.stopPropagation(); entry(number).click();
    });
    say();
  });
}
function plot(box, label, build) {
  const holder = attributes(make("div", { className: "chart", tabIndex: 0 }), { role: "group", "aria-label": label });
  box.append(holder);
  let chart = null;
  const legend = () => [...holder.querySelectorAll(".u-series")].filter(row => row.style.display !== "none").map(row => [...row.children].map(cell => cell.textContent).join(": ")).join(", ");
  const entry = {
    note() {
      if (!chart) return;
      const { min, max } = chart.scales.x, xs = chart.data[0];
      views.set(label, { axis, zoom: min > xs[0] || max < xs.at(-1) ? { min, max } : null, hidden: chart.series.filter(each => !each.show).map(each => each.label) });
    },
    draw() {
      entry.note();
      const [options, values] = build(), view = views.get(label);
      options.series.forEach(each => { if (view?.hidden.includes(each.label)) each.show = false; });
      chart?.destroy();
      chart = new uPlot({ width: Math.max(260, holder.clientWidth), height: HEIGHT, cursor: { sync: { key: "step" }, drag: { x: true, y: false } },
        ...options }, values, holder);
      if (view?.zoom && view.axis === axis) chart.setScale("x", view.zoom);
      byKeys(chart, holder);
      queueMicrotask(() => holder.setAttribute("aria-label", `${label}: ${legend()}; arrow keys read values`));  // once uPlot has drawn
    },
    reset() { chart?.setData(chart.data); },
    size() { chart?.setSize({ width: Math.max(260, holder.clientWidth), height: HEIGHT }); },
  };
  holder.addEventListener("keydown", event => {
    const xs = chart.data[0];
    if (!xs.length) return;
    const { min, max } = chart.scales.x, middle = chart.cursor.idx ?? xs.findIndex(x => x >= (min + max) / 2);
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const hop = (event.shiftKey ? 20 : 1) * (event.key === "ArrowLeft" ? -1 : 1);
      const index = Math.min(xs.length - 1, Math.max(0, middle + hop));
      chart.setCursor({ left: chart.valToPos(xs[index], "x"), top: 10 });
      document.getElementById("said").textContent = legend();
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const half = (max - min) * (event.key === "-" ? 1 : 0.25), centre = xs[Math.max(0, middle)];
      chart.setScale("x", { min: Math.max(xs[0], centre - half), max: Math.min(xs.at(-1), centre + half) });
    } else if (event.key === "0" || event.key === "Escape") entry.reset();
    else return;
    event.preventDefault();
  });
  drawn.push(entry);  // drawn once the page has its widths
}

function curves(box, chart) {
  const several = data.runs.length > 1;
  plot(box, `${chart.title} of ${data.runs.map(run => run.name).join(", ")}`, () => {
    const tables = [], series = [alongSeries()], bad = [], own = new Map();  // the curve of each run that has its marks
    data.runs.forEach((run, number) => chart.keys.forEach((key, part) => {
      const points = run.series[key];
      if (!points) return;
      const colour = shade(runColour(several ? number : part));
      const x = points.step.map(step => along(run, step)), raw = finite(points.value), few = points.step.length < FEW;
      const smoothed = smoothing > 0 && !few && !chart.exact, values = smoothed ? smooth(raw) : raw;
      points.value.forEach((value, index) => { if (typeof value === "string") bad.push([run, points.step[index]]); });
      const names = [...(several ? [run.name] : []), ...(chart.keys.length > 1 || !several ? [key.replace(/^.*\//, "").replaceAll("_", " ")] : [])];
      const dash = several && part ? [6, 4] : undefined;
      if (smoothed) {
        tables.push([x, raw]);
        series.push({ label: names.join(" ") + " as measured", measured: true, stroke: colour + (dark.matches ? "80" : "45"), width: 1, points: { show: false } });
      }
      const odd = new Map(points.value.flatMap((value, index) => typeof value === "string" ? [[x[index], value]] : []));  // not finite
      const last = raw.at(-1) === null ? points.value.at(-1) : values.at(-1);
      tables.push([x, values]);
      if (!own.has(run)) own.set(run, [run, colour, several ? series.length : undefined]);
      series.push({ label: names.join(" "), stroke: colour, width: 1.75, dash, points: { show: few, fill: shade("--panel") },
        value: (chart, _, number, at) => at === null ? text(last) : odd.get(chart.data[0][chart.cursor.idx]) ?? valueAt(chart, number) });
    }));
    const joined = tables.length ? uPlot.join(tables) : [[], ...tables];
    return [{ series, scales: { x: { time: false }, y: { range: height } }, axes: axes(64), plugins: [marks([...own.values()], bad)] }, joined];
  });
}

function stacked(box, run, kind) {
  const { step } = run.stacks[kind], seconds = kind === "time";
  const parts = Object.fromEntries(Object.entries(run.stacks[kind].parts).map(([name, values]) => [name.replaceAll("_", " "), values]));
  const names = Object.keys(parts);
  const show = value => value === null ? "-" : seconds ? duration(value) : (value / 2 ** 30 >= 1 ? (value / 2 ** 30).toFixed(2) + " GiB" : (value / 2 ** 20).toFixed(1) + " MiB");
  const means = names.map(name => { const all = finite(parts[name]).filter(value => value !== null); return all.reduce((a, b) => a + b, 0) / Math.max(1, all.length); });
  const total = means.reduce((a, b) => a + b, 0) || 1;
  const bar = attributes(make("div", { className: "bar" }), { role: "img", "aria-label": names.map((name, i) => `${name} ${show(means[i])}`).join(", ") });
  names.forEach((name, i) => bar.append(make("span", { style: { width: 100 * means[i] / total + "%", background: PART_COLOURS[i % PART_COLOURS.length] } })));
  box.append(bar, make("ul", { className: "keys" }, ...names.map((name, i) =>
    make("li", {}, swatch(PART_COLOURS[i % PART_COLOURS.length]), `${name} ${show(means[i])} (${(100 * means[i] / total).toFixed(1)} %)`))));
  plot(box, `${data.stacks[kind].title} of ${run.name}`, () => {
    const sums = [];
    names.forEach((name, i) => sums.push(finite(parts[name]).map((value, at) => (value ?? 0) + (i ? sums[i - 1][at] : 0))));
    const order = names.map((_, i) => i).reverse();  // the largest sum first, the smaller ones over it
    const series = [alongSeries(), ...order.map(i => ({ label: names[i], fill: PART_COLOURS[i % PART_COLOURS.length],
      stroke: PART_COLOURS[i % PART_COLOURS.length], width: 1, points: { show: step.length < 3 }, value: (_, __, ___, at) => show(finite(parts[names[i]]).at(at ?? -1) ?? null) }))];
    const both = axes(84);
    Object.assign(both[1], { values: (_, ticks) => ticks.map(show) }, seconds ? {} : { incrs: BYTES });
    return [{ series, legend: { show: true }, scales: { x: { time: false }, y: { range: (_, __, max) => [0, (max || 1) * 1.05] } }, axes: both, plugins: [marks([[run, shade("--soft")]], [])] },
      [step.map(each => along(run, each)), ...order.map(i => sums[i])]];
  });
}

/* Tokens per expert: rows are experts, columns steps; white at the mean, blue below, red above. */
function heatColour(percent) {
  const t = Math.max(-1, Math.min(1, percent <= 100 ? (percent - 100) / 100 : Math.log2(percent / 100) / 2));
  const end = t < 0 ? [11, 87, 164] : [163, 22, 26], share = Math.abs(t);
  return end.map(value => Math.round(255 + (value - 255) * share));
}
function heat(box, run) {
  const { step, layers, load } = run.experts, canvas = make("canvas", { className: "heat", tabIndex: 0 });
  const select = make("select", {}), said = attributes(make("p", { className: "soft" }), { "aria-live": "polite" });
  layers.forEach((layer, index) => select.append(make("option", { value: index }, "layer " + layer)));
  let column = step.length - 1, row = 0;
  const most = () => Math.max(...load.map(each => each[+select.value].length));
  const say = () => {
    const values = load[column][+select.value];
    said.textContent = `step ${text(step[column])}, expert ${row}: ` + (row < values.length
      ? `${(values[row] / 100).toFixed(2)} times the mean (maximum of this layer ${(Math.max(...values) / 100).toFixed(2)})` : "no load in this step");
  };
  const draw = () => {
    const layer = +select.value, experts = most(), tall = Math.max(1, Math.ceil(150 / experts));
    const across = Math.max(1, Math.ceil(600 / step.length)), context = canvas.getContext("2d");
    canvas.width = across * step.length; canvas.height = tall * experts;
    const image = context.createImageData(canvas.width, canvas.height);
    for (let y = 0; y < canvas.height; y++) for (let x = 0; x < canvas.width; x++) {
      const at = 4 * (y * canvas.width + x), values = load[Math.floor(x / across)][layer], expert = Math.floor(y / tall);
      const colour = expert < values.length ? heatColour(values[expert]) : [230, 230, 230];
      image.data[at] = colour[0]; image.data[at + 1] = colour[1]; image.data[at + 2] = colour[2]; image.data[at + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    canvas.style.height = "190px";
    attributes(canvas, { role: "img", "aria-label": `Tokens of ${experts} experts of layer ${layers[layer]} over steps ${step[0]} to ${step[step.length - 1]}` });
    row = Math.min(row, experts - 1);
    say();
  };
  canvas.addEventListener("mousemove", event => {
    const place = canvas.getBoundingClientRect(), experts = most();
    column = Math.min(step.length - 1, Math.max(0, Math.floor((event.clientX - place.left) / place.width * step.length)));
    row = Math.min(experts - 1, Math.max(0, Math.floor((event.clientY - place.top) / place.height * experts)));
    say();
  });
  canvas.addEventListener("keydown", event => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    column = Math.min(step.length - 1, Math.max(0, column + move[0]));
    row = Math.min(most() - 1, Math.max(0, row + move[1]));
    event.preventDefault(); say();
  });
  select.onchange = draw;
  const ramp = attributes(make("canvas", { className: "ramp", width: 320, height: 1 }), { "aria-hidden": "true" }), brush = ramp.getContext("2d");
  for (let x = 0; x < 320; x++) { brush.fillStyle = `rgb(${heatColour(x < 160 ? x / 1.6 : 100 * 4 ** ((x - 160) / 160))})`; brush.fillRect(x, 0, 1, 1); }
  box.append(make("p", {}, make("label", {}, "Show ", select)), canvas,
    make("p", { className: "soft" }, `Steps ${text(step[0])} to ${text(step[step.length - 1])} from left to right, expert 0 at the top.`), said,
    ramp, make("div", { className: "ends" }, make("span", {}, "0"), make("span", {}, "mean"), make("span", {}, "4 × and more")));
  draw();
}

/* Mixes a colour with white. Text on the result is dark, also in dark mode. */
function pale(colour, white) {
  const parts = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  return `rgb(${parts.map(part => Math.round(part + (255 - part) * white))})`;
}
const takesTime = events => events?.some(event => KIND_COLOURS[event[1]] && event[5] > Math.max(0, event[4]));
function lanes(box, title, ranks, events) {
  const NS = "http://www.w3.org/2000/svg", computed = events.filter(event => KIND_COLOURS[event[1]]);
  const end = computed.reduce((last, event) => Math.max(last, event[5]), 0), tall = 20, left = 56, wide = 1200;
  const busy = computed.reduce((sum, event) => sum + event[5] - event[4], 0), bubble = (ranks * end - busy) / busy;
  const svg = attributes(document.createElementNS(NS, "svg"), { class: "lanes", viewBox: `0 0 ${left + wide} ${ranks * tall + 22}`, role: "img",
    "aria-label": `${title}: ${ranks} ranks, ${duration(end)}, bubble ${(100 * bubble).toFixed(1)} % of the computing time` });
  const add = (name, given, content) => { const node = attributes(document.createElementNS(NS, name), given); if (content) node.textContent = content; svg.append(node); };
  for (let rank = 0; rank < ranks; rank++) add("text", { x: 0, y: rank * tall + 14, fill: "currentColor" }, "rank " + rank);
  const stages = Array.from({ length: ranks }, () => new Set());
  computed.forEach(event => stages[event[0]].add(event[2]));
  for (const [rank, kind, stage, microbatch, start, stop] of computed) {
    const x = left + start / end * wide, width = Math.max(0.5, (stop - start) / end * wide);
    const turn = [...stages[rank]].sort((a, b) => a - b).indexOf(stage), of = Math.max(1, stages[rank].size - 1);
    add("rect", { x, y: rank * tall + 1, width, height: tall - 3, fill: pale(KIND_COLOURS[kind], 0.5 * turn / of), stroke: "#4d5768", "stroke-width": 0.4 });
    if (width > 14) add("text", { x: x + width / 2, y: rank * tall + 14, "text-anchor": "middle", fill: "#1c2330" }, String(microbatch));
  }
  for (let tick = 0; tick <= 4; tick++) add("text", { x: left + tick / 4 * wide, y: ranks * tall + 16, fill: "currentColor", "text-anchor": tick === 4 ? "end" : "start" }, duration(tick / 4 * end));
  box.append(make("p", {}, `${title}: ${duration(end)}, bubble ${(100 * bubble).toFixed(1)} % of the computing time`),
    attributes(make("div", { className: "scroll", tabIndex: 0 }, svg), { role: "region", "aria-label": title }));
  return new Set(computed.map(event => event[1]));
}

function overview() {
  const grid = section(data.runs.length > 1 ? "Runs" : "The run"), box = panel(grid, "", "", true);
  box.firstChild.remove();
  const word = name => name.replaceAll("_", " "), names = Object.keys(data.runs[0].facts).filter(name => data.runs.some(run => run.facts[name] !== null));
  const state = run => make("span", {}, make("span", { className: "state " + run.state }, run.state), run.why ? ": " + run.why : "");
  const rows = data.runs.map((run, number) => [make("span", { className: "name" }, swatch(`var(${runColour(number)})`), run.name), state(run), ...names.map(name => text(run.facts[name]))]);
  if (data.runs.length > 1) box.append(table(["run", "state", ...names.map(word)], rows));
  else box.append(table(["run", data.runs[0].name], [["state", state(data.runs[0])], ...names.map(name => [word(name), text(data.runs[0].facts[name])])]));
  const again = data.runs.filter(run => run.superseded);
  again.forEach(run => box.append(make("p", { className: "soft" }, `${run.name}: ${text(run.superseded)} records belong to steps that ran again later; the charts show the later records.`)));
}

/* Shows what a reader wants to know first: the verdict, the large numbers, and the loss (else bits per byte). */
function headline(chart) {
  const several = data.runs.length > 1, state = several ? "" : " state " + data.runs[0].state;
  page.append(make("p", { className: "verdict" + state }, data.verdict));
  if (several) page.append(make("ul", { className: "verdicts" }, ...data.runs.map((run, number) =>
    make("li", {}, swatch(`var(${runColour(number)})`), make("b", {}, run.name), ": " + run.verdict))));
  page.append(make("dl", { className: "numbers" }, ...data.numbers.map(({ label, value, note }) =>
    make("div", {}, make("dt", {}, label), make("dd", { className: "large" }, text(value)), note ? make("dd", { className: "soft" }, note) : null))));
  if (!chart) return;
  const grid = section(chart.title), box = panel(grid, "", "", true);
  box.firstChild.remove();
  grid.previousSibling.append(make("small", {}, " " + chart.unit));
  curves(box, chart);
}

function samples() {
  const runs = data.runs.filter(run => run.samples.length), grid = runs.length ? section("Generated text") : null;
  const list = ({ step, samples }) => make("div", {}, make("p", { className: "soft" }, "step " + text(step)), make("dl", { className: "sample" },
    ...samples.flatMap(({ prompt, text }) => [make("dt", {}, prompt || "(from the beginning of a document)"), make("dd", {}, attributes(make("pre", { tabIndex: 0 }, text.trimEnd() || (text ? "(white space alone)" : "(nothing)")), { role: "region", "aria-label": `Text after ${prompt || "nothing"} at step ${step}` }))])));
  runs.forEach(run => {
    const [newest, ...earlier] = run.samples, box = panel(grid, data.runs.length > 1 ? run.name : "Continuation of each prompt", "", true);
    box.append(list(newest));
    if (earlier.length) box.append(make("details", {}, make("summary", {}, `Earlier: ${earlier.length}, from steps ${text(earlier.at(-1).step)} to ${text(earlier[0].step)}`), ...earlier.map(list)));
  });
}

function draw() {
  drawn = [];
  page.replaceChildren();
  if (!axesOfAll().includes(axis)) axis = "step";
  const first = data.charts.find(chart => chart.keys.includes("loss")) ?? data.charts.find(chart => chart.keys.includes("bits_per_byte"));
  const several = data.runs.length > 1;
  headline(first);
  document.getElementById("written").textContent = `Written ${data.written}` + (data.refresh ? `, refreshed every ${data.refresh} s` : "");
  data.warnings.forEach(each => page.append(attributes(make("div", { className: "warning" }, each), { role: "note" })));
  page.append(controls());
  if (several) overview();
  if (data.differences.length) {
    const box = panel(section("Differences"), "", "", true);
    box.firstChild.remove();
    box.append(table(["key", ...data.runs.map(run => run.name)], data.differences.map(row => [row.key, ...row.values])));
  }
  const charts = data.charts.filter(chart => chart !== first), zero = charts.filter(chart => chart.zero);
  let group = null, grid = null;
  charts.filter(chart => !chart.zero).forEach(chart => {
    if (chart.group !== group) { group = chart.group; grid = section(group); }
    curves(panel(grid, chart.title, chart.unit), chart);
  });
  if (zero.length) {
    const inside = make("div", { className: "grid" });  // some browsers give the grid no width while its section is folded
    zero.forEach(chart => curves(panel(inside, chart.title, chart.unit), chart));
    page.append(make("details", { className: "zero", ontoggle: () => drawn.forEach(each => each.size()) },
      make("summary", {}, "0 throughout: " + zero.map(chart => chart.title).join(", ")), inside));
  }
  samples();
  const alone = data.runs.length === 1 ? data.runs[0] : null;
  let details = null;
  for (const kind in data.stacks) {
    const runs = data.runs.filter(run => run.stacks[kind]);
    if (!runs.length) continue;
    const { title, unit } = data.stacks[kind];
    if (alone) stacked(panel(details ??= section("Memory, time and experts"), title, unit), alone, kind);
    else { const rest = section(title); runs.forEach(run => stacked(panel(rest, run.name, unit), run, kind)); }
  }
  const routed = data.runs.filter(run => run.experts);
  const what = "tokens of an expert, relative to the mean of its layer";
  if (routed.length && alone) heat(panel(details ??= section("Memory, time and experts"), "Load of the experts", what), alone);
  else if (routed.length) { const rest = section("Load of the experts"); routed.forEach(run => heat(panel(rest, run.name, what), run)); }
  data.runs.filter(run => takesTime(run.timeline?.events)).forEach(run => {
    const box = panel(section("Pipeline of " + run.name), "Timeline of a step", "numbers are microbatches; later stages of a rank are paler", true);
    const kinds = lanes(box, "measured", run.timeline.ranks, run.timeline.events);
    if (takesTime(run.timeline.simulated)) lanes(box, "simulated, with the measured times of the passes", run.timeline.ranks, run.timeline.simulated);
    box.append(make("ul", { className: "keys" }, ...[...kinds].map(kind => make("li", {}, swatch(KIND_COLOURS[kind]), kind.replaceAll("_", " ")))));
  });
  const eventful = data.runs.filter(run => run.events.length);
  if (eventful.length) {
    const box = panel(section("Events"), "", "marked on the curves where the step is known", true);
    box.append(table([...(several ? ["run"] : []), "time", "kind", "step", "node", "rank", "what"], eventful.flatMap(run => run.events.map(event => [...(several ? [run.name] : []),
      event.time === null ? "-" : new Date(event.time * 1000).toISOString().slice(0, 19).replace("T", " "), event.kind, text(event.step), event.node, text(event.rank), event.detail])), true));
  }
  const scored = data.runs.filter(run => run.evaluations.length);
  if (scored.length) {
    const box = panel(section("Evaluations"), "", "files of `optimus evaluate --output` in the folder evaluations/ of the run", true);
    const names = [...new Set(scored.flatMap(run => run.evaluations.flatMap(row => Object.keys(row.scores))))];
    box.append(table(["run", "file", "step", "task or text", ...names.map(name => name.replaceAll("_", " "))], scored.flatMap(run => run.evaluations.map(row =>
      [run.name, row.file, text(row.step), row.what, ...names.map(name => text(row.scores[name]))]))));
  }
  if (!several) overview();
  const files = section("Configuration and machine");
  data.runs.forEach(run => {
    const box = panel(files, run.name, run.folder, !several);
    const add = (title, content) => box.append(make("details", {}, make("summary", {}, title), attributes(make("pre", { tabIndex: 0 }, content), { role: "region", "aria-label": `${title} of ${run.name}` })));
    if (run.config) add("Configuration", run.config);
    run.environment.forEach(each => add(`Machine, versions and git state, from step ${each.step}`, JSON.stringify(each, null, 1)));
  });
  redraw();
}
function redraw() { drawn.forEach(each => each.draw()); }
/* Shows new data, and preserves the reader's view: what is focused, open, chosen, zoomed and hidden. */
function refresh(fresh) {
  const all = selector => [...document.querySelectorAll(selector)], controls = "select, button, input, summary, [tabindex]";
  const focus = all(controls).indexOf(document.activeElement), at = window.scrollY;
  const open = all("details").map(each => each.open), layers = all(".panel select").map(each => each.value);
  drawn.forEach(each => each.note());
  data = fresh; draw();
  all("details").forEach((each, i) => { each.open = open[i]; });
  all(".panel select").forEach((each, i) => { each.value = layers[i] ?? each.value; each.onchange(); });
  all(controls)[focus]?.focus({ preventScroll: true });
  window.scrollTo(0, at);
}

axis = firstAxis();
draw();
dark.addEventListener("change", redraw);
let width = window.innerWidth;
window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; drawn.forEach(each => each.size()); } });
if (data.refresh) setInterval(async () => {
  try {
    const answer = await fetch("data.json");
    if (!answer.ok) return;
    refresh(await answer.json());
  } catch { document.getElementById("written").textContent = `Written ${data.written}; the server no longer answers`; }
}, 1000 * data.refresh);
