"use strict";
// Sorts and filters the table of runs. Without it the page shows all runs, the latest first.
const table = document.querySelector(".index");
const body = table.tBodies[0];
const rows = [...body.rows].map(row => ({
  row,
  text: row.textContent.toLowerCase(),
  tags: [...row.querySelectorAll(".tag")].map(tag => tag.textContent),
}));
const field = document.querySelector("#filter");
const count = document.querySelector("#count");
const buttons = [...document.querySelectorAll("[data-tag]")];
const collator = new Intl.Collator(undefined, {numeric: true});

function filter() {
  const words = field.value.toLowerCase().split(/\s+/).filter(word => word);
  const tags = buttons.filter(b => b.getAttribute("aria-pressed") === "true").map(b => b.dataset.tag);
  let shown = 0;
  for (const {row, text, tags: own} of rows) {
    row.hidden = !(words.every(word => text.includes(word)) && tags.every(tag => own.includes(tag)));
    shown += !row.hidden;
  }
  count.textContent = `${shown} of ${rows.length}`;
}

function compare(a, b, up) {  // an empty cell comes last, whichever way the others are sorted
  const [x, y] = [a, b].map(cell => cell.dataset.v ?? cell.textContent.trim());
  if (x === "" || y === "") return (x === "") - (y === "");
  const order = a.dataset.v && b.dataset.v ? x - y : collator.compare(x, y);
  return up ? order : -order;
}

function sort(head) {
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  rows.sort((a, b) => compare(a.row.cells[head.cellIndex], b.row.cells[head.cellIndex], up));
  body.append(...rows.map(({row}) => row));
}

for (const head of table.tHead.rows[0].cells) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => sort(head));
}
for (const button of buttons) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    filter();
  });
}
field.addEventListener("input", filter);
document.querySelector(".controls").hidden = false;
filter();
