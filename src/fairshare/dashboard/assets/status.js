// The operator's page: every pool, live.
import { borrowed, compact, element, follow, get, level, percent, plural, prose, seconds, whole, write } from "./base.js";
import { Spark } from "./charts.js";
import { connection, Picture, requestRow, showBudgets, Why } from "./shared.js";

const SPARK_SECONDS = 600;
const SPARK_STEP_SECONDS = 5;
const FILTER_FROM_TEAMS = 12;
const ROWS_AT_FIRST = 25;
const ARRANGE_SECONDS = 5;
const NAMED = 3;
const REQUESTS_MS = 5000;

const views = new Map();
const byId = (id) => document.getElementById(id);

// What a team does now, in words.
function doing(team) {
  const words = [];
  if (borrowed(team) > 0) words.push(`borrows ${whole.format(borrowed(team))}`);
  else if (team.in_flight > 0) words.push("within its share");
  if (team.held > 0) words.push(`${whole.format(team.held)} waiting, oldest ${seconds(team.oldest_held_seconds)}`);
  if (team.phantoms > 0) words.push(`${whole.format(team.phantoms)} may still run unseen`);
  return words.length ? words.join("; ") : "idle";
}

const listed = new Intl.ListFormat("en");
const named = (teams) => (teams.length > NAMED ? plural(teams.length, "team") : listed.format(teams.map((team) => team.team)));

// How a pool stands, in a sentence or two; and whether somebody waits for what it owns.
function verdict(pool, lent, phantoms) {
  if (pool.capacity === 0) return { words: `No engine is healthy: nothing runs${pool.held ? `, and ${plural(pool.held, "request")} ${pool.held === 1 ? "waits" : "wait"}` : ""}.`, short: true };
  const free = pool.capacity - pool.in_flight - phantoms;
  const waiting = pool.teams.filter((team) => team.held > 0);
  const short = pool.dispatch === "hold" ? waiting.filter((team) => team.in_flight + team.phantoms < team.reserved) : [];
  const room = free <= 0 ? `All ${plural(pool.capacity, "slot")} are taken` : pool.in_flight + phantoms === 0 ? `Idle: all ${plural(pool.capacity, "slot")} are free` : `${whole.format(free)} of ${plural(pool.capacity, "slot")} are free`;
  const held = pool.held ? `${plural(pool.held, "request")} of ${named(waiting)} ${pool.dispatch === "observe" ? "would wait" : pool.held === 1 ? "waits" : "wait"}` : "nobody waits";
  const words = [`${room}, ${held}.`];
  if (short.length) words.push(`${named(short)} ${short.length === 1 ? "waits" : "wait"} with fewer slots in flight than owned: only a request of several slots should.`);
  else if (waiting.length && pool.dispatch === "hold") words.push("Every team that waits has all that it owns in flight.");
  if (lent) words.push(`${plural(lent, "slot")} ${lent === 1 ? "is" : "are"} borrowed by ${named(pool.teams.filter((team) => borrowed(team) > 0))}.`);
  return { words: words.join(" "), short: short.length > 0 };
}

const TEAM_COLUMNS = [
  { key: "team", label: "team", sort: (a, b) => (a.team < b.team ? -1 : a.team > b.team ? 1 : 0), ascending: true },
  { key: "picture", label: "last 10 minutes" },
  { key: "doing", label: "now" },
  { key: "share", label: "share", text: (t) => percent.format(t.share) },
  { key: "reserved", label: "owns", title: "Within-share slots" },
  { key: "in_flight", label: "in flight", title: "Slots at engines" },
  { key: "borrowing", label: "borrowing", title: "Slots sent with that standing: the first to give way" },
  { key: "held", label: "held", title: "Requests waiting in the gateway" },
  { key: "usage", label: "usage", title: "Decayed consumption", text: (t) => compact.format(t.usage) },
  { key: "level_fairshare", label: "LF", title: "Level fairshare: share of the pool by share of usage; higher borrows first",
    value: (t) => (t.level_fairshare === null ? Infinity : t.level_fairshare), text: (t) => level(t.level_fairshare) },
  { key: "rank", label: "rank", title: "Teams ahead of it among borrowers" },
  { key: "budget", label: "budget left", title: "The least of its budgets; as a part of the hard amount", value: (t, left) => left ?? Infinity, text: (_, left) => (left === null ? "–" : percent.format(Math.round(left * 100) / 100)) },
];

const REPLICA_ROLES = {
  owner: "this replica decides", taking: "this replica takes over", follower: "another replica decides", waiting: "waits for the replica that decides",
  degraded: "this replica decides alone (degraded)", no_owner: "no replica decides",
};

// Which replica decides, where there are several.
function replicas(replication) {
  if (!replication) return "";
  return REPLICA_ROLES[replication.role] ?? replication.role;
}

class TeamRow {
  constructor(name, choose) {
    this.points = [];
    this.cells = new Map();
    this.row = element("tr");
    this.seen = true;
    for (const column of TEAM_COLUMNS) {
      if (column.key === "team") {
        this.button = element("button", { type: "button", class: "link", "aria-pressed": "false", title: "Show it in the chart above" }, name);
        this.button.addEventListener("click", () => choose(name));
        this.row.append(element("th", { scope: "row" }, this.button));
      } else if (column.key === "picture") {
        this.spark = new Spark(name);
        this.row.append(element("td", { class: "picture left" }, this.spark.node));
      } else {
        const attributes = column.key === "doing" ? { class: "doing doing-column left" } : { "data-label": column.label };
        const cell = element("td", attributes);
        this.cells.set(column.key, cell);
        this.row.append(cell);
      }
    }
  }

  remember(at, team) {
    const borrow = borrowed(team);
    const point = { at, within: team.in_flight - borrow, borrow, held: team.held, owns: team.reserved };
    const last = this.points[this.points.length - 1];
    const before = this.points[this.points.length - 2];
    // One point for some seconds; the last one is of now.
    if (last && before && last.at - before.at < SPARK_STEP_SECONDS) this.points[this.points.length - 1] = point;
    else this.points.push(point);
    while (this.points[0].at < at - SPARK_SECONDS) this.points.shift();
  }

  before(history, series) {
    const oldest = this.points.length ? this.points[0].at : Infinity;
    const points = history.at.map((at, i) => ({ at, within: series.within[i], borrow: series.borrowing[i], held: series.held[i], owns: series.owns[i] }));
    this.points.unshift(...points.filter((point) => point.at < oldest));
  }

  show(team, at, left) {
    this.team = team;
    this.left = left;
    this.remember(at, team);
    for (const column of TEAM_COLUMNS) {
      const cell = this.cells.get(column.key);
      if (!cell) continue;
      if (column.key === "doing") { write(cell, doing(team)); continue; }
      const value = column.value ? column.value(team, left) : team[column.key];
      write(cell, column.text ? column.text(team, left) : whole.format(value));
      cell.classList.toggle("zero", value === 0 && column.key !== "budget");
      cell.classList.toggle("bad", column.key === "budget" && left === 0);
    }
    this.at = at;
    this.draw();
  }

  // Only what somebody sees is drawn: a hundred pictures once a second are too many for a phone.
  draw() {
    if (this.seen && !this.row.hidden && this.points.length) this.spark.draw(this.points, this.at, SPARK_SECONDS);
  }
}

const INSTANCE_COLUMNS = [
  { key: "id", label: "engine" },
  { key: "health", label: "health" },
  { key: "part", label: "part of C", title: "In brackets: by how much adaptive capacity holds it below", text: (i) => (i.trimmed ? `${whole.format(i.part)} (−${whole.format(i.trimmed)})` : whole.format(i.part)) },
  { key: "seats", label: "seats", title: "What it runs at most" },
  { key: "in_flight", label: "in flight", title: "Slots that this gateway has there" },
  { key: "running", label: "runs", title: "As the engine reports" },
  { key: "waiting", label: "waits", title: "As the engine reports; above 0 for long means that C is too high" },
  { key: "kv_usage", label: "KV", text: (i) => percent.format(Math.round(i.kv_usage * 100) / 100) },
  { key: "preemptions", label: "preempted", title: "Requests that it evicted since it started: its KV cache was full" },
  { key: "version", label: "version", text: (i) => i.version },
];

function instanceRow(instance, details) {
  const own = details.filter((detail) => detail.instance === instance.id);
  const name = element("th", { scope: "row" }, instance.id, ...own.map((detail) => element("span", { class: `finding ${detail.severity}`, title: `${detail.sentence} ${detail.fix}` }, detail.id)));
  const row = element("tr", {}, name);
  for (const column of INSTANCE_COLUMNS.slice(1)) {
    let cell;
    if (column.key === "health") {
      const word = instance.leaving ? "leaving" : instance.healthy ? "healthy" : "unhealthy";
      cell = element("td", { class: word === "healthy" ? "good" : word === "leaving" ? "" : "bad" }, word);
    } else {
      const value = instance[column.key];
      const known = value !== null && value !== undefined;
      cell = element("td", known && value !== 0 ? {} : { class: "zero" }, known ? (column.text ? column.text(instance) : whole.format(value)) : "?");
    }
    cell.setAttribute("data-label", column.label);
    row.append(cell);
  }
  return row;
}

class PoolView {
  constructor(name) {
    this.name = name;
    this.rows = new Map();
    this.sort = null; // by name, or the busiest first where there are many teams
    this.arrangedAt = 0;
    this.showsAll = false;
    this.id = `pool-${views.size}`;
    this.subtitle = element("p");
    this.verdict = element("p", { class: "sentence" });
    this.facts = new Map();
    const facts = element("dl", { class: "facts" });
    for (const [key, label] of [["slots", "slots in flight"], ["borrowed", "of them borrowed"], ["held", "waiting here"], ["recalls", "taken back"], ["turns", "turn slots"]]) {
      const value = element("dd");
      this.facts.set(key, value);
      facts.append(element("div", {}, element("dt", {}, label), value));
    }
    this.meter = element("div", { class: "meter", role: "img" });
    this.meterParts = ["within", "borrow", "phantom"].map((part) => element("span", { class: part }));
    this.meter.append(...this.meterParts);
    this.notes = element("ul", { class: "notes" });
    this.picture = new Picture(`Pool ${name}`,
      (span, team) => get(`/api/v1/history?pool=${encodeURIComponent(name)}&seconds=${span}${team ? `&team=${encodeURIComponent(team)}` : ""}`),
      (history, team) => (team ? history.teams[team] : history.total));
    this.subject = element("select", { "aria-label": `Whose picture: pool ${name}` }, element("option", { value: "" }, "the whole pool"));
    this.subject.addEventListener("change", () => this.choose(this.subject.value, false));
    this.filter = element("input", { type: "search", placeholder: "filter teams", "aria-label": `Filter the teams of ${name}`, hidden: true });
    this.filter.addEventListener("input", () => this.arrange());
    this.headings = TEAM_COLUMNS.map((column) => this.heading(column));
    this.teams = element("tbody");
    this.nobody = element("p", { class: "empty" }, "No team owns a share here, and nobody asks.");
    this.more = element("button", { type: "button", class: "quiet", hidden: true });
    this.more.addEventListener("click", () => { this.showsAll = true; this.arrange(); });
    this.teamTable = element("table", {}, element("thead", {}, element("tr", {}, ...this.headings)), this.teams);
    this.instances = element("tbody");
    const instanceHeadings = INSTANCE_COLUMNS.map((column) => element("th", { scope: "col", ...(column.title ? { title: column.title } : {}) }, column.label));
    this.teamCount = element("h3");
    this.instanceCount = element("h3");
    this.section = element("section", { class: "card pool", id: this.id, "aria-labelledby": `${this.id}-name` },
      element("div", { class: "title" }, element("h2", { id: `${this.id}-name` }, name), this.subtitle),
      this.verdict, facts, this.meter,
      element("div", { class: "head tools" }, element("h3", {}, "Over time"), this.subject, this.picture.spans), this.picture.node,
      element("div", { class: "head" }, this.teamCount, this.filter), this.teamTable, this.nobody, this.more,
      element("div", { class: "head" }, this.instanceCount),
      element("table", { class: "instances" }, element("thead", {}, element("tr", {}, ...instanceHeadings)), this.instances), this.notes);
    this.glance = element("a", { href: `#${this.id}` });
    this.watcher = new IntersectionObserver((changes) => {
      for (const { target, isIntersecting } of changes) {
        target.teamRow.seen = isIntersecting;
        target.teamRow.draw();
      }
    }, { rootMargin: "100px" });
    this.past();
  }

  heading(column) {
    const heading = element("th", { scope: "col", ...(column.title ? { title: column.title } : {}) });
    if (column.key === "picture" || column.key === "doing") {
      heading.className = column.key === "doing" ? "doing-column left" : "left";
      heading.append(column.label);
      return heading;
    }
    const button = element("button", { type: "button" }, column.label);
    button.addEventListener("click", () => this.sortBy(column));
    heading.append(button);
    return heading;
  }

  // What happened before this page was opened.
  async past() {
    try {
      const history = await get(`/api/v1/history?pool=${encodeURIComponent(this.name)}&seconds=${SPARK_SECONDS}&by=team`);
      for (const [team, series] of Object.entries(history.teams)) this.rows.get(team)?.before(history, series);
    } catch {
      // The pool is new, or the gateway went away: the rows fill as time goes on.
    }
  }

  choose(team, scroll = true) {
    const subject = this.picture.subject === team && scroll ? "" : team;
    this.subject.value = subject;
    for (const [name, row] of this.rows) row.button.setAttribute("aria-pressed", String(name === subject));
    this.picture.about(subject);
    if (scroll) this.picture.node.scrollIntoView({ block: "center" });
  }

  sortBy(column) {
    const same = this.sort.key === column.key;
    this.sort = { key: column.key, ascending: same ? !this.sort.ascending : Boolean(column.ascending) };
    this.markSort();
    this.arrange();
  }

  markSort() {
    TEAM_COLUMNS.forEach((column, index) => {
      if (column.key === this.sort.key) this.headings[index].setAttribute("aria-sort", this.sort.ascending ? "ascending" : "descending");
      else this.headings[index].removeAttribute("aria-sort");
    });
  }

  show(pool, at, budgetLeft) {
    const lent = pool.teams.reduce((total, team) => total + borrowed(team), 0);
    const phantoms = pool.teams.reduce((total, team) => total + team.phantoms, 0);
    const half = pool.half_life_seconds > 0 ? `usage halves in ${seconds(pool.half_life_seconds)}` : "usage never decays";
    write(this.subtitle, [`dispatch ${pool.dispatch}`, `models ${pool.models.join(", ")}`, `usage in ${pool.cost_unit}`, half, replicas(pool.replication), pool.fallback === null ? "" : `falls back to ${pool.fallback}`].filter(Boolean).join(" · "));
    const { words, short } = verdict(pool, lent, phantoms);
    write(this.verdict, words);
    this.verdict.classList.toggle("warn", short);
    this.fact("slots", whole.format(pool.in_flight), ` of ${whole.format(pool.capacity)}${pool.saturated ? ", saturated" : ""}`);
    this.fact("borrowed", whole.format(lent), "");
    this.fact("held", whole.format(pool.held), pool.dispatch === "observe" ? " would wait" : "");
    this.fact("recalls", whole.format(pool.recalls), pool.recalls ? ` (${compact.format(pool.recalled_slot_seconds)} slot-s lost)` : "");
    this.fact("turns", whole.format(pool.turns_taken), ` of ${whole.format(pool.turn_slots)} taken`);
    this.facts.get("turns").parentElement.hidden = pool.turn_slots === 0;
    const all = Math.max(pool.capacity, pool.in_flight + phantoms, 1);
    [pool.in_flight - lent, lent, phantoms].forEach((slots, index) => { this.meterParts[index].style.width = `${(100 * slots) / all}%`; });
    this.meter.setAttribute("aria-label", `${pool.in_flight} of ${pool.capacity} slots in flight, ${lent} of them borrowed`);
    this.showTeams(pool, at, budgetLeft);
    this.showInstances(pool);
    this.showGlance(pool, lent);
    const subject = this.picture.subject ? pool.teams.find((team) => team.team === this.picture.subject) : null;
    const recalled = Math.max(0, pool.recalls - (this.recalls ?? pool.recalls));
    this.recalls = pool.recalls;
    const now = subject
      ? { owns: subject.reserved, within: subject.in_flight - borrowed(subject), borrowing: borrowed(subject), held: subject.held, recalled: 0 }
      : { owns: pool.teams.reduce((total, team) => total + team.reserved, 0), within: pool.in_flight - lent, borrowing: lent, held: pool.held, recalled };
    this.picture.look(at, { ...now, capacity: pool.capacity });
  }

  showTeams(pool, at, budgetLeft) {
    const present = new Set();
    let others = false;
    for (const team of pool.teams) {
      present.add(team.team);
      let row = this.rows.get(team.team);
      if (!row) {
        others = true;
        row = new TeamRow(team.team, (name) => this.choose(name));
        row.row.teamRow = row;
        this.rows.set(team.team, row);
        this.watcher.observe(row.row);
        this.subject.append(element("option", { value: team.team }, team.team));
      }
      row.show(team, at, budgetLeft(team.team));
    }
    for (const [name, row] of this.rows) {
      if (present.has(name)) continue;
      others = true;
      row.row.remove();
      this.rows.delete(name);
      for (const option of this.subject.options) if (option.value === name) option.remove();
    }
    write(this.teamCount, plural(pool.teams.length, "team"));
    this.nobody.hidden = pool.teams.length > 0;
    this.teamTable.hidden = pool.teams.length === 0;
    this.filter.hidden = pool.teams.length < FILTER_FROM_TEAMS;
    if (this.sort === null) {
      this.sort = this.filter.hidden ? { key: "team", ascending: true } : { key: "in_flight", ascending: false };
      this.markSort();
    }
    // Rows that change places every second cannot be read, and one under the pointer must stay there.
    const pointed = this.teamTable.matches(":hover") && matchMedia("(hover: hover)").matches;
    if (others || (at - this.arrangedAt >= ARRANGE_SECONDS && !pointed)) {
      this.arrangedAt = at;
      this.arrange();
    }
  }

  showInstances(pool) {
    const key = JSON.stringify([pool.instances, pool.finding_details]);
    if (key === this.instancesShown) return;
    this.instancesShown = key;
    write(this.instanceCount, plural(pool.instances.length, "engine"));
    this.instances.replaceChildren(...pool.instances.map((instance) => instanceRow(instance, pool.finding_details)));
    this.notes.replaceChildren(...pool.finding_details.filter((detail) => detail.severity === "note").map((detail) => element("li", {}, ...prose(`${detail.sentence} ${detail.fix}`))));
  }

  showGlance(pool, lent) {
    const healthy = pool.instances.filter((instance) => instance.healthy).length;
    const bad = pool.finding_details.filter((detail) => detail.severity === "error").length;
    const key = JSON.stringify([pool.in_flight, pool.capacity, lent, pool.held, healthy, pool.instances.length, bad]);
    if (key === this.glanceShown) return;
    this.glanceShown = key;
    const state = bad || healthy === 0 ? "bad" : healthy < pool.instances.length ? "warn" : "good";
    const meter = element("span", { class: "meter" }, element("span", { class: "within" }), element("span", { class: "borrow" }));
    const all = Math.max(pool.capacity, pool.in_flight, 1);
    meter.children[0].style.width = `${(100 * (pool.in_flight - lent)) / all}%`;
    meter.children[1].style.width = `${(100 * lent) / all}%`;
    this.glance.className = state;
    this.glance.replaceChildren(element("strong", {}, this.name), meter,
      element("span", {}, `${pool.in_flight} of ${pool.capacity} slots · ${whole.format(pool.held)} waiting`),
      element("span", { class: state }, `${healthy} of ${pool.instances.length} engines healthy${bad ? ` · ${plural(bad, "problem")}` : ""}`));
  }

  fact(key, value, small) {
    const node = this.facts.get(key);
    if (node.dataset.shown === value + small) return;
    node.dataset.shown = value + small;
    node.replaceChildren(value, element("small", {}, small));
  }

  arrange() {
    const wanted = this.filter.value.trim().toLowerCase();
    const column = TEAM_COLUMNS.find((each) => each.key === this.sort.key);
    const value = (row) => (column.value ? column.value(row.team, row.left) : row.team[column.key]);
    const order = [...this.rows.values()].sort((a, b) => {
      const by = column.sort ? column.sort(a.team, b.team) : value(a) - value(b) || 0;
      return (this.sort.ascending ? by : -by) || (a.team.team < b.team.team ? -1 : 1);
    });
    let shown = 0;
    let left = 0;
    const focused = document.activeElement;
    order.forEach((row, index) => {
      if (this.teams.children[index] !== row.row) this.teams.insertBefore(row.row, this.teams.children[index] ?? null);
      const matches = row.team.team.toLowerCase().includes(wanted);
      const fits = this.showsAll || wanted || shown < ROWS_AT_FIRST;
      row.row.hidden = !(matches && fits);
      if (matches && fits) shown += 1;
      else if (matches) left += 1;
    });
    // Moving a row takes the focus from what is in it.
    if (focused && focused !== document.activeElement && this.teams.contains(focused)) focused.focus();
    this.more.hidden = left === 0;
    write(this.more, `Show ${plural(left, "more team")}`);
  }
}

const problems = byId("problems");
let problemsShown = "";

function showProblems(pools) {
  const found = pools.flatMap((pool) => pool.finding_details.filter((detail) => detail.severity !== "note").map((detail) => ({ pool: pool.name, ...detail })));
  // What is said of the store is the same for every pool.
  const seen = new Set();
  const once = found.filter((detail) => !seen.has(detail.sentence) && seen.add(detail.sentence));
  // What several engines have in common is said once.
  const groups = new Map();
  for (const detail of once) {
    const place = JSON.stringify([detail.id, detail.why, detail.fix]);
    if (groups.has(place)) groups.get(place).sentences.push(detail.sentence);
    else groups.set(place, { ...detail, sentences: [detail.sentence] });
  }
  const grouped = [...groups.values()].sort((a, b) => Number(b.severity === "error") - Number(a.severity === "error"));
  const key = JSON.stringify(grouped);
  if (key === problemsShown) return;
  problemsShown = key;
  problems.hidden = grouped.length === 0;
  problems.querySelector("ul").replaceChildren(...grouped.map((detail) => element("li", { class: detail.severity },
    ...detail.sentences.map((sentence, i) => element("p", {}, ...(i ? [] : [element("strong", {}, detail.severity === "error" ? "Problem: " : "Warning: ")]), ...prose(sentence))),
    ...(detail.why ? [element("p", { class: "reason" }, ...prose(detail.why))] : []),
    ...(detail.fix ? [element("p", {}, element("strong", {}, "What to do: "), ...prose(detail.fix))] : []))));
}

const why = new Why(byId("ask"), byId("of"), byId("answer"), (of) => get(`/api/v1/explain?of=${encodeURIComponent(of)}`));
const WAITED_COLUMNS = ["came", "team", "pool", "class", "ran", "waited", "all", "recalls", "status"];
let requestsAt = 0;

async function showRequests() {
  if (Date.now() - requestsAt < REQUESTS_MS) return;
  requestsAt = Date.now();
  const section = byId("why");
  // A row that somebody is on must not move.
  if (section.querySelector("tbody").contains(document.activeElement)) return;
  const rows = await get("/api/v1/requests?only=waited&most=12");
  section.querySelector("tbody").replaceChildren(...rows.map((row) => requestRow(row, WAITED_COLUMNS, (id) => why.explain(id))));
  section.querySelector(".empty").hidden = rows.length > 0;
  byId("waited").hidden = rows.length === 0;
}

// The least part that is left of a team's budgets; null: it has none that ends.
function budgetLeft(budgets) {
  const least = new Map();
  for (const budget of budgets) {
    if (budget.left === null || !budget.hard) continue;
    const name = budget.owner.slice(budget.owner.indexOf(":") + 1);
    least.set(name, Math.min(least.get(name) ?? Infinity, budget.left / budget.hard));
  }
  return (team) => least.get(team) ?? null;
}

function show(state) {
  const left = budgetLeft(state.budgets);
  const present = new Set();
  for (const pool of state.pools) {
    present.add(pool.name);
    let view = views.get(pool.name);
    if (!view) {
      view = new PoolView(pool.name);
      views.set(pool.name, view);
      byId("pools").append(view.section);
      byId("glance").append(view.glance);
    }
    view.show(pool, state.at, left);
  }
  for (const [name, view] of views) {
    if (present.has(name)) continue;
    view.section.remove();
    view.glance.remove();
    views.delete(name);
  }
  byId("glance").hidden = state.pools.length < 2;
  showProblems(state.pools);
  showBudgets(byId("budgets"), state.budgets);
  byId("to-budgets").hidden = state.budgets.length === 0;
  const kept = state.history_kept
    ? "Minutes of the last two days are kept in the store."
    : "Without a store the history is in memory only: it starts anew when the gateway does.";
  write(byId("kept"), `fairshare ${state.version}. ${kept}`);
  showRequests().catch(() => {});
}

follow("/api/v1/live", { show, trouble: connection(byId("live"), byId("trouble")) });
