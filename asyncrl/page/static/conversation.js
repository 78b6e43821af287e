// A session as a conversation, with what each turn of the model took.

import { el, shown, table } from "./dom.js";
import { DASH, many, number } from "./values.js";

const LONG = 600; // characters from which on a message is folded

/** The messages, the turns, and the text as the model saw it. */
export function conversation(trajectory) {
  const { session } = trajectory;
  const spoken = session.messages.filter((one) => one.role === "assistant");
  const matched = spoken.length === session.turns.length;
  return el("section", { class: "conversation" },
    el("p", { class: session.end === "done" ? "quiet" : "bad" }, `The session ended: ${session.end || DASH}. `,
      shown(session.note)),
    session.messages.map((one) => message(one, matched ? session.turns[spoken.indexOf(one)] : null)),
    el("details", {}, el("summary", {}, many(session.turns.length, "turn")), turns(session)),
    el("details", {}, el("summary", {}, "as the model saw it"), rendered(trajectory)));
}

function message(one, turn) {
  return el("article", { class: `message ${one.role === "assistant" ? "model" : ""}` },
    el("header", {}, el("b", {}, shown(one.role)), turn ? el("span", { class: "quiet" }, cost(turn)) : null),
    one.reasoning ? folded("reasoning", one.reasoning) : null,
    one.text === "" ? null : one.text.length > LONG
      ? folded(`${one.text.slice(0, 80)}…`, one.text) : text(one.text),
    one.calls.map(([name, given]) => el("div", { class: "call" },
      el("span", { class: "quiet" }, "calls "), el("b", {}, shown(name)), text(given))));
}

function cost(turn) {
  const waited = turn.after === null ? "" : `, ${number(turn.after, 2)} s after the turn before`;
  return `${many(turn.tokens, "token")} in ${number(turn.seconds, 2)} s${waited}`;
}

function turns(session) {
  return table(["turn", "follows", "tokens", "seconds", "ended", "status", "reward", "advantage", "why a branch"],
    session.turns.map((one, index) => [
      String(index), one.follows === null ? DASH : String(one.follows), number(one.tokens), number(one.seconds, 2),
      one.finish || DASH, one.status, number(one.reward), number(one.advantage), shown(one.branch)]));
}

/** Each turn's new context in gray, and the tokens that the model sampled. */
function rendered(trajectory) {
  return el("pre", { class: "text", dir: "auto" }, trajectory.session.turns.map((one) => [
    el("span", { class: "quiet" }, shown(one.context)),
    shown(trajectory.pieces.slice(one.start, one.start + one.tokens).join(""))]));
}

function folded(title, body) {
  return el("details", {}, el("summary", {}, shown(title)), text(body));
}

function text(body) {
  return el("pre", { class: "text", dir: "auto" }, shown(body));
}
