// One row of the table: a schedule's inputs and the facts of its plan; below them a message, or how to get the plan elsewhere.
/* global element */

import { culprit, mark } from "./fields.js";
import { address } from "./plans.js";
import { chosen, command, measures } from "./state.js";

const SUFFIXES = ["svg", "json", "csv"];
const short = (value) => String(Number(value.toPrecision(5)));
const share = (value) => `${(100 * value).toFixed(1).replace("-0.0", "0.0")} %`;
const faster = (plan, than) => (than ? `× ${(measures(than).value / measures(plan).value).toFixed(2)}` : "–");

// In the order of the columns: how a plan is written, followed by stock's plans.
const FACTS = [
  (plan) => short(measures(plan).value),
  (plan, { plain }) => faster(plan, plain),
  (plan, { interleaved }) => faster(plan, interleaved),
  (plan) => share(measures(plan).bubble),
  (plan) => share(measures(plan).gap),
  (plan, { unit }) => unit.number(measures(plan).memory),
  (plan, { plain }) => (plain ? `${Math.round((100 * measures(plan).memory) / measures(plain).memory)} %` : "–"),
];
const OVER_INTERLEAVED = 2;

export class Row {
  /** `changed(values)` is called with what was typed, `removed()` where the schedule is to go. */
  constructor(table, names, changed, removed) {
    this.body = table;
    this.row = element("tr", "", table);
    this.place = element("td", "", this.row);
    this.place.className = "place";
    const heading = element("th", "", this.row);
    heading.scope = "row";
    this.inputs = { schedule: element("select", "", heading) };
    this.chosen = element("span", "", heading);
    for (const name of names) element("option", name, this.inputs.schedule);
    for (const name of ["chunks", "memory-limit"]) {
      this.inputs[name] = element("input", "", element("td", "", this.row));
      this.inputs[name].inputMode = "decimal";
      this.inputs[name].placeholder = "default";
    }
    for (const [name, input] of Object.entries(this.inputs)) {
      input.addEventListener(name === "schedule" ? "change" : "input", () => changed({ [name]: input.value.trim() }));
    }
    this.facts = FACTS.map(() => Object.assign(element("td", "", this.row), { className: "fact" }));
    this.remove = element("button", "×", element("td", "", this.row));
    this.remove.type = "button";
    this.remove.addEventListener("click", removed);
    this.below = element("tr", "", table);
    this.below.className = "message";
    const cell = element("td", "", this.below);
    cell.colSpan = 4 + FACTS.length + 1;
    this.message = element("span", "", cell);
    this.message.className = "refused";
    this.message.id = `refused-${++Row.#count}`;
    this.message.setAttribute("role", "alert");
    this.why = Object.assign(element("details", "", cell), { className: "why", hidden: true });
    this.elsewhere = Object.assign(element("div", "", cell), { className: "elsewhere" });
    this.links = SUFFIXES.map((suffix) => Object.assign(element("a", suffix.toUpperCase(), this.elsewhere), { download: "" }));
    const folded = element("details", "", this.elsewhere); // its length changes with the limit
    element("summary", "command", folded);
    this.command = element("code", "", folded);
    this.heads = table.parentElement.tHead.rows[0].cells;
  }

  static #count = 0;

  /**
   * `number`: which of the schedules it is, from 1; `place`: which of them by time, from 1, or 0; `stock`: the plans that it is held
   * against, with the unit of memory; `file`: the name of the costs file, if there is one; `answer`: a plan, a refusal, or undefined where there is none; `busy`: whether another is being made.
   */
  show({ number, place, values, flags, file, stock, answer, busy }) {
    const labels = { schedule: "schedule", chunks: "chunks per rank of schedule", "memory-limit": "memory limit of schedule" };
    const plan = answer?.plan;
    const message = answer?.message ?? "";
    const wrong = message && (answer.field ?? culprit(answer));
    for (const [name, input] of Object.entries(this.inputs)) {
      input.setAttribute("aria-label", `${labels[name]} ${number}`);
      if (input !== document.activeElement || input.value.trim() !== values[name]) input.value = values[name];
      mark(input, wrong === name, this.message.id);
    }
    [...this.heads].forEach((head, at) => (this.row.cells[at].dataset.head = head.textContent)); // for narrow windows
    this.place.textContent = place || "";
    this.place.title = place ? `number ${place} by time` : "";
    this.remove.setAttribute("aria-label", `remove schedule ${number}, ${values.schedule}`);
    this.remove.title = "remove";
    this.row.setAttribute("aria-busy", busy);
    this.facts.forEach((cell, at) => (cell.textContent = plan ? FACTS[at](plan, stock) : busy && at === 0 ? "planning" : ""));
    this.facts[OVER_INTERLEAVED].title = stock.interleaved
      ? `stock's interleaved is shortest with v=${stock.interleaved.chunks}: ${short(measures(stock.interleaved).value)}`
      : "stock interleaves only where the microbatches are a multiple of the ranks";
    this.links.forEach((link, at) => {
      link.href = address(flags, "." + SUFFIXES[at]);
      link.setAttribute("aria-label", `download schedule ${number} as ${SUFFIXES[at].toUpperCase()}`);
    });
    this.elsewhere.hidden = !plan && !busy;
    if (this.message.textContent !== message) this.message.textContent = message;
    this.command.textContent = command(flags, file);
    this.#choice(plan, stock.unit, values.group && `g=${values.group}`);
  }

  /** What auto chose, and why not the others; `group`: of a schedule with groups, in words. */
  #choice(plan, unit, group) {
    if (plan === this.plan) return;
    this.plan = plan;
    const all = plan?.candidates;
    this.chosen.textContent = all ? chosen(plan) : group;
    this.why.hidden = !all;
    this.why.replaceChildren();
    if (!all) return;
    element("summary", `auto chose ${chosen(plan)}: why not the ${all.length - 1} others`, this.why);
    const table = element("table", "", this.why);
    const heads = element("tr", "", element("thead", "", table));
    for (const head of ["schedule", plan.objective, "bubble", "memory", "gap to lower bound", "why not"]) {
      element("th", head, heads).scope = "col";
    }
    const body = element("tbody", "", table);
    const value = (one) => one[plan.objective] ?? Infinity;
    for (const one of [...all].sort((a, b) => value(a) - value(b))) {
      const row = element("tr", "", body);
      element("th", one.label, row).scope = "row";
      const measured = one.peak_activation && measures({ ...one, objective: plan.objective });
      const facts = measured ? [short(measured.value), share(measured.bubble), unit.number(measured.memory), share(measured.gap)] : ["–", "–", "–", "–"];
      for (const fact of [...facts, one.why_not ?? "chosen"]) element("td", fact, row);
    }
  }

  /** Go to the end of the table. */
  moveLast() {
    this.body.append(this.row, this.below);
  }

  delete() {
    this.row.remove();
    this.below.remove();
  }
}
