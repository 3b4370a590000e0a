// The page: what is typed and dragged becomes flags, flags become plans, and plans are shown.
/* global Timelines, byId */

import { known, MICROBATCHES, open } from "./costs.js";
import { check, mark } from "./fields.js";
import { Pareto } from "./pareto.js";
import { Plans } from "./plans.js";
import { Shown } from "./shown.js";
import { card, flags, format, label, measures, parse, rescaled, stock } from "./state.js";

const AHEAD = 18000; // milliseconds for which plans are made ahead
const PAUSE = 150; // milliseconds after the last change, before plans are made ahead and the address is written

class Page {
  stock = { unit: MICROBATCHES }; // plain: the plan of 1F1B; interleaved: the shortest that stock can have
  places = new Map(); // schedules -> which of them by time, from 1
  opened = null; // the file that costs are from: {costs, name, stages, unit, microbatch, vocabulary, copies}

  constructor(about) {
    this.kinds = about.kinds;
    this.families = about.families;
    this.names = [...about.families.map((family) => family.name), about.auto];
    this.auto = about.auto;
    this.most = about.most;
    this.plans = new Plans(() => this.#drawParetoSoon());
    const amount = (memory) => this.unit.amount(memory);
    this.timelines = new Timelines({ ...about, amount, fills: false, keys: byId("scroller") });
    this.timelines.painted = () => this.shown.forEach((one) => one.curves.paint());
    this.pareto = new Pareto(byId("pareto"), (point) => this.#go(point.card));
    this.shown = [];
    this.form = byId("common");
    for (const input of this.form.elements) {
      if (!input.name) continue;
      const said = Object.assign(document.createElement("span"), { className: "refused", id: `wrong-${input.name}` });
      input.parentElement.after(said);
    }
    this.form.addEventListener("input", () => this.#typed());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.#listenToFiles();
    byId("add").addEventListener("click", () => this.#append(card()).row.inputs.schedule.focus());
    byId("sort").addEventListener("click", () => this.#sort());
    byId("link").addEventListener("click", () => this.#copyLink());
    window.addEventListener("hashchange", () => this.restore());
    document.addEventListener("visibilitychange", () => this.update());
  }

  get unit() {
    return this.opened?.unit ?? MICROBATCHES;
  }

  /** What one takes on a rank, on average. */
  get microbatch() {
    return this.opened ? this.opened.microbatch / Number(this.common.pp) : 1;
  }

  /** A file is chosen, or closed again. */
  #listenToFiles() {
    const input = byId("file");
    input.addEventListener("change", () => input.files.length && this.#open(input.files[0]));
    byId("opened").querySelector("button").addEventListener("click", () => {
      input.value = "";
      this.#use(null);
      this.update();
    });
  }

  async #open(file) {
    await this.#useAsked(() => open(file));
    if (this.opened) for (const one of this.shown) one.values = { ...one.values, "memory-limit": "" }; // of another unit
    this.update();
  }

  /** Use the costs that are asked for, or say why there are none. */
  async #useAsked(asked) {
    byId("wrong-file").textContent = "";
    try {
      this.#use(await asked());
    } catch (error) {
      this.#use(null);
      byId("wrong-file").textContent = error.message;
    }
  }

  #use(opened) {
    this.opened = opened;
    const unused = opened ? ["bandwidth", ...(opened.vocabulary ? ["S", "T"] : [])] : []; // the file has them
    for (const name of unused) this.common[name] = this.form.elements[name].value = "";
    this.common = { ...this.common, costs: opened?.costs ?? "" };
    byId("opened").hidden = !opened;
    byId("opened").querySelector("output").textContent = opened ? `${opened.name}, ${opened.stages} stages` : "";
    byId("unit").title = `of a rank's activations, in ${this.unit.name || "the file's unit"}`;
    byId("unit").textContent = this.opened ? `peak memory, ${this.unit.name || "file's unit"}` : "peak memory";
    for (const one of this.shown) one.chunks = one.least = undefined;
  }

  /** Show what the address says. */
  async restore() {
    const { common, cards } = parse(location.hash);
    clearTimeout(this.writing);
    this.common = this.sizes = common;
    await this.#useAsked(() => (common.costs ? known(common.costs) : null));
    for (const [name, value] of Object.entries(common)) if (this.form.elements[name]) this.form.elements[name].value = value;
    for (const one of this.shown) one.delete();
    this.shown = cards.map((values) => new Shown(this, values));
    this.update();
  }

  /** Show what has changed: in the address, too. */
  update() {
    clearTimeout(this.writing); // a browser slows down a page that writes its address all the time
    this.writing = setTimeout(() => this.#writeAddress(), PAUSE);
    const spreads = this.common["vocab-parallel"] !== "off";
    for (const name of ["F", "B", "W", "comm"]) this.form.elements[name].disabled = this.opened !== null;
    for (const name of ["S", "T"]) this.form.elements[name].disabled = !spreads || this.opened?.vocabulary;
    this.form.elements.bandwidth.disabled = this.common.offload === "off" || this.opened !== null;
    byId("sort").textContent = this.common.objective;
    this.#check();
    this.plans.stopAhead();
    clearTimeout(this.pause);
    // What is quick first: a browser asks for six at a time.
    const searches = (one) => Number(one.family?.searches ?? true);
    const all = [this.#askStock(), ...[...this.shown].sort((a, b) => searches(a) - searches(b)).map((one) => one.update())];
    this.draw();
    Promise.all(all).then(() => {
      clearTimeout(this.pause);
      if (!this.wrong && !document.hidden) this.pause = setTimeout(() => this.#planAhead(), PAUSE);
    });
  }

  change(one, changes) {
    one.values = { ...one.values, ...changes };
    if ("schedule" in changes) Object.assign(one, { chunks: undefined, least: undefined, values: { ...one.values, group: "" } });
    this.update();
  }

  #append(values) {
    const one = new Shown(this, values);
    this.shown.push(one);
    this.update();
    return one;
  }

  /** Show a schedule beside the others; go to it, if it is there already. */
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

  /** The shortest first; those without a plan last. */
  #sort() {
    const place = (one) => this.places.get(one) ?? Infinity;
    this.shown.sort((a, b) => place(a) - place(b) || 0);
    for (const one of this.shown) {
      one.row.moveLast();
      one.curves.moveLast();
    }
    this.update();
  }

  /** Timelines, points, and the rows, which are held against each other and against stock; curves draw themselves. */
  draw() {
    const planned = this.shown.filter((one) => one.plan).sort((a, b) => measures(a.plan).value - measures(b.plan).value);
    this.places = new Map(planned.map((one, at) => [one, at + 1]));
    const [plain, ...interleaved] = this.wrong ? [] : this.#stockFlags().map((given) => this.plans.known(given)?.plan);
    const shortest = interleaved.filter(Boolean).sort((a, b) => measures(a).value - measures(b).value)[0];
    this.stock = { plain, interleaved: shortest, unit: this.unit };
    for (const one of this.shown) if (one.flags) one.drawRow();
    const panels = this.shown.map((one) => one.panel).filter(Boolean);
    byId("timelines").hidden = panels.length === 0;
    this.timelines.setPanels(panels);
    const peak = plain ? measures(plain).memory : 0;
    const top = Math.max(peak, ...this.shown.map((one) => one.curves.most)) || 1;
    for (const one of this.shown) one.curves.scale(top, peak);
    byId("stock").textContent = peak ? `; dashed: 1F1B's peak, ${this.unit.amount(peak)}` : "";
    this.#drawParetoSoon();
    this.#report();
  }

  /** Say how far it is; `ahead`: what is planned in advance, "" where nothing is left. */
  #report(ahead) {
    const busy = this.shown.filter((one) => one.busy).length;
    const refused = this.shown.filter((one) => one.answer && !one.plan).length;
    const doing = busy ? `planning ${busy} of ${this.shown.length}` : "";
    this.#count(!this.wrong && doing !== "");
    if (this.wrong) return this.#tell("correct the fields that are marked");
    if (doing) return this.#tell(doing);
    const not = refused ? `${refused} of ${this.shown.length} not possible` : "";
    this.#tell([not, ahead].filter(Boolean).join("; ") || (ahead === "" ? "all planned" : ""));
  }

  /** Count the seconds beside the message for as long as something is being done. */
  #count(works) {
    if (works && this.counting) return;
    clearInterval(this.counting);
    byId("elapsed").textContent = "";
    const began = Date.now();
    const tick = () => (byId("elapsed").textContent = `${Math.round((Date.now() - began) / 1000)} s`);
    this.counting = works ? setInterval(tick, 1000) : undefined;
  }

  #tell(text) {
    if (byId("message").textContent !== text) byId("message").textContent = text;
  }

  #typed() {
    const typed = (name) => this.form.elements[name]?.value.trim() ?? this.common[name];
    this.common = Object.fromEntries(Object.keys(this.common).map((name) => [name, typed(name)]));
    this.#rescale();
    this.update();
  }

  /** Have limits mean what they meant before the ranks or the microbatches became others; schedules have groups for their ranks. */
  #rescale() {
    const { pp, microbatches } = this.common;
    if (Object.keys(check({ pp, microbatches }, this.most)).length || (pp === this.sizes.pp && microbatches === this.sizes.microbatches)) return;
    for (const one of this.shown) {
      const limit = this.opened ? one.values["memory-limit"] : rescaled(one.values["memory-limit"], this.sizes, this.common);
      one.values = { ...one.values, "memory-limit": limit, group: pp === this.sizes.pp ? one.values.group : "" };
    }
    this.sizes = { pp, microbatches };
  }

  /** Mark the fields of the form that are wrong; as long as there are any, nothing is planned. */
  #check() {
    const used = ([name]) => this.form.elements[name] && !this.form.elements[name].disabled;
    const wrong = check(Object.fromEntries(Object.entries(this.common).filter(used)), this.most);
    const before = this.wrong;
    this.wrong = Object.keys(wrong).length > 0;
    for (const name of Object.keys(this.common).filter((one) => this.form.elements[one])) {
      const said = byId(`wrong-${name}`);
      if (said.textContent !== (wrong[name] ?? "")) said.textContent = wrong[name] ?? "";
      mark(this.form.elements[name], wrong[name], said.id);
    }
    if (before && !this.wrong) for (const one of this.shown) one.wanted = undefined; // ask again
  }

  #stockFlags() {
    return stock(this.common, this.most.chunks);
  }

  /** Plan what all schedules are held against. */
  async #askStock() {
    this.askingStock?.abort();
    const { signal } = (this.askingStock = new AbortController());
    if (this.wrong) return;
    const missing = this.#stockFlags().filter((given) => !this.plans.known(given));
    if (!missing.length) return;
    try {
      await Promise.all(missing.map((given) => this.plans.ask(given, signal)));
      this.draw();
    } catch (error) {
      if (!signal.aborted) throw error;
    }
  }

  /**
   * Ask for the schedules of mpipe compare, the quick ones first, for the front; then for every limit that a line can be dragged to,
   * the nearest first; all of it for a time.
   */
  async #planAhead() {
    const until = Date.now() + AHEAD;
    const all = (await this.#candidates()).map((one) => flags(this.common, card(one)));
    byId("planned").textContent = "what is planned so far at these costs";
    const others = (left) => this.#report(`planning ahead: ${left} more schedules`);
    const missing = await this.plans.askAhead(all, until, others);
    if (missing === null) return;
    const not = missing ? `; ${missing} take long and are not planned: mpipe compare has them` : "";
    byId("planned").textContent = `the ${all.length} schedules of mpipe compare and auto, all chunks${not}`;
    for (const one of this.shown) {
      if (one.values.schedule === this.auto || !one.plan) continue;
      const now = this.unit.read(one.values["memory-limit"]) || one.plan.memory_limit || one.limits().at(-1);
      const near = [...one.limits()].sort((a, b) => Math.abs(a - now) - Math.abs(b - now));
      const wanted = near.map((to) => flags(this.common, { ...one.values, "memory-limit": this.unit.write(to) }));
      const limits = (left) => this.#report(`planning ahead: ${left} more limits of ${label(one.values)}`);
      if ((await this.plans.askAhead(wanted, until, limits)) === null) return;
    }
    this.#report("");
  }

  async #candidates() {
    const sizes = new URLSearchParams({ pp: this.common.pp, microbatches: this.common.microbatches }).toString();
    if (this.listed?.sizes !== sizes) {
      const response = await fetch(`/api/candidates?${sizes}`).catch(() => null);
      if (!response?.ok) return [];
      this.listed = { sizes, all: await response.json() };
    }
    return this.listed.all;
  }

  #drawParetoSoon() {
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = undefined;
      const points = this.wrong ? [] : this.#points();
      byId("front").hidden = !points.length && !this.shown.some((one) => one.busy); // kept for what is being planned
      this.pareto.show(points, this.unit.name);
    });
  }

  /** All plans at the costs that are shown; those at the same place share a point, which goes by the shortest name. */
  #points() {
    const same = ({ schedule, chunks, group, "memory-limit": limit, ...rest }) => JSON.stringify(rest);
    const now = same(flags(this.common, card()));
    const shown = new Set(this.shown.map((one) => JSON.stringify(one.values)));
    const places = new Map();
    for (const { flags: given, plan } of this.plans.all()) {
      if (!plan || same(given) !== now) continue;
      const own = this.families.find((family) => family.name === given.schedule)?.chunks;
      const chunks = given.chunks === String(own) ? "" : (given.chunks ?? "");
      const values = card({ schedule: given.schedule, chunks, group: given.group ?? "", "memory-limit": given["memory-limit"] ?? "" });
      const { value, bubble, ...held } = measures(plan);
      const memory = held.memory / this.unit.size;
      const place = `${bubble.toFixed(9)} ${memory.toFixed(9)}`;
      if (!places.has(place)) places.set(place, { value, bubble, memory, shown: false, names: new Map() });
      const point = places.get(place);
      point.shown ||= shown.has(JSON.stringify(values));
      const name = label({ ...values, "memory-limit": "" }, plan);
      const before = point.names.get(name);
      if (!before || label(values).length < label(before.values).length) point.names.set(name, { values, label: label(values, plan) });
    }
    return [...places.values()].map(({ names, value, bubble, memory, shown }) => {
      const all = [...names.values()].sort((a, b) => a.label.length - b.label.length);
      const { plain } = this.stock;
      const most = plain && measures(plain).memory / this.unit.size;
      const [faster, held] = plain ? [measures(plain).value / value, memory / most] : [];
      const over = plain ? `, × ${faster.toFixed(2)} over 1F1B with ${Math.round(100 * held)} % of its memory` : "";
      const caption = `${all.map((one) => one.label).join(", ")}: ${this.common.objective} ${Number(value.toPrecision(5))}${over}; bubble ${(100 * bubble).toFixed(1)} %, memory ${Number(memory.toPrecision(4))}`;
      const [{ values, label: name }] = all;
      return { name, caption, bubble, memory, shown, first: !values["memory-limit"], card: values };
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
await window.playground.restore();
