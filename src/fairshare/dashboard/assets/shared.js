// Parts that both pages show: the switch of time spans with its chart, budgets, the table of requests, explanations.
import { dateOf, element, get, percent, plural, Refused, seconds, showSteps, timeOf, whole, write, compact } from "./base.js";
import { PoolChart } from "./charts.js";

const SPANS = [{ seconds: 600, text: "10 min" }, { seconds: 7200, text: "2 h" }, { seconds: 172800, text: "2 days" }];
const FRESH_MS = { 600: 15000, 7200: 10000, 172800: 60000 };

// A chart of one pool: what of it is shown and how far back; follows the gateway.
export class Picture {
  // `ask(seconds, subject)` → the history; `pick(history, subject)` → one series.
  constructor(label, ask, pick) {
    this.chart = new PoolChart(label);
    this.ask = ask;
    this.pick = pick;
    this.span = SPANS[0].seconds;
    this.subject = "";
    this.buttons = SPANS.map((span) => {
      const button = element("button", { type: "button", "aria-pressed": String(span.seconds === this.span) }, span.text);
      button.addEventListener("click", () => this.reach(span.seconds));
      return button;
    });
    this.spans = element("div", { class: "spans", role: "group", "aria-label": `How far back: ${label}` }, ...this.buttons);
    this.node = this.chart.node;
    this.fetchedAt = 0;
    this.asked = 0;
  }

  reach(span) {
    this.span = span;
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(SPANS[i].seconds === span)));
    this.refresh();
  }

  about(subject) {
    this.subject = subject;
    this.refresh();
  }

  async refresh() {
    this.fetchedAt = Date.now();
    const number = ++this.asked;
    try {
      const history = await this.ask(this.span, this.subject);
      if (number !== this.asked) return; // something else was asked since
      const series = this.pick(history, this.subject);
      if (!series || !history.at.length) {
        this.fetchedAt = Date.now() - FRESH_MS[this.span] + 1500; // the pool is new
        return;
      }
      this.data = { at: history.at, capacity: history.capacity, ...series };
      this.chart.show(this.data);
    } catch {
      // The gateway went away, which the page says elsewhere; it is asked again in its time.
    }
  }

  // A second has passed; `now`: { owns, within, borrowing, held, recalled, capacity }.
  look(at, now) {
    if (Date.now() - this.fetchedAt > FRESH_MS[this.span]) {
      this.refresh();
      return;
    }
    const data = this.data;
    if (!data || this.span !== SPANS[0].seconds || at - data.at[data.at.length - 1] < 0.5) return;
    data.at.push(at);
    for (const key of ["capacity", "owns", "within", "borrowing", "held", "recalled"]) data[key].push(now[key]);
    while (data.at[0] < at - this.span) for (const column of Object.values(data)) column.shift();
    this.chart.show(data);
  }
}

export function showBudgets(section, budgets) {
  section.hidden = budgets.length === 0;
  const list = section.querySelector("ul");
  list.replaceChildren(...budgets.map((budget) => {
    const limit = budget.hard ?? budget.soft ?? 0;
    const used = budget.used + budget.reserved;
    const part = limit > 0 ? used / limit : 1;
    const of = [budget.model && `model ${budget.model}`, budget.tag && `tag ${budget.tag}`].filter(Boolean).join(", ");
    const period = budget.period === "total" ? "in total" : `this ${budget.period}`;
    const state = budget.left === 0 ? "bad" : part >= 0.8 || budget.borrows_only ? "warn" : "good";
    const meter = element("meter", { min: "0", max: "1", value: String(Math.min(1, part)), high: "0.8", optimum: "0", "aria-label": `${percent.format(part)} used` });
    const words = [
      `${compact.format(used)} of ${compact.format(limit)} used ${period}`,
      budget.left === null ? "soft: nothing is refused" : `${compact.format(budget.left)} left`,
      budget.borrows_only ? "over its soft amount: only borrows" : "",
      budget.resets_at === null ? "" : `starts again ${dateOf(budget.resets_at)}`,
    ].filter(Boolean).join(" · ");
    return element("li", { class: state }, element("strong", {}, budget.owner.replace(":", " ")), of ? ` (${of})` : "", meter, element("span", {}, words));
  }));
}

const STANDINGS = { "within-share": "within share", borrowing: "borrowing" };

export function requestRow(row, columns, explain) {
  const why = element("button", { type: "button", class: "link", title: "Why?" }, row.id);
  why.addEventListener("click", () => explain(row.id));
  const cells = {
    came: timeOf(row.at),
    team: row.team,
    pool: row.pool,
    model: row.model,
    class: row.service_class,
    ran: row.standing === null ? "not" : STANDINGS[row.standing],
    waited: row.held_seconds ? seconds(row.held_seconds) : "–",
    all: seconds(row.total_seconds),
    recalls: row.recalls ? whole.format(row.recalls) : "–",
    tokens: `${whole.format(row.prompt_tokens)} + ${whole.format(row.completion_tokens)}${row.estimated ? " ?" : ""}`,
    charged: compact.format(row.cost_units),
    status: row.reason || String(row.status),
  };
  return element("tr", {}, ...columns.map((column) => element("td", { "data-label": column, ...(column === "status" && row.status >= 400 ? { class: "bad" } : {}) }, cells[column])),
    element("td", { "data-label": "request" }, why));
}

// The form that asks why, and its answer. `ask(of)` → an explanation.
export class Why {
  constructor(form, input, answer, ask) {
    this.input = input;
    this.answer = answer;
    this.ask = ask;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.explain(input.value.trim());
    });
  }

  async explain(of) {
    if (!of) return;
    this.input.value = of;
    try {
      const explanation = await this.ask(of);
      const list = element("ol", { class: "steps" });
      showSteps(list, explanation.steps);
      this.answer.replaceChildren(element("h3", {}, `${explanation.about === "team" ? "Team" : "Request"} ${explanation.name}`), list);
    } catch (error) {
      this.answer.replaceChildren(element("p", { class: "bad" }, error instanceof Refused ? error.message : "The gateway does not answer. Try again."));
    }
    this.answer.scrollIntoView({ block: "nearest" });
  }
}

export function connection(node, trouble) {
  return (sentence) => {
    node.className = sentence === null ? "live on" : "live off";
    write(node, sentence === null ? "live" : "not live");
    trouble.hidden = sentence === null;
    write(trouble, sentence ?? "");
  };
}

export { get, plural };
