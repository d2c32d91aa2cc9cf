"use strict";
/* The building blocks of the pages. */
const PART_COLOURS = ["#4c78a8", "#f0a35e", "#72b7b2", "#e3c34f", "#9d7fc1", "#e0787a", "#82b366", "#b0b7c3", "#7a5c46", "#d98cb3"];
const page = document.getElementById("page");
let data = JSON.parse(document.getElementById("data").textContent);

function make(tag, properties = {}, ...children) {
  const { style, data: _, ...rest } = properties, node = Object.assign(document.createElement(tag), rest);
  if (style) Object.assign(node.style, style);
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
/* Returns a colour of the style sheet for a canvas; light and dark mode have different colours. */
function shade(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
const dark = matchMedia("(prefers-color-scheme: dark)");
function attributes(node, given) { for (const name in given) node.setAttribute(name, given[name]); return node; }
/* Makes a table. `stacked`: in a narrow window each row is a list of its non-empty cells. Roles are explicit, because a screen
   reader ignores a table whose rows are not laid out as rows. */
function table(head, rows, stacked) {
  const role = name => stacked ? { role: name } : {};
  const box = attributes(make("div", { className: "scroll", tabIndex: 0 }), { role: "region", "aria-label": head.join(", ") });
  const cell = (content, i) => attributes(make("td", { className: content === "-" || (content ?? null) === null ? "nothing" : "" }, content ?? "-"), { ...role("cell"), "data-label": head[i] });
  box.append(attributes(make("table", { className: stacked ? "stacked" : "" },
    attributes(make("thead", {}, attributes(make("tr", {}, ...head.map(text => attributes(make("th", {}, text), { scope: "col", ...role("columnheader") }))), role("row"))), role("rowgroup")),
    attributes(make("tbody", {}, ...rows.map(row => attributes(make("tr", {}, ...row.map(cell)), role("row")))), role("rowgroup"))), role("table")));
  return box;
}
function section(title) {
  const grid = make("div", { className: "grid" });
  page.append(attributes(make("section", {}, make("h2", {}, title), grid), { "aria-label": title }));
  return grid;
}
function panel(grid, title, note, wide) {
  const box = make("div", { className: wide ? "panel wide" : "panel" }, make("h3", {}, title, note ? make("small", {}, " " + note) : null));
  grid.append(box);
  return box;
}
function text(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size >= 1e12) return (value / 1e12).toPrecision(3) + "T";
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e3) return Math.round(value).toLocaleString("en");
  return size > 0 && size < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
}
/* Formats a number for an axis, with few digits. */
function short(value) {
  const size = Math.abs(value), [unit, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([unit]) => size >= unit) ?? [1, ""];
  if (letter) return +(value / unit).toPrecision(3) + letter;
  return size < 1e-3 ? String(+value.toPrecision(3)) : text(value);
}
function duration(seconds) {
  if (seconds >= 5400) return (seconds / 3600).toFixed(1) + " h";
  return seconds >= 90 ? (seconds / 60).toFixed(1) + " min" : seconds.toFixed(seconds < 10 ? 2 : 0) + " s";
}
function swatch(colour) { return make("span", { className: "swatch", style: { background: colour } }); }
