// The tokens of one completion, with the numbers of the chosen one.

import { el, shown } from "./dom.js";
import { DASH, number } from "./values.js";

const CHUNK = 1000; // tokens of a block that the browser lays out only when it is in view
const HUES = [210, 30, 150, 320, 60, 270, 0, 100];

/** The completion, colored by version; `choose(index)` is called for a token that is chosen.
 * `group` has its outcome, the version that trained it, and the staleness above which tokens are masked. */
export function tokens(trajectory, group, chosen, choose) {
  const oldest = Math.min(...trajectory.versions.map(([version]) => version));
  const facts = el("dl", { class: "facts", "aria-live": "polite" });
  const body = el("div", { class: "tokens", tabindex: "0", role: "listbox", "aria-label": "tokens" });
  const spans = trajectory.pieces.map((piece, index) => {
    const hue = HUES[(versionOf(trajectory, index) - oldest) % HUES.length];
    const masked = trajectory.mask.length > 0 && !trajectory.mask[index];
    return el("span", {
      class: masked ? "token masked" : "token", style: `--hue:${hue}`, "data-index": index,
    }, piece === "" ? "\u200b" : visible(piece));
  });
  for (let first = 0; first < spans.length; first += CHUNK) {
    body.append(el("span", { class: "chunk" }, spans.slice(first, first + CHUNK)));
  }
  let current = -1;
  const select = (index, scroll) => {
    if (index < 0 || index >= spans.length) return;
    spans[current]?.classList.remove("chosen");
    current = index;
    spans[index].classList.add("chosen");
    if (scroll) spans[index].scrollIntoView({ block: "nearest" });
    facts.replaceChildren(...numbers(trajectory, group, index));
  };
  body.addEventListener("mouseover", (event) => {
    if (event.target.dataset.index) select(Number(event.target.dataset.index), false);
  });
  body.addEventListener("click", (event) => {
    if (event.target.dataset.index) choose(Number(event.target.dataset.index));
  });
  body.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    select(Math.max(0, Math.min(spans.length - 1, current + step)), true);
    choose(current);
  });
  if (spans.length) select(chosen < spans.length ? chosen ?? 0 : 0, chosen !== null);
  const node = el("div", {}, versions(trajectory, oldest), body, facts);
  return { node, focus: () => { body.focus({ preventScroll: true }); select(current, true); } };
}

function versions(trajectory, oldest) {
  const seen = [...new Set(trajectory.versions.map(([version]) => version))];
  return el("p", { class: "legend" }, seen.map((version) =>
    el("span", { class: "token", style: `--hue:${HUES[(version - oldest) % HUES.length]}` },
      `version ${version}`)));
}

function versionOf(trajectory, index) {
  const span = trajectory.versions.find(([, start, end]) => start <= index && index < end);
  return span ? span[0] : 0;
}

/** Why a token was not trained; "" if it was. */
function untrained(trajectory, group, index) {
  if (trajectory.mask.length > 0 && !trajectory.mask[index]) return "the mask leaves it out";
  if (trajectory.status !== "ok") return trajectory.status || "not scored";
  if (group.outcome !== "trained") return `its group is ${group.outcome}`;
  const stale = group.staleAbove !== null && group.version - versionOf(trajectory, index) > group.staleAbove;
  return stale ? "it is beyond the staleness bound" : "";
}

function numbers(trajectory, group, index) {
  const no = untrained(trajectory, group, index);
  const logprob = trajectory.logprobs[index];
  const { learner } = trajectory;
  const of = (name) => {
    if (!learner || learner.logprobs[index] === null) return null;
    return learner[name].length === 1 ? learner[name][0] : learner[name][index];
  };
  const computed = learner ? learner.logprobs[index] : null;
  const learned = (text) => computed === null ? `${DASH}${no ? "" : " (not recorded)"}` : text;
  const facts = {
    token: `${index + 1} of ${trajectory.pieces.length}`,
    text: JSON.stringify(trajectory.pieces[index]),
    version: String(versionOf(trajectory, index)),
    trained: no ? `no: ${no}` : "yes",
    "log-prob of the generator": number(logprob, 4),
    "log-prob of the learner": learned(number(computed, 4)),
    "probability, then at the step": logprob === null ? DASH
      : number(Math.exp(logprob), 4) + (computed === null ? "" : ` → ${number(Math.exp(computed), 4)}`),
    ratio: learned(logprob === null ? DASH : number(Math.exp(computed - logprob), 4)),
    clip: learned(learner?.clipped.includes(index) ? "stops its gradient" : "no"),
    "importance weight": learned(number(of("weights"), 4)),
    correction: learned(learner?.masked.includes(index) ? "masks it" : "keeps it"),
    advantage: number(of("advantages") ?? trajectory.advantage, 4),
  };
  return Object.entries(facts).map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, shown(value))));
}

/** Line breaks and tabs keep their effect and are visible. */
function visible(piece) {
  return shown(piece).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}
