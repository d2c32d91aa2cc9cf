"use strict";
/* Draws the data of `optimus.report.data_page`. */

/* Makes a bar for each row: label, number and text. The longest bar has the largest number. `stacked`: the texts are above the bars. */
function bars(rows, kind, stacked) {
  const most = Math.max(...rows.map(row => row.number), 1e-9), box = make("div", { className: stacked ? "" : "bars" });
  for (const { label, number, said } of rows) {
    const bar = attributes(make("div", { className: "bar" }, make("span", { style: { width: 100 * number / most + "%", background: "var(--run-0)" } })),
      { role: "img", "aria-label": `${kind} ${label}: ${said}` });
    box.append(...(stacked ? [make("p", {}, `${label}: ${said}`), bar] : [make("span", {}, label), bar, make("span", {}, said)]));
  }
  return box;
}
/* Makes the text of a document, with what the model predicts marked unless all of it is predicted. */
function marked(each) {
  const box = attributes(make("pre", { tabIndex: 0 }), { role: "region", "aria-label": each.said });
  if (each.all_predicted) { box.append(each.parts.map(part => part.text).join("")); return box; }
  for (const part of each.parts) box.append(part.predicted ? make("mark", {}, part.text) : part.text);
  return box;
}
function row(grid, each) {
  const box = panel(grid, `Row ${text(each.row)}`, each.said, true);
  for (const found of each.documents) {
    const edges = ["document", found.begins === true ? "begins" : "", found.ends === true ? "ends" : ""];
    box.append(make("div", { className: edges.filter(Boolean).join(" ") }, make("p", {}, found.said), marked(found)));
  }
  if (each.padding) box.append(make("p", { className: "soft" }, each.padding));
}

document.getElementById("written").textContent = `Written ${data.written}.`;
page.replaceChildren(make("dl", { className: "numbers" }, ...data.numbers.map(({ label, value, note }) =>
  make("div", {}, make("dt", {}, label), make("dd", { className: "large" }, short(value)), make("dd", { className: "soft" }, note)))));
const facts = panel(section("Data"), "", "", true);
facts.firstChild.remove();
facts.append(table(["fact", "value"], data.facts));
const drawn = section("Sources and lengths");
if (data.sources.length) panel(drawn, "Sources", data.sources_note).append(bars(data.sources, "source", true));
panel(drawn, "Lengths of documents", data.lengths_note).append(
  table(data.quantiles.map(each => each.label), [data.quantiles.map(each => text(each.value))], true), bars(data.lengths, "tokens", false));
const rows = section("Rows as text");
for (const each of data.rows) row(rows, each);
