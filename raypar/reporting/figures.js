// Draws each figure beside its SVG, and removes the SVG once the figure is drawn. A folded figure has no width, so it is
// drawn when it is unfolded. The interpreter of expressions (`ast`) needs no eval, which the content security policy
// forbids.
function draw(figure) {
  const place = figure.querySelector(".chart > div");
  const still = place.querySelector("svg");
  const live = document.createElement("div");
  place.append(live);
  const spec = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
  vegaEmbed(live, spec, { renderer: "svg", actions: false, ast: true, mode: "vega-lite" }).then(
    () => still.remove(),
    () => live.remove(),
  );
}
for (const figure of document.querySelectorAll("figure[data-figure]")) {
  const fold = figure.closest("details:not([open])");
  if (fold) fold.addEventListener("toggle", () => draw(figure), { once: true });
  else draw(figure);
}
