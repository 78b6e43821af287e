// Charts, which Vega draws when they come into view.

import { el } from "./dom.js";

/** A figure with the chart. */
export function chart(one, themes, dark, name = "") {
  const figure = el("figure", { id: `chart-${one.id}`, class: name });
  const watch = new IntersectionObserver((seen) => {
    if (!seen.some((entry) => entry.isIntersecting)) return;
    watch.disconnect();
    draw(figure, one.spec, dark ? themes.dark : themes.light);
  }, { rootMargin: "400px" });
  watch.observe(figure);
  return figure;
}

async function draw(figure, spec, theme) {
  const options = { ast: true, actions: false, renderer: "svg" };
  try {
    await vegaEmbed(figure, { ...spec, config: theme }, options);
  } catch (error) {
    figure.replaceChildren(el("p", { class: "bad" }, `This chart could not be drawn: ${error}`));
  }
}
