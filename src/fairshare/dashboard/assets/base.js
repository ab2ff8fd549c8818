// What both pages share: making elements, writing numbers, asking the gateway.
// Everything that comes from the gateway is set as text, never as markup.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function drawing(name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Sets text only where it changed, so that a selection or a screen reader is not disturbed once a second.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
export const precise = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
export const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 2 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const minutes = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
const dated = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hour12: false });

export const timeOf = (at) => clock.format(at * 1000);
export const minuteOf = (at) => minutes.format(at * 1000);
export const dateOf = (at) => dated.format(at * 1000);

export function seconds(value) {
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${precise.format(value / 3600)} h` : `${precise.format(value / 86400)} d`;
}

export const plural = (count, word) => `${whole.format(count)} ${word}${count === 1 ? "" : "s"}`;

// Level fairshare as the API has it: null is infinite.
export const level = (value) => (value === null ? "∞" : precise.format(value));

// Slots that a team would have to give back. Its `borrowing` is what was sent with that standing, which may be more: a team
// that runs far above what it owns has each of its next requests sent as a borrower.
export function borrowed(team) {
  return Math.max(0, Math.min(team.borrowing, team.in_flight - team.reserved));
}

// A sentence as nodes: what stands in backticks is something to type.
export function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, key, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, signal, cache: "no-store", credentials: key ? "omit" : "same-origin" });
  if (answer.ok) return answer;
  let message = `The gateway answers with status ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Something else than the gateway answered; its status says enough.
  }
  throw new Refused(answer.status, message);
}

export async function get(path, key = null) {
  return (await ask(path, key)).json();
}

const PATIENCE_MS = 5000;
const RETRY_MS = 1000;
const LONGEST_RETRY_MS = 10000;

// Follows a stream of server-sent events for as long as the page lives: `show` gets each event, `trouble` a sentence whenever
// the gateway does not answer, and null when it does again. Fetched, not an EventSource: that cannot send a key.
// Returns a function that ends it.
export function follow(path, { key = null, show, trouble, refused }) {
  let ended = false;
  let current = null;
  let retryMs = RETRY_MS;
  const goOn = async () => {
    while (!ended) {
      current = new AbortController();
      let silence = null;
      const patience = () => {
        clearTimeout(silence);
        silence = setTimeout(() => current.abort(), PATIENCE_MS);
      };
      try {
        patience();
        const answer = await ask(path, key, current.signal);
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        let text = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          patience();
          text += value;
          const events = text.split("\n\n");
          text = events.pop();
          // Only the last one counts: each event holds everything.
          if (events.length) {
            retryMs = RETRY_MS;
            trouble(null);
            show(JSON.parse(events[events.length - 1].slice("data: ".length)));
          }
        }
        if (!ended) trouble("The gateway ended the connection. Trying again.");
      } catch (error) {
        if (ended) return;
        if (error instanceof Refused && (error.status === 401 || error.status === 429) && refused) {
          ended = true;
          refused(error);
          return;
        }
        trouble(error instanceof Refused ? error.message : "The gateway does not answer. What is shown is old; trying again.");
      } finally {
        clearTimeout(silence);
      }
      await new Promise((wake) => setTimeout(wake, retryMs));
      retryMs = Math.min(LONGEST_RETRY_MS, retryMs * 1.5);
    }
  };
  goOn();
  return () => {
    ended = true;
    if (current) current.abort();
  };
}

export function showSteps(list, steps) {
  const words = { arrived: "came", held: "held", sent: "sent", recalled: "taken back", refused: "refused", ended: "ended", running: "now", now: "now", lately: "lately", budget: "budget" };
  list.replaceChildren(...steps.map((step) =>
    element("li", { class: `step ${step.what}` },
      element("span", { class: "when" }, timeOf(step.at)), element("span", { class: "what" }, words[step.what] ?? step.what),
      element("p", {}, step.sentence))));
}
