// Elements. Text of the run reaches the page only as text nodes.

/** An element with attributes, listeners (`onclick`, …) and children. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined));
  return element;
}

/** A table with a head and rows of cells. */
export function table(head, rows, name = "") {
  return el("div", { class: `scroll ${name}` },
    el("table", {},
      el("thead", {}, el("tr", {}, head.map((one) => el("th", { scope: "col" }, one)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((one) => el("td", {}, one)))))));
}

/** A text in which controls and directions of writing are visible, so that nothing hides. */
export function shown(text) {
  return text.replace(/(?![\t\n\u200b-\u200d])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu,
    (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
}
