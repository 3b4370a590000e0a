// The page: what is typed and dragged becomes flags, flags become plans, and plans are shown.
/* global Panel, Timelines, byId */

import { MemoryCurves } from "./memory.js";
import { Pareto } from "./pareto.js";
import { Plans } from "./plans.js";
import { Row } from "./row.js";
import { card, flags, format, label, limits, parse } from "./state.js";

const SLOW = 30; // seconds that a plan takes, above which none is made ahead
const PAUSE = 150; // milliseconds after the last change, before plans are made ahead and the address is written

/** A schedule on the page: its values, what shows them, and the answer that is shown. */
class Shown {
  constructor(page, values) {
    this.page = page;
    this.values = values;
    const change = (changes) => page.change(this, changes);
    this.row = new Row(byId("cards"), page.names, change, () => page.remove(this));
    const choose = (limit) => change({ "memory-limit": limit === null ? "" : String(limit) });
    this.curves = new MemoryCurves(byId("curves"), page.timelines.chart, choose);
    this.asking = new AbortController();
  }

  /** Get the plan for what is typed, and show it; what is here is shown at once. */
  async update() {
    const { page } = this;
    const wanted = flags(page.common, this.values);
    const key = JSON.stringify(wanted);
    if (key === this.wanted) return this.draw();
    this.wanted = key;
    this.flags = wanted;
    this.asking.abort();
    this.asking = new AbortController();
    const { signal } = this.asking;
    this.busy = !page.plans.known(wanted);
    if (this.busy) this.draw();
    try {
      const answer = await page.plans.ask(wanted, signal);
      const panel = answer.plan ? await Panel.read({ ...answer.panel, title: label(this.values) }, page.kinds) : null;
      if (signal.aborted) return;
      Object.assign(this, { answer, panel, busy: false });
      if (this.answer.plan) this.chunks = answer.plan.chunks;
    } catch (error) {
      if (!signal.aborted) throw error;
      return;
    }
    this.draw();
    page.draw();
    this.drawn = key; // for who measures how long that takes
  }

  draw() {
    const number = this.page.shown.indexOf(this) + 1;
    this.row.show(number, this.values, this.flags, this.answer, this.busy);
    const { plan } = this.answer ?? {};
    const typed = this.values["memory-limit"];
    const own = plan?.memory_limit ?? null;
    const limit = typed !== "" && Number(typed) >= 0 ? Number(typed) : own;
    this.curves.show(label(this.values), this.panel, this.limits(), limit);
  }

  limits() {
    const family = this.page.families.find((one) => one.name === this.values.schedule);
    const chunks = Number(this.values.chunks) || family?.chunks || this.chunks || 1;
    return limits(this.page.common, chunks);
  }

  delete() {
    this.asking.abort();
    this.row.delete();
    this.curves.remove();
  }
}

class Page {
  constructor(about) {
    this.kinds = about.kinds;
    this.families = about.families;
    this.names = [...about.families.map((family) => family.name), about.auto];
    this.auto = about.auto;
    this.plans = new Plans(() => this.#drawParetoSoon());
    this.timelines = new Timelines({ ...about, fills: false, keys: byId("scroller") });
    this.timelines.chart.boxHeight = 15;
    this.timelines.painted = () => this.shown.forEach((one) => one.curves.paint());
    this.pareto = new Pareto(byId("pareto"), (point) => this.#go(point.card));
    this.shown = [];
    this.form = byId("common");
    this.form.addEventListener("input", () => this.#typed());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    byId("add").addEventListener("click", () => this.#append(card()));
    byId("link").addEventListener("click", () => this.#copyLink());
    window.addEventListener("hashchange", () => this.restore());
  }

  /** Show what the address says. */
  restore() {
    const { common, cards } = parse(location.hash);
    clearTimeout(this.writing);
    this.common = common;
    for (const [name, value] of Object.entries(common)) this.form.elements[name].value = value;
    for (const one of this.shown) one.delete();
    this.shown = cards.map((values) => new Shown(this, values));
    this.update();
  }

  /** Show what has changed: in the address, too. */
  update() {
    clearTimeout(this.writing); // a browser slows down a page that writes its address all the time
    this.writing = setTimeout(() => this.#writeAddress(), PAUSE);
    const spreads = this.common["vocab-parallel"] !== "off";
    for (const name of ["S", "T"]) this.form.elements[name].disabled = !spreads;
    this.form.elements.bandwidth.disabled = this.common.offload === "off";
    this.plans.stopAhead();
    clearTimeout(this.pause);
    const all = Promise.all(this.shown.map((one) => one.update()));
    this.draw();
    all.then(() => {
      clearTimeout(this.pause);
      this.pause = setTimeout(() => this.#planAhead(), PAUSE);
    });
  }

  change(one, changes) {
    one.values = { ...one.values, ...changes };
    if ("schedule" in changes) one.chunks = undefined;
    this.update();
  }

  #append(values) {
    const one = new Shown(this, values);
    this.shown.push(one);
    this.update();
    one.row.inputs.schedule.focus();
  }

  /** Go to a schedule; show it beside the others, if it is not yet. */
  #go(values) {
    const one = this.shown.find((other) => JSON.stringify(other.values) === JSON.stringify(values));
    if (one) one.row.inputs.schedule.focus();
    else this.#append(values);
  }

  remove(one) {
    one.delete();
    this.shown = this.shown.filter((other) => other !== one);
    this.update();
    for (const other of this.shown) other.draw();
    byId("add").focus();
  }

  /** Timelines and points; rows and curves draw themselves. */
  draw() {
    const panels = this.shown.map((one) => one.panel).filter(Boolean);
    this.timelines.setPanels(panels);
    this.#drawParetoSoon();
    const busy = this.shown.filter((one) => one.busy).length;
    if (busy) this.#tell(`planning ${busy} of ${this.shown.length}`);
    else this.#tell("");
  }

  #tell(text) {
    if (byId("message").textContent !== text) byId("message").textContent = text;
  }

  #typed() {
    this.common = Object.fromEntries(Object.keys(this.common).map((name) => [name, this.form.elements[name].value.trim()]));
    this.update();
  }

  /** Ask for every limit that a line can be dragged to, the nearest first; then for every family, for the front. */
  async #planAhead() {
    const fast = (answer) => !(answer.plan?.plan_seconds > SLOW);
    const limit = (given) => Number(given["memory-limit"]);
    for (const one of this.shown) {
      if (one.values.schedule === this.auto || !one.answer?.plan || !fast(one.answer)) continue;
      const now = Number(one.values["memory-limit"]) || one.answer.plan.memory_limit || one.limits().at(-1);
      const near = [...one.limits()].sort((a, b) => Math.abs(a - now) - Math.abs(b - now));
      const wanted = near.map((to) => flags(this.common, { ...one.values, "memory-limit": String(to) }));
      // Below a limit that is refused all others are, and the command says so quickly when it is asked.
      const useful = (given, answer) => fast(answer) && (answer.plan || limit(given) > limit(answer.flags));
      const progress = (left) => this.#tell(`planning ahead: ${left} more limits of ${label(one.values)}`);
      if (!(await this.plans.askAhead(wanted, useful, progress))) return;
    }
    const others = this.families.map((family) => flags(this.common, card({ schedule: family.name })));
    const progress = (left) => this.#tell(`planning ahead: ${left} more schedules`);
    if (await this.plans.askAhead(others, (_, answer) => fast(answer), progress)) this.#tell("all planned");
  }

  #drawParetoSoon() {
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = undefined;
      this.pareto.show(this.#points());
    });
  }

  /** All plans at the costs that are shown; those at the same place share a point, which goes by the shortest name. */
  #points() {
    const same = ({ schedule, chunks, "memory-limit": limit, ...rest }) => JSON.stringify(rest);
    const now = same(flags(this.common, card()));
    const shown = new Set(this.shown.map((one) => JSON.stringify(one.values)));
    const places = new Map();
    for (const { flags: given, plan } of this.plans.all()) {
      if (!plan || same(given) !== now) continue;
      const values = card({ schedule: given.schedule, chunks: given.chunks ?? "", "memory-limit": given["memory-limit"] ?? "" });
      const bubble = plan.objective === "makespan" ? plan.makespan_bubble_rate : plan.bubble_rate;
      const memory = Math.max(...plan.peak_activation);
      const place = `${bubble.toFixed(9)} ${memory.toFixed(9)}`;
      if (!places.has(place)) places.set(place, { bubble, memory, shown: false, names: new Map() });
      const point = places.get(place);
      point.shown ||= shown.has(JSON.stringify(values));
      const name = label({ ...values, "memory-limit": "" });
      const before = point.names.get(name);
      if (!before || label(values).length < label(before).length) point.names.set(name, values);
    }
    return [...places.values()].map(({ names, ...point }) => {
      const cards = [...names.values()].sort((a, b) => label(a).length - label(b).length);
      return { ...point, title: cards.map(label).join(", "), card: cards[0] };
    });
  }

  #writeAddress() {
    history.replaceState(null, "", format({ common: this.common, cards: this.shown.map((one) => one.values) }));
  }

  async #copyLink() {
    this.#writeAddress();
    try {
      await navigator.clipboard.writeText(location.href);
      this.#tell("link copied");
    } catch {
      this.#tell("copy the address of this page: it has everything");
    }
  }
}

const about = await (await fetch("/api/about")).json();
window.playground = new Page(about); // for the console
window.playground.restore();
