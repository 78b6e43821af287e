// Which view the address asks for.

import { el } from "./dom.js";
import { group, groupList } from "./groups.js";
import { load } from "./values.js";
import { lost, overview, settings, timeline } from "./views.js";

const TABS = { "#/": "Overview", "#/timeline": "Timeline", "#/groups": "Groups", "#/lost": "Lost groups", "#/settings": "Settings" };
const state = { text: "", step: "", outcome: "all", sort: "step", current: 0, top: 0 };
const darkness = window.matchMedia("(prefers-color-scheme: dark)");

/** Where an address points: "/step/212/group/1701@1/3/token/112" and its beginnings. */
export function parsed(hash) {
  const words = hash.replace(/^#?\/?/, "").split("/").filter((one) => one !== "");
  const found = { view: words[0] ?? "", chart: null, step: null, group: null, attempt: null, trajectory: null, token: null };
  const whole = (word) => (/^\d+$/.test(word ?? "") ? Number(word) : null);
  if (words[0] === "charts") found.chart = words[1] ?? null;
  if (words[0] === "timeline") found.step = whole(words[1]);
  const step = words.indexOf("step");
  if (step === 0) found.step = whole(words[1]);
  const at = words.indexOf("group");
  if (at === 0 || at === 2) {
    const [ordinal, attempt] = (words[at + 1] ?? "").split("@");
    found.view = "group";
    found.group = whole(ordinal);
    found.attempt = whole(attempt);
    found.trajectory = whole(words[at + 2]);
    found.token = words[at + 3] === "token" ? whole(words[at + 4]) : null;
  }
  return found;
}

function view(values) {
  const place = parsed(location.hash);
  const { groups } = values;
  if (place.view === "group") {
    const index = groups.ordinal.findIndex((ordinal, at) => ordinal === place.group
      && (place.attempt === null ? true : groups.attempt[at] === place.attempt));
    if (index < 0) return { node: nothing("No group of this run has this number.") };
    return group(values, index, place, (hash) => history.replaceState(null, "", hash));
  }
  if (place.view === "step") {
    if (place.step === null) return { node: nothing("No step has this number.") };
    if (state.step !== String(place.step)) {
      Object.assign(state, { step: String(place.step), text: "", outcome: "all", current: 0, top: 0 });
    }
    return groupList(values, state, (hash) => { location.hash = hash; });
  }
  if (place.view === "groups") {
    if (state.step !== "") Object.assign(state, { step: "", current: 0, top: 0 });
    return groupList(values, state, (hash) => { location.hash = hash; });
  }
  if (place.view === "timeline") {
    return { node: timeline(values, place.step, darkness.matches, (hash) => { location.hash = hash; }) };
  }
  if (place.view === "lost") return { node: lost(values) };
  if (place.view === "settings") return { node: settings(values) };
  if (place.view === "" || place.view === "charts") {
    return {
      node: overview(values, darkness.matches),
      after: () => document.getElementById(`chart-${place.chart}`)?.scrollIntoView({ behavior: "instant" }),
    };
  }
  return { node: nothing("This page has no such place.") };
}

function nothing(text) {
  return el("section", {}, el("p", { class: "note" }, text), el("p", {}, el("a", { href: "#/" }, "to the overview")));
}

function show(values) {
  const { node, after } = view(values);
  const header = head(values);
  document.getElementById("page").replaceChildren(header, el("main", {}, node));
  document.title = `${values.title} · asyncrl`;
  if (after) after();
}

function head(values) {
  const here = location.hash || "#/";
  const hidden = values.groups.ordinal.length === 0 ? ["#/timeline", "#/groups", "#/lost"] : [];
  return el("header", { class: "top" },
    el("h1", {}, values.title),
    el("span", { class: `state ${values.state}` }, `${values.state}, step ${values.step} of ${values.max_steps}`),
    values.live ? el("span", { class: "quiet", role: "status" },
      values.unreachable ? "live: the server does not answer, so these values are old" : "live") : null,
    el("nav", {}, Object.entries(TABS).filter(([href]) => !hidden.includes(href)).map(([href, title]) =>
      el("a", { href, "aria-current": current(here, href) ? "page" : null }, title))));
}

/** Ask the server for newer values, as long as the page is open. */
async function follow(values) {
  for (;;) {
    let answer = null;
    try {
      answer = await fetch(`values?have=${values.live}`);
      if (answer.status === 200) Object.assign(values, await answer.json());
      else if (answer.status !== 204) answer = null;
    } catch { answer = null; }
    const changed = answer === null ? !values.unreachable : answer.status === 200 || values.unreachable;
    values.unreachable = answer === null;
    if (changed) refresh(values);
    if (answer === null) await new Promise((done) => { setTimeout(done, 3000); });
  }
}

/** Show newer values, unless the reader is about to write or reads one group: then only the head. */
function refresh(values) {
  const busy = document.activeElement?.matches("input, select") || parsed(location.hash).view === "group";
  if (busy) {
    document.querySelector("header.top")?.replaceWith(head(values));
    return;
  }
  const at = window.scrollY;
  show(values);
  window.scrollTo({ top: at, behavior: "instant" });
}

function current(here, href) {
  if (href === "#/") return here === "#/" || here.startsWith("#/charts");
  if (href === "#/groups") return /^#\/(groups|group|step)/.test(here);
  return here.startsWith(href);
}

try {
  const values = await load();
  window.addEventListener("hashchange", () => show(values));
  darkness.addEventListener("change", () => show(values));
  show(values);
  if (values.live) follow(values);
} catch (error) {
  document.getElementById("page").replaceChildren(
    el("p", { class: "bad" }, `This page could not be opened: ${error}`));
}
