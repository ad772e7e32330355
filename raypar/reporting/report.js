"use strict";
// Sorts tables when a head is clicked, filters their rows by the words that are typed, and marks tables that scroll.
document.documentElement.classList.add("scripted");
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const keyed = [...body.rows].map((row) => {
        const cell = row.cells[column];
        const text = cell.textContent.trim();
        return { row, number: text ? Number(cell.dataset.sort ?? text) : NaN, text };
      });
      // Numbers first, then words, then missing values, in both directions.
      const rank = (entry) => (!Number.isNaN(entry.number) ? 0 : entry.text && entry.text !== "–" ? 1 : 2);
      keyed.sort((a, b) => {
        if (rank(a) !== rank(b)) return rank(a) - rank(b);
        const order = rank(a) === 0 ? a.number - b.number : a.text.localeCompare(b.text, undefined, { numeric: true });
        return descending ? -order : order;
      });
      body.append(...keyed.map((entry) => entry.row));
    });
  });
}
for (const input of document.querySelectorAll("input[data-filter]")) {
  const rows = [...document.getElementById(input.dataset.filter).tBodies[0].rows];
  const texts = new Map(rows.map((row) => [row, [...row.cells].map((c) => c.textContent).join(" ").toLowerCase()]));
  const count = document.querySelector(`[data-count="${input.dataset.filter}"]`);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => texts.get(row).includes(word));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = words.length ? `${shown} of ${rows.length}` : "";
  });
}
// A table wider than the page fades at the edge that hides columns; a line above it is the hint to scroll.
for (const hint of document.querySelectorAll("[data-hint]")) {
  const region = hint.nextElementSibling;
  const look = () => {
    hint.hidden = region.scrollWidth <= region.clientWidth + 1;
    region.classList.toggle("more", region.scrollLeft + region.clientWidth < region.scrollWidth - 1);
  };
  region.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(region);
}
