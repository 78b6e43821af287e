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

/** What happened when, in one window of the run. */
export function timeline(values, step, dark, go) {
  const { timelines } = values;
  if (timelines.length === 0) return el("section", {}, el("h2", {}, "Timeline"), el("p", { class: "note" },
    "The times of this run's steps are not recorded, or no step has ended yet."));
  const asked = step ?? timelines[timelines.length - 1].last;
  const far = (one) => Math.max(one.first - asked, asked - one.last, 0);
  const at = timelines.reduce((best, one, index) => (far(one) < far(timelines[best]) ? index : best), 0);
  const one = timelines[at];
  const choose = el("select", { onchange: (event) => go(`#/timeline/${event.target.value}`) },
    timelines.map((each, index) => el("option", { value: each.last, selected: index === at ? "" : null },
      `${number(each.first)} to ${number(each.last)}`)));
  return el("section", {}, el("h2", {}, "Timeline"),
    el("p", { class: "tools" },
      turn("earlier", timelines[at - 1], go), el("label", {}, "steps ", choose), turn("later", timelines[at + 1], go)),
    far(one) === 0 ? null : el("p", { class: "note" },
      `This page has no window of step ${number(asked)}, and shows the nearest. `
      + `open_run(…).charts.timeline(step=${asked}) draws it.`),
    el("p", { class: "quiet" }, "Each row is a trajectory: a line waits, a bar works. Its color changes where its "
      + "replica had the next version. The blue mark at the end is the step that trained it; a cross was lost. "
      + "A pointer on a part tells its numbers."),
    chart({ id: "timeline", spec: one.spec }, values.themes, dark, "wide"));
}

function turn(text, to, go) {
  return el("button", { disabled: to ? null : "", onclick: () => go(`#/timeline/${to.last}`) }, text);
}

/** Every outcome with its reason. */
export function lost(values) {
  const total = values.lost.reduce((sum, one) => sum + one.groups, 0);
  if (total === 0) return el("section", {}, el("h2", {}, "Lost groups"), el("p", { class: "note" },
    "No group has an outcome yet."));
  return el("section", {}, el("h2", {}, "Lost groups"),
    el("p", { class: "quiet" }, `${many(total, "group")} ended. Each lost group has its reason.`),
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
