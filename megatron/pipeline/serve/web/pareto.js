// Bubble against memory of all plans at the same costs, and the front: the least bubble at every amount of memory.

const [WIDTH, HEIGHT] = [640, 300];
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 16, 12, 40];
const WIDEST = 0.4; // a bubble; larger ones would press all others together

/** The points that no other beats, by memory; as pareto.py's frontier. */
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
  }

  /** Points: {title, bubble, memory, shown, card}. */
  show(all) {
    const points = all.filter((point) => point.bubble <= WIDEST || point.shown);
    const focused = this.figure.contains(document.activeElement);
    const best = new Set(frontier(points));
    this.points = [...points].sort((a, b) => a.memory - b.memory || b.bubble - a.bubble);
    const most = 1.08 * Math.max(1e-9, ...points.map((point) => point.memory));
    const widest = 1.1 * Math.max(1e-9, ...points.map((point) => point.bubble));
    const x = (memory) => LEFT + (memory / most) * (WIDTH - LEFT - RIGHT);
    const y = (bubble) => HEIGHT - BOTTOM - (bubble / widest) * (HEIGHT - TOP - BOTTOM);
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, role: "group", "aria-label": "bubble against memory" });
    this.#axes(svg, most, widest, x, y);
    const front = [...best].map(({ memory, bubble }, i) => `${i ? `H${x(memory)}V` : `M${x(memory)} `}${y(bubble)}`);
    if (front.length) make("path", { class: "front", d: `${front.join("")}H${x(most)}` }, svg);
    this.marks = this.points.map((point) => this.#mark(svg, point, best.has(point), x(point.memory), y(point.bubble)));
    this.#label(svg, [...best], x, y);
    this.figure.replaceChildren(svg, this.caption);
    this.#current = Math.min(this.#current, Math.max(0, this.marks.length - 1));
    this.marks[this.#current]?.setAttribute("tabindex", "0");
    if (focused) this.marks[this.#current]?.focus();
  }

  #axes(svg, most, widest, x, y) {
    make("path", { class: "axis", d: `M${LEFT} ${TOP}V${y(0)}H${WIDTH - RIGHT}` }, svg);
    for (const tick of ticks(most)) make("text", { x: x(tick), y: y(0) + 15, "text-anchor": "middle", class: "faint" }, svg).textContent = tick;
    for (const tick of ticks(widest)) {
      const text = make("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end", class: "faint" }, svg);
      text.textContent = `${Number((100 * tick).toPrecision(3))} %`;
    }
    make("text", { x: LEFT, y: HEIGHT - 6 }, svg).textContent = "peak activation memory of a rank, in microbatches";
  }

  #mark(svg, point, best, x, y) {
    const classes = [best && "best", point.shown && "shown"].filter(Boolean).join(" ");
    const told = `${point.title}: bubble ${(100 * point.bubble).toFixed(1)} %, memory ${Number(point.memory.toPrecision(4))}`;
    const mark = make("g", { role: "button", tabindex: "-1", class: classes, "aria-label": told }, svg);
    make("circle", { cx: x, cy: y, r: best ? 5 : 4 }, mark);
    make("title", {}, mark).textContent = told;
    const tell = () => (this.caption.textContent = told);
    mark.addEventListener("pointerenter", tell);
    mark.addEventListener("focus", tell);
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
    this.#current = index;
    this.marks[index].setAttribute("tabindex", "0");
    this.marks[index].focus();
  }

  /** Names along the front, where there is room. */
  #label(svg, best, x, y) {
    let free = LEFT;
    for (const point of best) {
      const left = x(point.memory) + 7;
      if (left < free || left + 6 * point.title.length > WIDTH) continue;
      make("text", { x: left, y: y(point.bubble) - 6 }, svg).textContent = point.title;
      free = left + 6.2 * point.title.length;
    }
  }
}

function ticks(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  const step = [0.1, 0.2, 0.5, 1, 2].map((part) => part * power).find((one) => most / one <= 8);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => Number((i * step).toPrecision(6)));
}

function make(tag, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
}
