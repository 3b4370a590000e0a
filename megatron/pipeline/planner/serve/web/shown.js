// A schedule on the page: asked for, and shown by a row of the table, a panel of the timelines, and curves of memory.
/* global Panel, byId */

import { check } from "./fields.js";
import { MemoryCurves } from "./memory.js";
import { Row } from "./row.js";
import { flags, label, limits } from "./state.js";

/** Its values, what shows them, and the answer that is shown. */
export class Shown {
  constructor(page, values) {
    this.page = page;
    this.values = values;
    const change = (changes) => page.change(this, changes);
    this.row = new Row(byId("cards"), page.names, change, () => page.remove(this));
    const choose = (limit) => change({ "memory-limit": limit === null ? "" : page.unit.write(limit) });
    this.curves = new MemoryCurves(byId("curves"), page.timelines.chart, choose);
    this.asking = new AbortController();
  }

  get family() {
    return this.page.families.find((one) => one.name === this.values.schedule);
  }

  get plan() {
    return this.answer?.plan;
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
    const [[field, message] = []] = Object.entries(check(this.values, page.most));
    if (message || page.wrong) return this.#take(message && { field, message }, null);
    const { signal } = this.asking;
    this.busy = !page.plans.known(wanted);
    if (this.busy && this.answer?.flags?.schedule !== wanted.schedule) this.answer = this.panel = undefined; // of another name
    if (this.busy) this.draw();
    try {
      const show = async (answer, busy) => {
        const panel = answer.plan ? await Panel.read({ ...answer.panel, title: label(this.values, answer.plan) }, page.kinds) : null;
        if (!signal.aborted) this.#take(answer, panel, busy);
      };
      const first = this.busy && (this.family?.searches ?? true) && (await page.plans.first(wanted, signal));
      if (first) await show(first, true);
      await show(await page.plans.ask(wanted, signal), false);
    } catch (error) {
      if (!signal.aborted) throw error;
    }
  }

  /** `busy`: whether a better answer is on its way. */
  #take(answer, panel, busy = false) {
    Object.assign(this, { answer, panel, busy });
    if (answer?.plan) this.chunks = answer.plan.chunks;
    if (answer?.flags) this.least = answer.least;
    this.draw();
    this.page.draw();
    if (!busy) this.drawn = this.wanted; // for who measures how long that takes
  }

  draw() {
    this.drawRow();
    const typed = this.page.unit.read(this.values["memory-limit"]);
    const own = this.plan?.memory_limit ?? null;
    const limit = typed >= 0 ? typed : own;
    this.curves.show(this.panel?.title ?? label(this.values, this.plan), this.panel, this.limits(), limit, this.page.unit, this.page.microbatch);
  }

  drawRow() {
    const { values, flags, answer, busy, page } = this;
    const number = page.shown.indexOf(this) + 1;
    const { stock, opened } = page;
    this.row.show({ number, place: page.places.get(this), values, flags, file: opened?.name, stock, answer, busy });
  }

  /** The limits to choose from; none where all make the same schedule. */
  limits() {
    const { family, page } = this;
    if (family && !family.uses_limits && page.common.offload === "off") return [];
    const chunks = Number(this.values.chunks) || family?.chunks || this.chunks || 1;
    return limits(page.common, chunks, this.least, page.unit, page.microbatch);
  }

  delete() {
    this.asking.abort();
    this.row.delete();
    this.curves.remove();
  }
}
