/* Draws the data of `optimus.plan.page`. */
const words = name => name.replaceAll("_", " ");
const gigabytes = size => (size / 1e9).toFixed(size < 1e9 ? 2 : 1) + " GB";

/* Draws a bar for each plan. A part has the same colour in all bars. */
function bars(box, parts, show, most, limit) {
  const names = [...new Set(data.plans.flatMap((plan, i) => Object.keys(parts(plan))))]
    .filter(name => data.plans.some(plan => parts(plan)[name] > 0))
    .sort((a, b) => sum(b) - sum(a));
  function sum(name) { return data.plans.reduce((all, plan) => all + (parts(plan)[name] ?? 0), 0); }
  const colour = name => PART_COLOURS[names.indexOf(name) % PART_COLOURS.length];
  const rows = data.plans.map((plan, number) => {
    const own = parts(plan), total = Object.values(own).reduce((a, b) => a + b, 0);
    const bar = attributes(make("div", { className: "bar" }), { role: "img",
      "aria-label": `plan ${number + 1}, ${plan.name}: ${show(total)}: ` + names.filter(name => own[name] > 0).map(name => `${words(name)} ${show(own[name])}`).join(", ") });
    names.forEach(name => { if (own[name] > 0) bar.append(attributes(make("span", { title: `${words(name)}: ${show(own[name])}`,
      style: { width: 100 * own[name] / most + "%", background: colour(name) } }), {})); });
    if (limit) { bar.style.position = "relative"; bar.append(make("span", { title: "usable: " + show(limit), style: { position: "absolute", left: 100 * limit / most + "%", width: "2px", background: "var(--bad)" } })); }
    return make("div", { style: { marginBottom: "8px" } }, make("p", {}, `${number + 1}. ${plan.name}: ${show(total)}`), bar);
  });
  box.append(...rows, make("ul", { className: "keys" }, ...names.map(name => make("li", {}, swatch(colour(name)), words(name))),
    limit ? make("li", {}, swatch("var(--bad)"), "usable memory") : null));
}

function scaling(box) {
  const x = data.scaling.map(point => Math.log2(point.ranks));
  const holder = attributes(make("div", { className: "chart", tabIndex: 0 }), { role: "group", "aria-label": "Scaling: " + data.scaling.map(point => `${point.ranks} ranks ${text(point.tokens_per_second)} tokens/s, efficiency ${(100 * point.efficiency).toFixed(1)} %`).join("; ") });
  box.append(holder);
  const font = "12px system-ui, sans-serif";
  const first = data.scaling[0], ideal = data.scaling.map(point => first.tokens_per_second * point.ranks / first.ranks);
  let chart = null;
  const legend = show => (chart, value, series, at) => show(at === null ? chart.data[series].at(-1) : value);  // without a cursor: the value for the most ranks
  const percent = value => value === null ? "-" : value.toFixed(1) + " %";
  const draw = () => {
    const stroke = shade("--soft"), grid = { stroke: shade("--grid"), width: 1 };
    chart?.destroy();
    chart = new uPlot({ width: Math.max(260, holder.clientWidth), height: 300, cursor: { drag: { x: false } },
    scales: { x: { time: false, range: (_, min, max) => [min - 0.15, max + 0.15] }, y: { distr: 3 }, efficiency: { range: [0, 105] } },
    axes: [{ stroke, font, grid, splits: () => x, values: (_, ticks) => ticks.map(tick => text(Math.round(2 ** tick))), label: "ranks", labelFont: font, labelSize: 18, size: 32 },
      { stroke, font, grid, size: 64, values: (_, ticks) => ticks.map(tick => tick === null ? "" : short(tick)), label: "tokens/s", labelFont: font },
      { stroke, font, side: 1, scale: "efficiency", grid: { show: false }, values: (_, ticks) => ticks.map(tick => tick + " %"), label: "efficiency", labelFont: font }],
    series: [{ label: "ranks", value: legend(value => value === null ? "-" : text(Math.round(2 ** value))) },
      { label: "tokens/s", stroke: shade("--run-0"), width: 2, points: { show: true, fill: shade("--panel") }, value: legend(text) },
      { label: "ideal", stroke, dash: [6, 4], value: legend(text) },
      { label: "efficiency", scale: "efficiency", stroke: shade("--run-1"), width: 2, points: { show: true, fill: shade("--panel") }, value: legend(percent) }] },
    [x, data.scaling.map(point => point.tokens_per_second), ideal, data.scaling.map(point => 100 * point.efficiency)], holder);
  };
  draw();
  dark.addEventListener("change", draw);
  addEventListener("resize", () => chart.setSize({ width: Math.max(260, holder.clientWidth), height: 300 }));
}

function placement(box) {
  const { axes, sizes, nodes, all } = data.placement, shown = make("select", {}), grid = make("div", { className: "nodes" });
  if (!axes.length) { box.append(make("p", {}, "One rank.")); return; }
  axes.forEach((axis, i) => shown.append(make("option", { value: axis }, `${axis} (${sizes[i]} ranks)`)));
  const draw = () => {
    const axis = shown.value;
    grid.replaceChildren(...nodes.map((ranks, node) => make("div", { className: "node" }, make("p", { className: "soft" }, "node " + node),
      make("div", { className: "ranks" }, ...ranks.map(each => make("span", { title: `rank ${each.rank}: ` + axes.map(name => `${name} ${each[name]}`).join(", "),
        style: { background: `hsl(${360 * each[axis] / sizes[axes.indexOf(axis)]} 65% 80%)` } }, make("b", {}, String(each[axis])), make("small", {}, "rank " + each.rank)))))));
  };
  shown.onchange = draw;
  box.append(make("p", {}, make("label", {}, "Coordinate along ", shown)), grid);
  if (all > nodes.length) box.append(make("p", { className: "soft" }, `The first ${nodes.length} of ${text(all)} nodes.`));
  draw();
}

document.getElementById("written").textContent = `Written ${data.written}.`;
page.append(make("p", { className: "soft" }, `A step has ${text(data.tokens)} tokens.`));
const all = panel(section("Plans"), "", "", true);
all.firstChild.remove();
const columns = Object.keys(data.rows[0]);
const whole = text => text.replace(/ (?=[%x])|(?<= x) | (?=s$)/g, "\u00a0");  // a number stays beside its unit
all.append(table(columns.map(name => name ? whole(words(name)) : "plan"), data.rows.map(row => columns.map(name => whole(text(row[name]))))));
const parts = section("Time and memory");
bars(panel(parts, "Time of a step", "predicted"), plan => plan.time, value => value.toFixed(value < 1 ? 3 : 2) + " s", Math.max(...data.plans.map(plan => Object.values(plan.time).reduce((a, b) => a + b, 0))));
const memory = plan => { const { total, ...rest } = plan.memory_bytes; return rest; };
bars(panel(parts, "Memory of a rank", `of ${gigabytes(data.memory)}`), memory, gigabytes, Math.max(data.memory, ...data.plans.map(plan => plan.memory_bytes.total)), data.room);
if (data.scaling.length) scaling(panel(section("Weak scaling"), "Tokens per second and efficiency", "the batch grows with the ranks", true));
placement(panel(section("Placement"), "Ranks of plan 1 on nodes", "equal colours: equal coordinates along the axis", true));
