// Timelines that can be moved, zoomed and pointed at, by mouse, touch and keys. All drawing waits for the next frame, so that
// events are cheap. The elements that it fills are named in page.html.

function byId(id) {
  return document.getElementById(id);
}

function element(tag, text, parent) {
  const made = document.createElement(tag);
  made.textContent = text;
  parent.append(made);
  return made;
}

/** `memory`: how much the highest bar of memory stands for, as text; empty where there are no bars. */
function fillLegend(kinds, panels, lightest, memory) {
  const legend = byId("legend");
  legend.replaceChildren();
  const add = (colour, text) => {
    const item = element("li", "", legend);
    const box = element("i", "", item);
    box.style.background = colour;
    item.append(text);
    return box;
  };
  kinds.forEach((kind, index) => {
    if (panels.some((panel) => panel.kinds.includes(index))) add(kind.colour, `${kind.name} ${kind.meaning}`);
  });
  const chunks = Math.max(0, ...panels.map((panel) => panel.chunkCount));
  for (let chunk = 0; chunks > 1 && chunk < chunks; chunk++) {
    const box = add(shade("#777777", chunk, chunks, lightest), `chunk ${chunk}`);
    const line = 100 * (1 - level(chunk, chunks));
    if (line < 100) box.style.backgroundImage = `linear-gradient(transparent ${line}%, ${INK} ${line}% calc(${line}% + 1px), transparent 0)`;
  }
  add("var(--idle)", "idle");
  if (memory) add("var(--held)", `memory of a rank, the highest bar ${memory}`);
  element("li", "", legend).id = "density";
}

/** What is known about a pass, or a copy on its lane (`table`), as lines. */
function describe(panel, rank, i, kinds, table = panel) {
  const { starts, ends, chunks, changes } = table;
  const stage = panel.stages && table === panel ? `, stage ${panel.stages[rank][chunks[i]]}` : "";
  const lines = [
    `${panel.name(i, table)}: ${kinds[table.kinds[i]].meaning} of microbatch ${panel.number(i, table)}`,
    `rank ${rank}, chunk ${chunks[i]}${stage}`,
    `start ${plain(starts[i])}, end ${plain(ends[i])}, duration ${plain(ends[i] - starts[i])}`,
  ];
  if (changes) {
    const [before, after] = [panel.held[i] - changes[i], panel.held[i]];
    lines.push(`memory ${plain(Math.max(before, after))} during it, ${plain(after)} after it`);
  }
  return lines;
}

/** The panels of a chart in the element #scroller, with their overview, legend, tip, status and tools. */
class Timelines {
  #waiting = false;

  /**
   * `fills`: whether the chart has all the room that the window leaves, and scrolls in it; else it is as high as its panels, whose
   * rows fit the window until another height is chosen, and the window scrolls.
   * `keys`: the element that listens to keys; `amount`: how memory is written.
   */
  constructor({ kinds, lightest, amount = plain, fills = true, keys = document }) {
    this.kinds = kinds;
    this.lightest = lightest;
    this.amount = amount;
    this.fills = fills;
    this.fitsRows = !fills;
    this.scroller = byId("scroller");
    this.canvas = byId("chart");
    this.tip = byId("tip");
    this.chart = new Chart(this.canvas, kinds, lightest);
    this.overview = new Overview(byId("overview"), this.chart);
    this.painted = () => {}; // called after every painting
    this.#listen(keys);
  }

  /** Show other panels. */
  setPanels(panels) {
    this.chart.setPanels(panels);
    this.#fillLegend();
    byId("memory").hidden = this.chart.peak === 0;
    this.#leave();
    this.layout();
  }

  #fillLegend() {
    const { kinds, lightest, chart, amount } = this;
    fillLegend(kinds, chart.panels, lightest, chart.showMemory && chart.peak > 0 ? amount(chart.peak) : "");
  }

  /** The boxes' height at which all panels fit into the window's part, or into the window. */
  fitRows() {
    if (!this.fills) return this.chart.fitRows(window.innerHeight - this.overview.height - 1, 2, 15);
    this.layout(); // the overview takes its height first
    this.chart.fitRows(this.scroller.clientHeight, 9, 26);
    this.layout();
  }

  repaint() {
    if (this.#waiting) return;
    this.#waiting = true;
    requestAnimationFrame(() => {
      this.#waiting = false;
      if (!this.chart.width) return; // hidden
      this.chart.scroll = this.canvas.getBoundingClientRect().top - byId("content").getBoundingClientRect().top;
      this.chart.paint();
      this.overview.paint();
      byId("density").textContent = this.chart.crowded ? "columns: share of time, blank is idle; zoom in for passes" : "";
      this.painted();
    });
  }

  layout() {
    const { chart, scroller } = this;
    if (this.fitsRows) this.fitRows();
    const height = chart.place();
    byId("content").style.height = (this.fills ? Math.max(height, scroller.clientHeight) : height) + "px";
    chart.resize(scroller.clientWidth, this.fills ? scroller.clientHeight : Math.min(height, window.innerHeight));
    this.overview.layout(scroller.offsetWidth);
    this.repaint();
  }

  #setRows(height) {
    this.fitsRows = false;
    this.chart.boxHeight = Math.max(2, Math.min(60, Math.round(height)));
    this.layout();
    this.#leave();
  }

  #zoom(factor, x = (LABELS + this.chart.right) / 2) {
    this.chart.zoom(factor, x);
    this.#leave();
  }

  /** Move what is shown by pixels. */
  #move(x, y) {
    const { chart } = this;
    chart.show(chart.from - x / chart.scale, chart.to - x / chart.scale);
    (this.fills ? this.scroller : document.scrollingElement).scrollTop -= y;
    this.#leave();
  }

  #toggleMemory() {
    this.chart.showMemory = !this.chart.showMemory && this.chart.peak > 0;
    byId("memory").setAttribute("aria-pressed", this.chart.showMemory);
    this.#fillLegend();
    this.layout();
  }

  #select(panel, pass) {
    const { chart } = this;
    if (pass < 0) {
      chart.selected = null;
      byId("status").textContent = "";
    } else {
      chart.select(panel, pass);
      const { rank, links } = chart.selected;
      const whose = (i) => `${panel.name(i)} of rank ${panel.rankOf(i)}`;
      const names = (side, other) => links.filter((link) => link[side] === pass).map((link) => whose(link[other]));
      const needs = names("needing", "needed").join(", ") || "nothing";
      const feeds = names("needed", "needing").join(", ") || "nothing";
      const lines = describe(panel, rank, pass, this.kinds);
      if (panel.stages) lines.push(`needs ${needs}`, `needed by ${feeds}`);
      byId("status").textContent = lines.join("; ");
    }
    this.repaint();
  }

  /** Select the pass that many places further on the same rank, and bring it into view. */
  #step(by) {
    const { chart } = this;
    if (!chart.selected) return;
    const { panel, rank, pass } = chart.selected;
    const next = Math.max(panel.first[rank], Math.min(panel.first[rank + 1] - 1, pass + by));
    const length = chart.to - chart.from;
    if (panel.starts[next] < chart.from || panel.ends[next] > chart.to) {
      chart.show(panel.starts[next] - length / 2, panel.starts[next] + length / 2);
    }
    this.#select(panel, next);
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  #hover(event) {
    const { tip } = this;
    const { x, y } = this.#point(event);
    const found = this.chart.hit(x, y);
    this.chart.pointer = found;
    tip.hidden = !found || (found.pass < 0 && found.copy < 0);
    if (!tip.hidden) {
      const { panel, rank, pass, copy } = found;
      const lines = pass < 0 ? describe(panel, rank, copy, this.kinds, panel.copies) : describe(panel, rank, pass, this.kinds);
      tip.textContent = lines.join("\n");
      const left = event.clientX + 14 + tip.offsetWidth > window.innerWidth ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
      const top = event.clientY + 14 + tip.offsetHeight > window.innerHeight ? event.clientY - 14 - tip.offsetHeight : event.clientY + 14;
      tip.style.left = Math.max(0, left) + "px";
      tip.style.top = Math.max(0, top) + "px";
    }
    this.repaint();
  }

  /** What was below the pointer is there no more. */
  #leave() {
    this.chart.pointer = null;
    this.tip.hidden = true;
    this.repaint();
  }

  #listen(keys) {
    this.#listenToPointers();
    this.scroller.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    (this.fills ? this.scroller : window).addEventListener("scroll", () => this.#leave());
    this.#listenToOverview();
    const actions = this.#actions();
    keys.addEventListener("keydown", (event) => {
      const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : actions[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    });
    const buttons = { in: "+", out: "-", fit: 0, taller: "]", flatter: "[", memory: "m" };
    for (const [id, key] of Object.entries(buttons)) byId(id).addEventListener("click", actions[key]);
    const layout = () => this.layout();
    window.addEventListener("resize", layout);
    new ResizeObserver(layout).observe(this.scroller); // what is around it grows and shrinks with what it says
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layout);
  }

  #actions() {
    const fit = () => this.#zoom(1e-9);
    return {
      "+": () => this.#zoom(1.5),
      "=": () => this.#zoom(1.5),
      "-": () => this.#zoom(1 / 1.5),
      0: fit,
      "[": () => this.#setRows(this.chart.boxHeight / 1.25 - 0.5),
      "]": () => this.#setRows(this.chart.boxHeight * 1.25 + 0.5),
      m: () => this.#toggleMemory(),
      n: () => this.#step(1),
      p: () => this.#step(-1),
      Escape: () => this.#select(null, -1),
      ArrowLeft: () => this.#move(80, 0),
      ArrowRight: () => this.#move(-80, 0),
      ArrowUp: () => this.#move(0, 60),
      ArrowDown: () => this.#move(0, -60),
    };
  }

  /** Mouse and touch: one pointer drags, two pinch, and one that stays in place selects. */
  #listenToPointers() {
    const { canvas, chart } = this;
    const down = new Map(); // pointer -> where it was last
    let travelled = 0;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      if (down.size === 0) travelled = 0;
      down.set(event.pointerId, this.#point(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      const last = down.get(event.pointerId);
      if (!last) {
        if (event.pointerType !== "touch") this.#hover(event);
        return;
      }
      const now = this.#point(event);
      travelled += Math.abs(now.x - last.x) + Math.abs(now.y - last.y);
      down.set(event.pointerId, now);
      if (down.size === 1) {
        if (travelled < 5) return;
        this.#move(now.x - last.x, this.fills ? now.y - last.y : 0); // the window would take the canvas along
      } else if (down.size === 2) {
        const other = [...down].find(([id]) => id !== event.pointerId)[1];
        const [before, after] = [Math.abs(last.x - other.x), Math.abs(now.x - other.x)];
        if (before > 8 && after > 8) chart.zoom(after / before, other.x);
        else this.#move((now.x - last.x) / 2, this.fills ? (now.y - last.y) / 2 : 0);
        this.repaint();
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      const { x, y } = this.#point(event);
      if (down.delete(event.pointerId) && down.size === 0 && travelled < 5) {
        const found = chart.hit(x, y);
        this.#select(found?.panel, found ? found.pass : -1);
        this.#hover(event);
      }
    });
    canvas.addEventListener("pointercancel", (event) => down.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.#leave());
  }

  #wheel(event) {
    const pixels = event.deltaMode === 1 ? 16 : 1; // some browsers count lines
    const nothingToScroll = this.fills && this.scroller.scrollHeight <= this.scroller.clientHeight;
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (sideways && Math.abs(sideways) >= Math.abs(event.deltaY) * (event.shiftKey ? 0 : 1)) {
      event.preventDefault();
      this.#move(-sideways * pixels, 0);
    } else if (event.ctrlKey || event.metaKey || nothingToScroll) {
      event.preventDefault();
      // A pinch on a touchpad comes as small steps with ctrlKey, a wheel as steps of about 100.
      const steps = Math.max(-120, Math.min(120, event.deltaY * pixels));
      this.#zoom(Math.exp(-steps * (Math.abs(steps) < 50 ? 0.01 : 0.003)), this.#point(event).x);
    }
  }

  /** Its window follows the pointer; where that is as wide as all, a drag chooses another. */
  #listenToOverview() {
    const { overview, chart } = this;
    const { canvas } = overview;
    let began = null; // where, in such a drag
    const at = (event) => event.clientX - canvas.getBoundingClientRect().left;
    const follow = (event) => {
      const ends = [began ?? at(event), at(event)].sort((a, b) => a - b);
      const half = began === null ? (chart.to - chart.from) / 2 : 0;
      if (began !== null && ends[1] - ends[0] < 5) return;
      chart.show(Math.max(0, overview.time(ends[0])) - half, Math.min(chart.total, overview.time(ends[1])) + half);
      this.repaint();
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      began = chart.to - chart.from < chart.total ? null : at(event);
      follow(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (canvas.hasPointerCapture(event.pointerId)) follow(event);
    });
  }
}
