// The pages other than the groups.

import { chart } from "./charts.js";
import { el, shown, table } from "./dom.js";
import { many, number } from "./values.js";

const MARK = { good: "✓", bad: "!", note: "·" };

/** The verdict, what to look at, and the charts. */
export function overview(values, dark) {
  return el("section", {},
    el("ul", { class: "verdict" }, values.verdict.map((one) =>
      el("li", { class: one.level }, el("span", { class: "mark", "aria-hidden": "true" }, MARK[one.level]),
        shown(one.text)))),
    values.damaged.length === 0 ? null : el("div", { class: "note bad" },
      el("p", {}, "These files are damaged, so what they had is missing here:"),
      el("ul", {}, values.damaged.map((one) => el("li", {}, shown(one))))),
    table(["if you ask …", "open …"], values.asked.map(([ask, href]) =>
      [ask, el("a", { href }, href.split("/").pop())]), "asked"),
    notable(values),
    el("div", { class: "charts" }, values.charts.map((one) => chart(one, values.themes, dark))));
}

function notable(values) {
  if (values.notable.length === 0) return null;
  return el("details", {}, el("summary", {}, `${many(values.notable.length, "step")} to look at`),
    table(["step", "why"], values.notable.map((one) =>
      [el("a", { href: `#/step/${one.step}` }, number(one.step)), one.why])));
}

/** Every outcome with its reason. */
export function lost(values) {
  const total = values.lost.reduce((sum, one) => sum + one.groups, 0);
  if (total === 0) return el("section", {}, el("h2", {}, "Lost and found"), el("p", { class: "note" },
    "No group has an outcome yet."));
  return el("section", {}, el("h2", {}, "Lost and found"),
    el("p", { class: "quiet" }, `${many(total, "group")} ended. A group is lost with its reason, never in silence.`),
    table(["outcome", "groups", "share", "reason", "first"], values.lost.map((one) => [
      one.outcome, number(one.groups), `${number((100 * one.groups) / total, 1)}%`, shown(one.reason),
      one.first === null ? "" : el("a", { href: placeOf(one.first) }, `#${one.first[1]}`)])));
}

function placeOf([attempt, ordinal]) {
  return `#/group/${ordinal}@${attempt}`;
}

/** The settings, the attempts and the command that goes on. */
export function settings(values) {
  const attempts = values.attempts.map((one) => el("article", { class: "attempt" },
    el("h3", {}, `Attempt ${one.attempt ?? ""}`),
    table(["what", "value"], Object.entries(one).filter(([name]) => name !== "versions")
      .map(([name, value]) => [name, shown(String(value))])),
    one.versions ? el("details", {}, el("summary", {}, "versions of packages"),
      table(["package", "version"], Object.entries(one.versions))) : null));
  return el("section", {}, el("h2", {}, "Settings"), attempts,
    el("h3", {}, "config.yaml"), el("pre", { class: "text" }, shown(values.settings)));
}
