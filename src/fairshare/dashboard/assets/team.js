// A team's own view, behind its key. The key is in this tab's session storage and in the requests to this gateway only.
import { borrowed, compact, element, follow, get, level, percent, Refused, seconds, whole, write } from "./base.js";
import { connection, Picture, requestRow, showBudgets, Why } from "./shared.js";

const KEY = "fairshare-team-key";
const REQUESTS_MS = 3000;
const byId = (id) => document.getElementById(id);

let key = sessionStorage.getItem(KEY);
let end = null;
let requestsAt = 0;
const views = new Map();

const own = (path) => get(path, key);

class OwnPoolView {
  constructor(name) {
    this.name = name;
    const id = `own-${views.size}`;
    this.subtitle = element("p");
    this.sentence = element("p", { class: "sentence" });
    this.facts = new Map();
    const facts = element("dl", { class: "facts" });
    for (const [fact, label] of [["reserved", "you own"], ["in_flight", "in flight"], ["borrowed", "of them borrowed"], ["held", "waiting"], ["usage", "usage"], ["lf", "level fairshare"], ["rank", "rank"]]) {
      const value = element("dd");
      this.facts.set(fact, value);
      facts.append(element("div", {}, element("dt", {}, label), value));
    }
    this.picture = new Picture(`Your team in pool ${name}`,
      (span) => own(`/api/v1/team/history?pool=${encodeURIComponent(name)}&seconds=${span}`),
      (history) => Object.values(history.teams)[0]);
    this.picture.refresh();
    this.section = element("section", { class: "card pool", "aria-labelledby": id },
      element("div", { class: "title" }, element("h2", { id }, name), this.subtitle), this.sentence, facts,
      element("div", { class: "head tools" }, element("h3", {}, "Over time"), this.picture.spans), this.picture.node);
  }

  show(pool, at) {
    const team = pool.team;
    const half = pool.half_life_seconds > 0 ? `usage halves in ${seconds(pool.half_life_seconds)}` : "usage never decays";
    write(this.subtitle, [`models ${pool.models.join(", ")}`, `usage in ${pool.cost_unit}`, half].join(" · "));
    write(this.sentence, pool.sentence);
    const fact = (name, value, small = "") => {
      const node = this.facts.get(name);
      if (node.dataset.shown === value + small) return;
      node.dataset.shown = value + small;
      node.replaceChildren(value, element("small", {}, small));
    };
    fact("reserved", whole.format(team.reserved), ` of ${whole.format(pool.capacity)} slots (${percent.format(team.share)})`);
    fact("in_flight", whole.format(team.in_flight), " slots");
    fact("borrowed", whole.format(borrowed(team)));
    fact("held", whole.format(team.held), team.held ? ` oldest ${seconds(team.oldest_held_seconds)}` : "");
    fact("usage", compact.format(team.usage), ` ${pool.cost_unit}`);
    fact("lf", level(team.level_fairshare));
    fact("rank", whole.format(team.rank), " (0 is first)");
    this.picture.look(at, { owns: team.reserved, within: team.in_flight - borrowed(team), borrowing: borrowed(team), held: team.held, recalled: 0, capacity: pool.capacity });
  }
}

const why = new Why(byId("ask"), byId("of"), byId("answer"), (of) => own(`/api/v1/team/explain?of=${encodeURIComponent(of)}`));
const COLUMNS = ["came", "model", "class", "ran", "waited", "all", "tokens", "charged", "status"];

async function showRequests() {
  if (Date.now() - requestsAt < REQUESTS_MS) return;
  requestsAt = Date.now();
  const section = byId("why");
  if (section.querySelector("tbody").contains(document.activeElement)) return;
  const rows = await own("/api/v1/team/requests?most=25");
  section.querySelector("tbody").replaceChildren(...rows.map((row) => requestRow(row, COLUMNS, (id) => why.explain(id))));
  section.querySelector(".empty").hidden = rows.length > 0;
  byId("waited").hidden = rows.length === 0;
}

function show(state) {
  byId("enter").hidden = true;
  byId("own").hidden = false;
  byId("leave").hidden = false;
  write(byId("who"), `· ${state.team}`);
  document.title = `fairshare: ${state.team}`;
  for (const pool of state.pools) {
    if (!views.has(pool.name)) {
      const view = new OwnPoolView(pool.name);
      views.set(pool.name, view);
      byId("pools").append(view.section);
    }
    views.get(pool.name).show(pool, state.at);
  }
  for (const [name, view] of views) {
    if (state.pools.some((pool) => pool.name === name)) continue;
    view.section.remove();
    views.delete(name);
  }
  showBudgets(byId("budgets"), state.budgets);
  showRequests().catch(() => {});
}

function leave(sentence = null) {
  if (end) end();
  end = null;
  key = null;
  sessionStorage.removeItem(KEY);
  byId("pools").replaceChildren();
  byId("answer").replaceChildren();
  byId("why").querySelector("tbody").replaceChildren();
  views.clear();
  byId("own").hidden = true;
  byId("leave").hidden = true;
  byId("enter").hidden = false;
  byId("who").textContent = "";
  byId("live").className = "live";
  write(byId("live"), "not signed in");
  byId("trouble").hidden = sentence === null;
  write(byId("trouble"), sentence ?? "");
  byId("key").focus();
}

function enter() {
  end = follow("/api/v1/team/live", {
    key,
    show,
    trouble: connection(byId("live"), byId("trouble")),
    refused: (error) => leave(error.message),
  });
}

byId("sign-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  byId("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(given)) {
    leave("A key has no blanks and only plain letters, digits and signs.");
    return;
  }
  try {
    await get("/api/v1/team", given);
  } catch (error) {
    leave(error instanceof Refused ? error.message : "The gateway does not answer. Try again.");
    return;
  }
  key = given;
  sessionStorage.setItem(KEY, key);
  enter();
});
byId("leave").addEventListener("click", () => leave());
if (key) enter();
