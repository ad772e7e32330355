// Draws every figure beside its SVG, which goes only once that has worked; folded ones when they are unfolded, for there
// is no width to draw them in before. The interpreter of expressions (`ast`) does without eval, which the content
// security policy forbids.
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
