// Bubble against memory of all plans at the same costs, to choose from, and the front: the least bubble at every amount of memory.
/* global byId, roundStep */

const HEIGHT = 270; // CSS pixels
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 16, 12, 40];
const WIDEST = 0.4; // a bubble; larger ones would press all others together
const HINT = "blue: none that holds as little has a smaller bubble; ringed: in the table below; point at one for its name";
const REACH = 11; // around a point, for fingers; less where another is near

/** The points that no other beats, by memory; as plots.py's pareto. */
export function frontier(points) {
  const best = [];
  for (const point of [...points].sort((a, b) => a.memory - b.memory || a.bubble - b.bubble)) {
    if (!best.length || point.bubble < best.at(-1).bubble) best.push(point);
  }
  return best;
}

export class Pareto {
  #current = 0; // which point the tab key reaches

  /** `chosen(point)` is called with the point that was chosen. */
  constructor(figure, chosen) {
    this.figure = figure;
    this.chosen = chosen;
    this.caption = document.createElement("figcaption");
    this.caption.setAttribute("aria-live", "polite");
    this.caption.textContent = HINT;
    this.pen = document.createElement("canvas").getContext("2d"); // which measures text
    this.all = [];
    new ResizeObserver(() => figure.clientWidth !== this.width && this.show(this.all)).observe(figure);
  }

  /**
   * Points: {name, caption, bubble, memory, shown, first, card}; `first`: those whose names have the first claim to room; `unit`: the
   * name of that of memory.
   */
  show(all, unit = this.unit) {
    Object.assign(this, { all, unit });
    const best = new Set(frontier(all));
    const points = all.filter((point) => point.bubble <= WIDEST || point.shown || best.has(point));
    byId("widest").textContent = points.length < all.length ? `; ${all.length - points.length} with bubbles above ${100 * WIDEST} % are left out` : "";
    if (!all.some((point) => point.caption === this.caption.textContent)) this.caption.textContent = HINT; // of what was here before
    this.width = Math.max(280, this.figure.clientWidth);
    const focused = this.figure.contains(document.activeElement);
    this.points = [...points].sort((a, b) => a.memory - b.memory || b.bubble - a.bubble);
    const most = 1.08 * Math.max(1e-9, ...points.map((point) => point.memory));
    const widest = 1.1 * Math.max(1e-9, ...points.map((point) => point.bubble));
    const x = (memory) => LEFT + (memory / most) * (this.width - LEFT - RIGHT);
    const y = (bubble) => HEIGHT - BOTTOM - (bubble / widest) * (HEIGHT - TOP - BOTTOM);
    const svg = make("svg", { width: this.width, height: HEIGHT, role: "group", "aria-label": "bubble against memory" });
    this.#axes(svg, most, widest, x, y);
    const front = [...best].map(({ memory, bubble }, i) => `${i ? `H${x(memory)}V` : `M${x(memory)} `}${y(bubble)}`);
    if (front.length) make("path", { class: "front", d: `${front.join("")}H${x(most)}` }, svg);
    const at = this.points.map((point) => [x(point.memory), y(point.bubble)]);
    const nearest = ([left, top]) => Math.min(...at.map(([x, y]) => Math.hypot(x - left, y - top) || Infinity));
    this.marks = this.points.map((point, i) => this.#mark(svg, point, best.has(point), at[i], Math.min(REACH, Math.max(5, nearest(at[i]) / 2))));
    this.#names(svg, best, x, y);
    this.figure.replaceChildren(svg, this.caption);
    this.#current = Math.min(this.#current, Math.max(0, this.marks.length - 1));
    this.marks[this.#current]?.setAttribute("tabindex", "0");
    if (focused) this.marks[this.#current]?.focus({ preventScroll: true });
  }

  #axes(svg, most, widest, x, y) {
    make("path", { class: "axis", d: `M${LEFT} ${TOP}V${y(0)}H${this.width - RIGHT}` }, svg);
    for (const tick of ticks(most)) make("text", { x: x(tick), y: y(0) + 15, "text-anchor": "middle", class: "faint" }, svg).textContent = tick;
    for (const tick of ticks(widest)) {
      const text = make("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end", class: "faint" }, svg);
      text.textContent = `${Number((100 * tick).toPrecision(3))} %`;
    }
    make("text", { x: LEFT, y: HEIGHT - 6 }, svg).textContent = `peak activation memory of a rank, in ${this.unit || "the file's unit"}`;
  }

  #mark(svg, point, best, [x, y], reach) {
    const classes = [best && "best", point.shown && "shown"].filter(Boolean).join(" ");
    const mark = make("g", { role: "button", tabindex: "-1", class: classes, "aria-label": point.caption }, svg);
    make("circle", { class: "reach", cx: x, cy: y, r: reach }, mark);
    make("circle", { cx: x, cy: y, r: best ? 5 : 4 }, mark);
    const tell = () => (this.caption.textContent = point.caption);
    mark.addEventListener("pointerenter", tell);
    mark.addEventListener("focus", () => {
      this.#current = this.points.indexOf(point);
      tell();
    });
    mark.addEventListener("click", () => this.chosen(point));
    mark.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
      if (event.key === "Enter" || event.key === " ") this.chosen(point);
      else if (event.key in steps) this.#go(this.points.indexOf(point) + steps[event.key]);
      else return;
      event.preventDefault();
    });
    return mark;
  }

  #go(index) {
    if (!this.marks[index]) return;
    this.marks[this.#current].setAttribute("tabindex", "-1");
    this.marks[index].setAttribute("tabindex", "0");
    this.marks[index].focus();
  }

  /** Names beside their points where there is room, that is on no point and on no other name: the schedules shown come first. */
  #names(svg, best, x, y) {
    const taken = this.points.map((point) => around(x(point.memory), y(point.bubble), 6, 6));
    const claim = (point) => [point.shown, point.first && best.has(point), point.first, best.has(point)].indexOf(true);
    const wanted = this.points.filter((point) => claim(point) >= 0).sort((a, b) => claim(a) - claim(b));
    this.pen.font = `11px ${getComputedStyle(this.figure).fontFamily}`;
    for (const point of wanted) {
      const [half, at] = [this.pen.measureText(point.name).width / 2 + 1, { x: x(point.memory), y: y(point.bubble) }];
      const box = [[8, 0], [-8, 0], [5, -13], [-5, -13], [5, 13], [-5, 13], [0, -13], [0, 13]] // beside it, above it, below it
        .map(([right, down]) => around(at.x + right + Math.sign(right) * half, at.y + down, half, 6))
        .find((one) => one.left > LEFT && one.right < this.width && one.top > 0 && !taken.some((other) => overlap(one, other)));
      if (!box) continue;
      taken.push(box);
      make("text", { class: "name", x: box.left + 1, y: box.bottom - 2 }, svg).textContent = point.name;
    }
  }
}

function around(x, y, width, height) {
  return { left: x - width, right: x + width, top: y - height, bottom: y + height };
}

function overlap(a, b) {
  return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}

function ticks(most) {
  const step = roundStep(most / 8);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => Number((i * step).toPrecision(6)));
}

function make(tag, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
}
