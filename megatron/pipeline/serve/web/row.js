// One row of the table: a schedule's inputs, the facts of its plan, its downloads, and below it a message or the command.
/* global element */

import { command } from "./state.js";
import { address } from "./plans.js";

const SUFFIXES = ["svg", "json", "csv"];
const short = (value) => String(Number(value.toPrecision(5)));
const share = (value) => `${(100 * value).toFixed(1).replace("-0.0", "0.0")} %`;
const FACTS = [
  (plan) => short(plan.span),
  (plan) => share(plan.objective === "makespan" ? plan.makespan_bubble_rate : plan.bubble_rate),
  (plan) => short(plan.makespan),
  (plan) => share(plan.objective === "makespan" ? plan.makespan_gap : plan.gap),
  (plan) => short(Math.max(...plan.peak_activation)),
  (plan) => `${plan.plan_seconds.toFixed(3)} s`,
];

export class Row {
  /** `changed(values)` is told what was typed, `removed()` that the schedule is to go. */
  constructor(table, names, changed, removed) {
    this.body = table;
    this.row = element("tr", "", table);
    const heading = element("th", "", this.row);
    heading.scope = "row";
    this.inputs = { schedule: element("select", "", heading) };
    for (const name of names) element("option", name, this.inputs.schedule);
    for (const name of ["chunks", "memory-limit"]) {
      this.inputs[name] = element("input", "", element("td", "", this.row));
      this.inputs[name].inputMode = "decimal";
      this.inputs[name].placeholder = "own";
    }
    for (const [name, input] of Object.entries(this.inputs)) {
      input.addEventListener(name === "schedule" ? "change" : "input", () => changed({ [name]: input.value.trim() }));
    }
    this.facts = FACTS.map(() => Object.assign(element("td", "", this.row), { className: "fact" }));
    const downloads = element("td", "", this.row);
    this.links = SUFFIXES.map((suffix) => Object.assign(element("a", suffix.toUpperCase(), downloads), { download: "" }));
    this.remove = element("button", "remove", element("td", "", this.row));
    this.remove.type = "button";
    this.remove.addEventListener("click", removed);
    this.below = element("tr", "", table);
    this.below.className = "message";
    this.cell = element("td", "", this.below);
    this.cell.colSpan = 11;
    this.message = element("span", "", this.cell);
    this.message.className = "refused";
    this.message.setAttribute("role", "alert");
    this.command = element("code", "", this.cell);
  }

  /** `number`: which of the schedules it is, from 1; `answer`: a plan, a refusal, or null while it is made. */
  show(number, card, flags, answer, busy) {
    const labels = { schedule: "schedule", chunks: "chunks per rank of schedule", "memory-limit": "memory limit of schedule" };
    for (const [name, input] of Object.entries(this.inputs)) {
      input.setAttribute("aria-label", `${labels[name]} ${number}`);
      if (input !== document.activeElement || input.value.trim() !== card[name]) input.value = card[name];
    }
    this.remove.setAttribute("aria-label", `remove schedule ${number}, ${card.schedule}`);
    this.row.setAttribute("aria-busy", busy);
    const plan = answer?.plan;
    this.facts.forEach((cell, index) => (cell.textContent = plan ? FACTS[index](plan) : busy && index === 0 ? "planning" : ""));
    this.links.forEach((link, index) => {
      link.hidden = !plan;
      link.href = address(flags, "." + SUFFIXES[index]);
      link.setAttribute("aria-label", `download schedule ${number} as ${SUFFIXES[index].toUpperCase()}`);
    });
    if (this.message.textContent !== (answer?.message ?? "")) this.message.textContent = answer?.message ?? "";
    this.command.textContent = answer?.message ? "" : command(flags);
  }

  delete() {
    this.row.remove();
    this.below.remove();
  }
}
