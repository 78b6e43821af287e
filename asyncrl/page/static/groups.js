// The list of groups with its filter, and one group with its siblings side by side.

import { el, shown, table } from "./dom.js";
import { conversation } from "./conversation.js";
import { tokens } from "./tokens.js";
import { DASH, number } from "./values.js";

const ROW = 34; // pixels
const SORTS = {
  "step": ["step", 1], "newest step": ["step", -1], "reward": ["reward", 1],
  "best reward": ["reward", -1], "longest": ["tokens", -1], "most stale": ["staleness", -1],
};

/** The list. `state` keeps filter and order while the page is open. */
export function groupList(newest, state, open) {
  const values = { ...newest }; // a live page gets newer ones, whose groups have other places
  const { groups } = values;
  const outcomes = [...new Set(groups.outcome)].sort();
  const list = el("div", { class: "list", tabindex: "0", role: "listbox", "aria-label": "groups" });
  const room = el("div", { class: "room" });
  const count = el("p", { class: "quiet", "aria-live": "polite" });
  list.append(room);
  let found = [];
  let current = state.current;

  const show = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
    const last = Math.min(found.length, first + Math.ceil(list.clientHeight / ROW) + 10);
    const rows = [];
    for (let place = first; place < last; place += 1) rows.push(row(place));
    room.replaceChildren(...rows);
  };
  const row = (place) => {
    const index = found[place];
    const cells = [
      `#${groups.ordinal[index]}`, number(groups.step[index]), groups.outcome[index],
      number(groups.reward[index]), `${number(groups.worst[index])} … ${number(groups.best[index])}`,
      number(groups.tokens[index]), number(groups.staleness[index]),
    ];
    return el("a", {
      class: `row${place === current ? " chosen" : ""}${groups.detail[index] < 0 ? " bare" : ""}`,
      href: link(groups, index), style: `top:${place * ROW}px`, role: "option",
      "aria-selected": place === current, tabindex: "-1",
    }, cells.map((one) => el("span", {}, one)));
  };
  const apply = (kept = false) => {
    found = matching(values, state);
    const [column, sign] = SORTS[state.sort];
    const key = (index) => groups[column][index];
    found.sort((a, b) => compare(key(a), key(b), sign) || groups.ordinal[a] - groups.ordinal[b]);
    if (!kept) { current = 0; state.top = 0; }
    room.style.height = `${found.length * ROW}px`;
    count.textContent = `${number(found.length)} of ${number(groups.ordinal.length)} groups`;
    list.scrollTop = state.top;
    show();
  };
  list.addEventListener("scroll", () => { state.top = list.scrollTop; show(); });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    if (event.key === "Enter" && found.length) open(link(groups, found[current]));
    if (step === undefined) return;
    event.preventDefault();
    current = Math.max(0, Math.min(found.length - 1, current + step));
    state.current = current;
    list.focus();
    if (current * ROW < list.scrollTop) list.scrollTop = current * ROW;
    const below = (current + 1) * ROW - list.clientHeight;
    if (below > list.scrollTop) list.scrollTop = below;
    show();
  });
  const change = (name) => (event) => { state[name] = event.target.value; apply(); };
  const select = (name, options, label) => el("label", {}, label, el("select", {
    onchange: change(name),
  }, options.map((one) => el("option", { selected: state[name] === one }, one))));
  const filter = el("div", { class: "filter" },
    el("label", {}, "text ", el("input", {
      type: "search", value: state.text, oninput: change("text"), placeholder: "in prompt or completion",
    })),
    el("label", {}, "step ", el("input", {
      type: "number", min: "0", value: state.step, oninput: change("step"), class: "short",
    })),
    select("outcome", ["all", ...outcomes], "outcome "),
    select("sort", Object.keys(SORTS), "by "));
  const head = el("div", { class: "row head" },
    ["group", "step", "outcome", "reward", "worst … best", "tokens", "staleness"]
      .map((one) => el("span", {}, one)));
  const node = el("section", {}, el("h2", {}, "Groups"), el("p", { class: "quiet" }, values.chosen),
    filter, count, head, list);
  return { node, after: () => { apply(true); list.focus({ preventScroll: true }); } };
}

function matching(values, state) {
  const { groups, details } = values;
  const text = state.text.toLowerCase();
  const has = (detail) => detail >= 0 && (details[detail].prompt.toLowerCase().includes(text)
    || details[detail].trajectories.some((one) => one.text.toLowerCase().includes(text)));
  return groups.ordinal.map((_, index) => index).filter((index) =>
    (state.outcome === "all" || groups.outcome[index] === state.outcome)
    && (state.step === "" || groups.step[index] === Number(state.step))
    && (text === "" || has(groups.detail[index])));
}

function compare(a, b, sign) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return a < b ? -sign : sign;
}

/** The address of a group, as the command line prints it. */
export function link(groups, index) {
  const step = groups.step[index];
  const tail = groups.attempt[index] === 0 ? "" : `@${groups.attempt[index]}`;
  return `#${step === null ? "" : `/step/${step}`}/group/${groups.ordinal[index]}${tail}`;
}

/** One group. `place` is where the address points: trajectory and token, or null. */
export function group(values, index, place, go) {
  const { groups } = values;
  const facts = table(
    ["outcome", "step", "trained at version", "staleness", "mean reward", "tokens", "masked"],
    [[groups.outcome[index], number(groups.step[index]), number(groups.version[index]),
      number(groups.staleness[index]), number(groups.reward[index]), number(groups.tokens[index]),
      number(groups.masked[index])]]);
  const title = el("h2", {}, `Group ${groups.ordinal[index]}`);
  const why = groups.reason[index] ? el("p", { class: "note" }, shown(groups.reason[index])) : null;
  const back = el("p", {}, el("a", { href: "#/groups" }, "← all groups"), " ",
    groups.step[index] === null ? null
      : [el("a", { href: `#/step/${groups.step[index]}` }, `groups of step ${groups.step[index]}`), " ",
        el("a", { href: `#/timeline/${groups.step[index]}` }, "that step in the timeline")]);
  const detail = values.details[groups.detail[index]];
  if (!detail) {
    return { node: el("section", {}, back, title, facts, why, el("p", { class: "note" },
      "The texts of this group are not in the page, which has room for a part of them. ",
      "asyncrl.open_run(…).trajectories() has them.")) };
  }
  const base = link(groups, index);
  const opened = place.trajectory === null ? null : detail.trajectories[place.trajectory];
  const view = opened
    ? tokens(opened, {
      outcome: groups.outcome[index], version: groups.version[index], staleAbove: values.stale_above,
    }, place.token, (token) => go(`${base}/${place.trajectory}/token/${token}`)) : null;
  const node = el("section", {}, back, title, facts, why,
    el("h3", {}, "Prompt"), el("pre", { class: "text", dir: "auto" }, shown(detail.prompt)),
    Object.entries(detail.columns).map(([name, value]) =>
      el("p", {}, el("b", {}, `${name}: `), shown(value))),
    place.trajectory !== null && !opened ? el("p", { class: "note" },
      `This group has no trajectory ${place.trajectory}. Its first is 0.`) : null,
    opened && place.token !== null && place.token >= opened.pieces.length ? el("p", { class: "note" },
      `This trajectory has no token ${place.token}. Its first is 0.`) : null,
    opened?.session ? el("h3", {}, `Session ${place.trajectory}`) : null,
    opened?.session ? conversation(opened) : null,
    view ? el("h3", { id: "tokens" }, `Tokens of trajectory ${place.trajectory}`) : null,
    view ? view.node : null,
    el("h3", {}, "Siblings"),
    el("div", { class: "siblings" }, detail.trajectories.map((one, number_) =>
      sibling(one, number_, base, place.trajectory === number_))));
  return { node, after: () => { if (view && place.token !== null) view.focus(); } };
}

function sibling(one, index, base, chosen) {
  const parts = Object.entries(one.parts).map(([name, value]) =>
    el("span", { class: "part" }, `${shown(name)} ${number(value)}`));
  return el("article", { class: chosen ? "sibling chosen" : "sibling" },
    el("header", {}, el("a", { href: `${base}/${index}${one.session ? "" : "/token/0"}` },
      `${one.session ? "session" : "trajectory"} ${index}`),
      el("b", {}, `reward ${number(one.reward)}`), el("span", {}, `advantage ${number(one.advantage)}`),
      one.status === "ok" ? null : el("span", { class: "bad" }, one.status || DASH)),
    el("pre", { class: "text", dir: "auto" }, shown(one.text)),
    el("footer", {}, parts, el("span", {}, `ended: ${one.finish || DASH}`),
      el("span", {}, `${number(one.pieces.length)} tokens`)));
}
