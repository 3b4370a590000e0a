// What every rank of one schedule holds over time, and the limit as a line to drag: a slider, by mouse, touch and keys.
/* global LABELS, RIGHT, plain, prepare, roundStep, theme */

import { MICROBATCHES } from "./costs.js";

const HEIGHT = 132; // CSS pixels
const TOP = 16;
const BOTTOM = 8;

export class MemoryCurves {
  /** `chosen(limit)` is called with the limit that was chosen, null for none. `chart`: whose time axis it has. */
  constructor(parent, chart, chosen) {
    this.chart = chart;
    this.chosen = chosen;
    this.box = document.createElement("div");
    this.box.className = "curves";
    this.canvas = this.box.appendChild(document.createElement("canvas"));
    this.slider = this.box.appendChild(document.createElement("div"));
    this.slider.setAttribute("role", "slider");
    this.slider.setAttribute("aria-orientation", "vertical");
    this.slider.tabIndex = 0;
    this.caption = this.slider.appendChild(document.createElement("span"));
    parent.append(this.box);
    this.limits = [];
    this.most = this.top = this.stock = 0;
    this.unit = MICROBATCHES;
    this.#listen();
  }

  /**
   * `limit`: what is drawn, null for none; `limits`: all that the line goes through; `panel`: null where there is no plan, and then
   * nothing is drawn but a line that is being moved; `unit`: of memory; `microbatch`: what one takes on a rank. `scale` draws it.
   */
  show(title, panel, limits, limit, unit, microbatch) {
    Object.assign(this, { title, panel, limits, limit, unit, microbatch });
    this.most = Math.max(limits.at(-1) ?? 0, panel?.peak ?? 0);
    const { slider } = this;
    this.box.hidden = !panel && slider !== document.activeElement;
    slider.hidden = limits.length === 0;
    slider.setAttribute("aria-label", `memory limit of ${title}`);
    slider.setAttribute("aria-valuemin", limits[0] ?? 0);
    slider.setAttribute("aria-valuemax", limits.at(-1) ?? 0);
    slider.setAttribute("aria-valuenow", limit ?? limits.at(-1) ?? 0);
    const text = limit === null ? "no limit" : `limit ${unit.amount(limit)}`;
    slider.setAttribute("aria-valuetext", text);
    this.caption.textContent = text;
  }

  /** Draw up to `top`, as all the others do, with a line at `stock`, the peak of stock's 1F1B. */
  scale(top, stock) {
    Object.assign(this, { top, stock });
    this.slider.style.top = this.#y(Math.min(this.limit ?? top, top)) + "px";
    this.paint();
  }

  /** Go below all others. */
  moveLast() {
    this.box.parentElement.append(this.box);
  }

  remove() {
    this.box.remove();
  }

  #y(held) {
    return TOP + (1 - held / this.top) * (HEIGHT - TOP - BOTTOM);
  }

  #listen() {
    const { slider } = this;
    const choose = (limit) => {
      this.limit = limit; // at once: the next key may come before the plan has
      this.chosen(limit);
    };
    slider.addEventListener("keydown", (event) => {
      const { limits } = this;
      const chunks = Math.max(1, Math.round(this.microbatch / (limits[1] - limits[0] || this.microbatch)));
      const steps = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: chunks, PageDown: -chunks };
      const ends = { Home: 0, End: limits.length - 1 };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Delete" || event.key === "Backspace") choose(null);
      else if (event.key in ends) choose(limits[ends[event.key]]);
      else if (event.key in steps) choose(this.#from(this.limit, steps[event.key]));
      else return;
      event.preventDefault();
    });
    slider.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      slider.setPointerCapture(event.pointerId);
      slider.focus();
      event.preventDefault();
    });
    slider.addEventListener("pointermove", (event) => {
      if (!slider.hasPointerCapture(event.pointerId)) return;
      const y = event.clientY - this.box.getBoundingClientRect().top;
      const held = (1 - (y - TOP) / (HEIGHT - TOP - BOTTOM)) * this.top;
      const nearest = this.limits.reduce((best, one) => (Math.abs(one - held) < Math.abs(best - held) ? one : best));
      if (nearest !== this.limit) choose(nearest);
    });
  }

  /** The limit a number of places away from a value, which need not be a limit itself. */
  #from(limit, steps) {
    const { limits } = this;
    const above = limits.findIndex((one) => one >= (limit ?? Infinity) - 1e-9);
    const at = above < 0 ? limits.length - (limit === null ? 1 : 0) : above;
    const between = above >= 0 && limits[above] > limit + 1e-9 && steps > 0 ? 1 : 0; // the next one up is a step already
    return limits[Math.max(0, Math.min(limits.length - 1, at + steps - between))];
  }

  /** Draw the part of the time that the timelines show. */
  paint() {
    const { chart, panel, top, stock } = this;
    const width = chart.width;
    const colours = theme();
    const pen = prepare(this.canvas, width, HEIGHT);
    const right = Math.max(LABELS + 10, width - RIGHT);
    pen.fillStyle = colours.paper;
    pen.fillRect(0, 0, width, HEIGHT);
    pen.fillStyle = colours.idle;
    pen.fillRect(LABELS, TOP, right - LABELS, HEIGHT - TOP - BOTTOM);
    pen.font = "bold 12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.fillStyle = colours.ink;
    pen.fillText(this.title, LABELS, TOP / 2, right - LABELS);
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    const most = top / this.unit.size;
    const step = Math.max(1, roundStep(most / 6));
    for (let count = 0; count <= most; count += step) {
      const tick = count * this.unit.size;
      pen.fillStyle = colours.faint;
      if (!stock || Math.abs(this.#y(tick) - this.#y(stock)) > 11) pen.fillText(plain(count), LABELS - 6, this.#y(tick));
      pen.fillStyle = colours.line;
      pen.fillRect(LABELS, this.#y(tick), right - LABELS, 1);
    }
    if (stock) {
      pen.fillStyle = pen.strokeStyle = colours.ink;
      pen.fillText("1F1B", LABELS - 6, this.#y(stock));
      pen.setLineDash([6, 4]);
      pen.beginPath();
      pen.moveTo(LABELS, this.#y(stock));
      pen.lineTo(right, this.#y(stock));
      pen.stroke();
      pen.setLineDash([]);
    }
    if (!panel?.changes) return;
    pen.save();
    pen.beginPath();
    pen.rect(LABELS, 0, right - LABELS, HEIGHT);
    pen.clip();
    for (let rank = panel.ranks - 1; rank >= 0; rank--) {
      pen.strokeStyle = hue(rank, panel.ranks, colours);
      pen.beginPath();
      this.#trace(pen, rank);
      pen.stroke();
    }
    pen.restore();
  }

  #trace(pen, rank) {
    const { chart, panel } = this;
    let i = panel.after(rank, chart.from);
    let held = i > panel.first[rank] ? panel.held[i - 1] : 0;
    pen.moveTo(LABELS, this.#y(held));
    for (; i < panel.first[rank + 1] && panel.changeTime(i) <= chart.to; i++) {
      const x = chart.x(panel.changeTime(i));
      pen.lineTo(x, this.#y(held));
      held = panel.held[i];
      pen.lineTo(x, this.#y(held));
    }
    pen.lineTo(chart.x(Math.min(chart.to, panel.makespan)), this.#y(held));
  }
}

/** From the first rank's colour to the last one's, both readable on light and dark. */
function hue(rank, ranks, { accent, held }) {
  if (rank === 0) return accent;
  if (rank === ranks - 1) return "#D55E00";
  return held;
}
