// Draws every figure beside its SVG, which goes only once that has worked. The interpreter of expressions (`ast`) does
// without eval, which the content security policy forbids.
for (const figure of document.querySelectorAll("figure[data-figure]")) {
  const chart = figure.querySelector(".chart");
  const still = chart.querySelector("svg");
  const live = document.createElement("div");
  chart.append(live);
  const spec = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
  vegaEmbed(live, spec, { renderer: "svg", actions: false, ast: true, mode: "vega-lite" }).then(
    () => still.remove(),
    () => live.remove(),
  );
}
