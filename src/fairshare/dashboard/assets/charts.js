// The charts: what is owned, used within share, borrowed, held and taken back, over time. Drawn by uPlot.
import uPlot from "./uPlot.js";
import { element, drawing, write, whole, precise, dateOf, minuteOf, timeOf } from "./base.js";

const SLOTS_HEIGHT = 200;
const WAITS_HEIGHT = 96;
const SHORTEST_SECONDS = 60;

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    within: of("--within"), borrow: of("--borrow"), held: of("--held"), recalled: of("--bad"), ink: of("--ink"), soft: of("--soft"), line: of("--line"),
    withinArea: of("--within-area"), borrowArea: of("--borrow-area"), heldArea: of("--held-area"),
  };
}

const amount = (value) => (value === null || value === undefined ? "–" : Number.isInteger(value) ? whole.format(value) : precise.format(value));
const stepped = uPlot.paths.stepped({ align: 1 });

// Two charts with one cursor: slots above, requests that wait (and those taken back) below.
export class PoolChart {
  constructor(label) {
    this.label = label;
    this.legend = element("dl", { class: "values", "aria-label": "Values" });
    this.values = new Map();
    for (const [key, name] of [["at", ""], ["owns", "owns"], ["within", "within share"], ["borrowing", "borrowed"], ["held", "waiting"], ["recalled", "taken back"]]) {
      const value = element("dd");
      this.values.set(key, value);
      this.legend.append(element("div", { class: `value ${key}` }, element("dt", {}, name), value));
    }
    this.picture = element("div", { class: "chart", role: "img" });
    this.node = element("figure", {}, this.picture, element("figcaption", {}, this.legend));
    this.data = null;
    this.width = 0;
    new ResizeObserver(() => this.fit()).observe(this.picture);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
  }

  // `data`: { at, capacity, owns, within, borrowing, held, recalled }, arrays of one length, in order of time.
  show(data) {
    this.data = data;
    this.tables = [
      [data.at, data.within.map((slots, i) => slots + data.borrowing[i]), data.within, data.owns, data.capacity],
      [data.at, data.held, data.recalled],
    ];
    if (!this.slots) this.build();
    else {
      this.slots.setData(this.tables[0]);
      this.waits.setData(this.tables[1]);
    }
    this.tell();
  }

  fit() {
    const width = Math.floor(this.picture.clientWidth);
    if (!width || width === this.width) return;
    this.width = width;
    if (!this.slots) this.build();
    else {
      this.slots.setSize({ width, height: SLOTS_HEIGHT });
      this.waits.setSize({ width, height: WAITS_HEIGHT });
    }
  }

  build() {
    if (!this.data || !this.width) return;
    for (const chart of [this.slots, this.waits]) if (chart) chart.destroy();
    const colour = colours();
    const axis = { stroke: colour.soft, grid: { stroke: colour.line, width: 1 }, ticks: { stroke: colour.line, width: 1 }, font: "12px system-ui, sans-serif" };
    const upwards = (_, low, high) => [0, Math.max(1, high) * 1.08];
    const wholeNumbers = { ...axis, size: 44, incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000] };
    // What there is fills the picture, from one minute on.
    const reach = (_, first, last) => [Math.min(first, last - SHORTEST_SECONDS), last];
    const times = (_, splits) => splits.map((at, i) => {
      const step = splits.length > 1 ? splits[1] - splits[0] : 60;
      return step < 60 ? timeOf(at) : step >= 43200 || (i === 0 && step >= 3600) ? dateOf(at) : minuteOf(at);
    });
    const common = {
      width: this.width,
      legend: { show: false },
      cursor: { sync: { key: this.label }, drag: { x: false, y: false }, points: { show: false }, x: true, y: false },
      padding: [8, 26, 0, 0],
    };
    const hooks = { setCursor: [(chart) => this.tell(chart.cursor.idx)] };
    this.slots = new uPlot({
      ...common, hooks, height: SLOTS_HEIGHT,
      scales: { x: { range: reach }, y: { range: upwards } },
      axes: [{ ...axis, space: 80, values: [], size: 8 }, wholeNumbers],
      series: [
        {},
        { stroke: colour.borrow, fill: colour.borrowArea, width: 1, paths: stepped, points: { show: false } },
        { stroke: colour.within, fill: colour.withinArea, width: 1, paths: stepped, points: { show: false } },
        { stroke: colour.ink, width: 1.5, dash: [5, 4], paths: stepped, points: { show: false } },
        { stroke: colour.soft, width: 1, dash: [1, 3], paths: stepped, points: { show: false } },
      ],
    }, this.tables[0], this.picture);
    this.waits = new uPlot({
      ...common, height: WAITS_HEIGHT,
      scales: { x: { range: reach }, y: { range: upwards } },
      axes: [{ ...axis, space: 80, size: 26, values: times }, { ...wholeNumbers, space: 22 }],
      series: [
        {},
        { stroke: colour.held, fill: colour.heldArea, width: 1, paths: stepped, points: { show: false } },
        { stroke: colour.recalled, fill: colour.recalled, width: 0, paths: uPlot.paths.bars({ size: [0.9, 6, 2] }), points: { show: false } },
      ],
    }, this.tables[1], this.picture);
    // Built first, placed first.
    this.picture.append(this.slots.root, this.waits.root);
  }

  // The values under the cursor, else the last ones.
  tell(index = null) {
    const data = this.data;
    const last = data.at.length - 1;
    const at = index ?? last;
    if (at < 0) return;
    write(this.values.get("at"), index === null || index === undefined ? "now" : data.at[last] - data.at[0] > 86400 ? dateOf(data.at[at]) : timeOf(data.at[at]));
    for (const key of ["owns", "within", "borrowing", "held", "recalled"]) write(this.values.get(key), amount(data[key][at]));
    if (index === null) {
      this.picture.setAttribute("aria-label",
        `${this.label}: now owns ${amount(data.owns[last])} slots, uses ${amount(data.within[last])} within share and ${amount(data.borrowing[last])} borrowed, ` +
        `${amount(data.held[last])} requests wait; most in flight ${amount(Math.max(...data.within.map((slots, i) => slots + data.borrowing[i])))}, ` +
        `most waiting ${amount(Math.max(...data.held))} since ${timeOf(data.at[0])}`);
    }
  }
}

// The small picture in a team's row: owned (dashed), within share and borrowed above the line, waiting below it.
const SPARK = { width: 200, height: 40, above: 28 };

export class Spark {
  constructor(name) {
    const { width, height, above } = SPARK;
    this.name = name;
    this.node = drawing("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
    this.title = drawing("title");
    this.areas = {};
    this.node.append(this.title);
    for (const part of ["within", "borrow", "held"]) {
      this.areas[part] = drawing("path", { class: part });
      this.node.append(this.areas[part]);
    }
    this.owns = drawing("path", { class: "owns", "vector-effect": "non-scaling-stroke" });
    this.node.append(drawing("path", { class: "ground", d: `M0 ${above}H${width}`, "vector-effect": "non-scaling-stroke" }), this.owns);
  }

  // `points`: [{ at, within, borrow, held, owns }] in order of time; at most `longest` seconds are shown.
  draw(points, now, longest) {
    const span = Math.min(longest, Math.max(SHORTEST_SECONDS, now - points[0].at));
    const { width, height, above } = SPARK;
    const below = height - above - 1;
    const top = Math.max(1, ...points.map((p) => Math.max(p.owns, p.within + p.borrow))) * 1.1;
    const deepest = Math.max(1, ...points.map((p) => p.held));
    const x = (at) => (width * Math.max(0, 1 - (now - at) / span)).toFixed(1);
    // Steps: a point holds until its time, from that of the one before.
    const area = (low, high) => {
      let forth = "";
      let back = "";
      let from = x(points[0].at - 10);
      for (const point of points) {
        const to = x(point.at);
        forth += `${forth ? "L" : "M"}${from} ${high(point).toFixed(1)}H${to}`;
        back = `L${to} ${low(point).toFixed(1)}H${from}${back}`;
        from = to;
      }
      return `${forth}${back}Z`;
    };
    const y = (slots) => above - (above * slots) / top;
    this.areas.within.setAttribute("d", area(() => above, (p) => y(p.within)));
    this.areas.borrow.setAttribute("d", area((p) => y(p.within), (p) => y(p.within + p.borrow)));
    this.areas.held.setAttribute("d", area(() => above + 1, (p) => above + 1 + (below * p.held) / deepest));
    let line = "";
    let from = x(points[0].at - 10);
    for (const point of points) {
      line += `${line ? "L" : "M"}${from} ${y(point.owns).toFixed(1)}H${x(point.at)}`;
      from = x(point.at);
    }
    this.owns.setAttribute("d", line);
    const last = points[points.length - 1];
    write(this.title, `${this.name}: owns ${amount(last.owns)}, runs ${amount(last.within)} on its own slots and ${amount(last.borrow)} borrowed, ${amount(last.held)} waiting`);
  }
}
