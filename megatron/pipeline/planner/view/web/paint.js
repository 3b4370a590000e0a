// How it is shown: the part of the panels that is in view, on one canvas that is as large as the window's part for it.

const AXIS = 22; // heights and widths are CSS pixels
const TITLE = 24;
const GAP = 14;
const LABELS = 62;
const RIGHT = 12;
const BIN = 3; // width of a column where passes are too narrow to draw each of them
const NARROWEST = 2.5; // width that passes need on average to be drawn one by one
const THIN = 8; // height of a row whose columns have no room for several colours
const CLEAR = 6; // width of a box that has room for marks
const INK = "#222222"; // on the passes' own colours, which are the same in the dark

/** The colour itself for chunk 0, lighter for every further chunk, as in style.py. */
function shade(colour, chunk, chunks, lightest) {
  const white = (lightest * chunk) / Math.max(1, chunks - 1);
  const part = (at) => parseInt(colour.slice(at, at + 2), 16);
  return `rgb(${[1, 3, 5].map((at) => Math.round(part(at) + (255 - part(at)) * white)).join(" ")})`;
}

/** How high the line stands that tells chunks apart where there are more than two, as a share of the box; 0: there is none. */
function level(chunk, chunks) {
  return chunks > 2 ? chunk / chunks : 0;
}

/** Make a canvas as sharp as the screen, and return a context that counts in CSS pixels. */
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}

/** The colours that the style sheet chose for light or dark. */
function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["paper", "ink", "faint", "line", "idle", "held", "accent"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

/** Columns of stacked shares: each kind as high as its share of the time, what is left blank is idle. */
function stack(pen, shares, colours, left, bin, bottom, height) {
  const bins = shares.length / colours.length;
  const base = new Float32Array(bins);
  colours.forEach((colour, kind) => {
    pen.fillStyle = colour;
    for (let i = 0; i < bins; i++) {
      const part = shares[i * colours.length + kind] * height;
      if (part > 0) pen.fillRect(left + i * bin, bottom - base[i] - part, bin, part);
      base[i] += part;
    }
  });
}

/** Columns of one colour each, so that colours stay what the legend says: each kind as often as its share of the time. */
function dither(pen, shares, colours, left, bin, top, height) {
  const owed = new Float32Array(colours.length + 1); // by kind, and by idle time
  for (let i = 0; i * colours.length < shares.length; i++) {
    let idle = 1;
    colours.forEach((_, kind) => {
      owed[kind] += shares[i * colours.length + kind];
      idle -= shares[i * colours.length + kind];
    });
    owed[colours.length] += idle;
    const most = owed.indexOf(owed.reduce((a, b) => Math.max(a, b)));
    owed[most] -= 1;
    if (most === colours.length) continue;
    pen.fillStyle = colours[most];
    pen.fillRect(left + i * bin, top, bin, height);
  }
}

class Chart {
  constructor(canvas, kinds, lightest) {
    this.canvas = canvas;
    this.lightest = lightest;
    this.colours = kinds.map((kind) => kind.colour);
    this.laneCount = kinds.filter((kind) => kind.lane).length; // below the passes of their rank
    this.scroll = 0; // how far the content is scrolled down
    this.boxHeight = 18;
    this.showMemory = false;
    this.setPanels([]);
  }

  /** Take other panels; the time range in view stays if it was a part of all. */
  setPanels(panels) {
    const zoomed = this.panels?.length && this.to - this.from < this.total;
    this.panels = panels;
    this.total = Math.max(0, ...panels.map((panel) => panel.makespan)) || 1;
    this.peak = Math.max(0, ...panels.map((panel) => panel.peak));
    this.hasLanes = panels.some((panel) => panel.copies);
    for (const panel of panels) {
      const chunks = [...Array(panel.chunkCount).keys()];
      panel.shades = this.colours.map((colour) => chunks.map((chunk) => shade(colour, chunk, panel.chunkCount, this.lightest)));
    }
    this.pointer = null; // {panel, rank, time, pass} below the mouse
    this.selected = null; // {panel, pass, passes, links}
    this.show(zoomed ? this.from : 0, zoomed ? this.to : this.total); // the time range in view
  }

  /** Take the size and the theme of the window. */
  resize(width, height) {
    this.width = width;
    this.height = height;
    this.right = Math.max(LABELS + 10, width - RIGHT);
    this.theme = theme();
    this.pen = prepare(this.canvas, width, height);
  }

  /** Place the panels below each other. Returns the height of all. */
  place() {
    this.#setPitch();
    let top = AXIS;
    for (const panel of this.panels) {
      panel.top = top + TITLE;
      panel.bottom = panel.top + panel.ranks * this.pitch;
      top = panel.bottom + GAP;
    }
    return top;
  }

  #setPitch() {
    this.lane = this.hasLanes ? Math.max(2, Math.round(this.boxHeight * 0.16)) : 0; // the height of one
    this.lanes = this.hasLanes ? this.laneCount * (this.lane + 1) : 0;
    this.strip = this.showMemory && this.peak > 0 ? Math.max(5, Math.round(this.boxHeight * 0.7)) : 0;
    this.pitch = this.boxHeight + this.lanes + this.strip + (this.boxHeight > 8 ? 2 : this.boxHeight > 3 ? 1 : 0);
  }

  /** Make the boxes as high as all panels fit a height with, but no less than `least` and no more than `most`. */
  fitRows(height, least, most) {
    const ranks = this.panels.reduce((sum, panel) => sum + panel.ranks, 0);
    const room = height - AXIS - this.panels.length * (TITLE + GAP);
    this.boxHeight = most;
    for (this.#setPitch(); this.boxHeight > least && this.pitch * ranks > room; this.#setPitch()) this.boxHeight--;
  }

  get scale() {
    return (this.right - LABELS) / (this.to - this.from);
  }

  x(time) {
    return LABELS + (time - this.from) * this.scale;
  }

  time(x) {
    return this.from + (x - LABELS) / this.scale;
  }

  /** Show a time range, moved and shortened as the time axis demands. */
  show(from, to) {
    const length = Math.min(this.total, Math.max(this.total * 1e-6, to - from));
    this.from = Math.max(0, Math.min(this.total - length, from));
    this.to = this.from + length;
  }

  /** Make what is shown `factor` times as large, so that what is at x stays there. */
  zoom(factor, x) {
    const fixed = this.time(Math.max(LABELS, Math.min(this.right, x)));
    this.show(fixed - (fixed - this.from) / factor, fixed + (this.to - fixed) / factor);
  }

  /** What is at a point of the canvas: null outside the rows; a pass of -1 is idle time. */
  hit(x, y) {
    const at = y + this.scroll;
    const panel = this.panels.find((one) => at >= one.top && at < one.bottom);
    if (!panel || y < AXIS || x > this.right) return null;
    const rank = Math.min(panel.ranks - 1, Math.floor((at - panel.top) / this.pitch));
    const time = this.time(x);
    const lane = panel.copies ? panel.lanes[Math.floor((at - panel.top - rank * this.pitch - this.boxHeight) / (this.lane + 1))] : undefined;
    const copy = lane && x >= LABELS ? panel.copyAt(rank, lane, time) : -1;
    return { panel, rank, time, copy, pass: x < LABELS || lane ? -1 : panel.at(rank, time) };
  }

  select(panel, pass) {
    const passes = panel.passesOf(panel.numbers[pass]).map((i) => ({ i, rank: panel.rankOf(i) }));
    const rankOf = new Map(passes.map(({ i, rank }) => [i, rank]));
    const links = panel.links(passes.map(({ i }) => i)).map(([needed, needing]) => ({
      needed,
      needing,
      ranks: [rankOf.get(needed), rankOf.get(needing)],
    }));
    this.selected = { panel, pass, rank: rankOf.get(pass), passes, links };
  }

  paint() {
    const { pen } = this;
    pen.fillStyle = this.theme.paper;
    pen.fillRect(0, 0, this.width, this.height);
    this.crowded = false;
    for (const panel of this.panels) {
      if (panel.bottom > this.scroll && panel.top - TITLE < this.scroll + this.height) this.#panel(panel);
    }
    this.#axis();
  }

  #panel(panel) {
    const { pen } = this;
    const crowded = panel.crowd(this.from, this.to) * NARROWEST > this.right - LABELS;
    this.crowded ||= crowded;
    const first = Math.max(0, Math.floor((this.scroll + AXIS - panel.top) / this.pitch));
    const last = Math.min(panel.ranks, Math.ceil((this.scroll + this.height - panel.top) / this.pitch));
    pen.save();
    pen.beginPath();
    pen.rect(LABELS, 0, this.right - LABELS, this.height);
    pen.clip();
    for (let rank = first; rank < last; rank++) {
      const y = this.#y(panel, rank);
      pen.fillStyle = this.theme.idle;
      pen.fillRect(this.x(0), y, panel.makespan * this.scale, this.boxHeight);
      if (crowded) this.#columns(panel, rank, y);
      else this.#boxes(panel, rank, y);
      if (panel.copies) this.#copies(panel, rank, y + this.boxHeight + 1);
      if (this.strip && panel.peak > 0) this.#memory(panel, rank, y + this.boxHeight + this.lanes + this.strip);
    }
    if (this.selected?.panel === panel) this.#selection(panel, first, last);
    pen.restore();
    this.#labels(panel, first, last);
    this.#title(panel);
  }

  #y(panel, rank) {
    return panel.top + rank * this.pitch - this.scroll;
  }

  #columns(panel, rank, y) {
    const bins = Math.ceil((this.right - LABELS) / BIN);
    const shares = panel.density(rank, this.from, this.time(LABELS + bins * BIN), bins);
    if (this.boxHeight < THIN) return dither(this.pen, shares, this.colours, LABELS, BIN, y, this.boxHeight);
    stack(this.pen, shares, this.colours, LABELS, BIN, y + this.boxHeight, this.boxHeight);
  }

  #boxes(panel, rank, y) {
    const { pen } = this;
    const size = Math.min(12, this.boxHeight - 2);
    pen.font = `${size}px system-ui, sans-serif`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const digit = pen.measureText("0").width;
    for (let i = panel.after(rank, this.from); i < panel.first[rank + 1] && panel.starts[i] < this.to; i++) {
      const [x, width, top, height] = this.#part(panel, rank, i, y);
      pen.fillStyle = panel.shades[panel.kinds[i]][panel.chunks[i]];
      pen.fillRect(x, top, width > 3 ? width - 1 : width, height);
      const line = level(panel.chunks[i], panel.chunkCount) * height;
      if (line && width >= CLEAR) {
        pen.fillStyle = INK;
        pen.fillRect(x, top + Math.round(height - line), width > 3 ? width - 1 : width, 1);
      }
      const fits = Math.floor(Math.min(size, height, (size * (width - 3)) / (panel.letters * digit))); // all numbers, or none
      if (fits < 7) continue;
      pen.fillStyle = INK;
      pen.font = `${fits}px system-ui, sans-serif`;
      pen.fillText(panel.number(i), x + width / 2, top + height / 2 + 0.5);
    }
  }

  /** A rank's copies, each kind on a lane of its own. */
  #copies(panel, rank, top) {
    const { pen } = this;
    const { first, starts, ends, kinds, chunks } = panel.copies;
    pen.fillStyle = this.theme.idle;
    panel.lanes.forEach((_, lane) => pen.fillRect(this.x(0), top + lane * (this.lane + 1), panel.makespan * this.scale, this.lane));
    for (let i = first[rank]; i < first[rank + 1]; i++) {
      if (ends[i] < this.from || starts[i] > this.to) continue;
      const [x, width] = this.#box(panel.copies, i);
      pen.fillStyle = panel.shades[kinds[i]][chunks[i]];
      pen.fillRect(x, top + panel.lanes.indexOf(panel.kindNames[kinds[i]]) * (this.lane + 1), width > 3 ? width - 1 : width, this.lane);
    }
  }

  /** Where a pass stands: of a braid, the forward above the backward, each for all of its time. */
  #part(panel, rank, i, y) {
    const isSecond = panel.braided[panel.kinds[i]];
    const isFirst = i + 1 < panel.first[rank + 1] && panel.braided[panel.kinds[i + 1]];
    const [x, width] = this.#box(panel, isSecond ? i - 1 : i);
    if (!isFirst && !isSecond) return [x, width, y, this.boxHeight];
    const [last, more] = this.#box(panel, isSecond ? i : i + 1);
    const half = this.boxHeight / 2;
    return [x, last + more - x, isSecond ? y + half : y, half];
  }

  /** Where the visible part of a pass begins, and how wide it is. */
  #box(table, i) {
    const x = Math.max(LABELS - 2, this.x(table.starts[i]));
    return [x, Math.min(this.right + 2, this.x(table.ends[i])) - x];
  }

  /** What a rank holds, as bars on the bottom line; of bars too narrow to see, the highest. */
  #memory(panel, rank, bottom) {
    const { pen } = this;
    const perUnit = (this.strip - 1) / this.peak;
    let i = panel.after(rank, this.from);
    let x = LABELS;
    let level = i > panel.first[rank] ? panel.held[i - 1] : 0;
    let most = level;
    const bar = (until) => {
      pen.fillRect(x, bottom - most * perUnit, until - x, most * perUnit);
      x = until;
      most = level;
    };
    pen.fillStyle = this.theme.held;
    for (; i < panel.first[rank + 1] && panel.changeTime(i) < this.to; i++) {
      const until = this.x(panel.changeTime(i));
      level = panel.held[i];
      if (until - x >= 1) bar(until);
      else most = Math.max(most, level);
    }
    if (level > 0) bar(Math.min(this.right, this.x(panel.makespan)));
  }

  /** Everything but one microbatch fades; lines lead from its passes to those that need their results. */
  #selection(panel, first, last) {
    const { pen } = this;
    const { pass, passes, links } = this.selected;
    pen.globalAlpha = 0.72;
    pen.fillStyle = this.theme.paper;
    pen.fillRect(LABELS, this.#y(panel, first), this.right - LABELS, (last - first) * this.pitch);
    pen.globalAlpha = 1;
    for (const { i, rank } of passes) {
      if (rank < first || rank >= last || panel.ends[i] < this.from || panel.starts[i] > this.to) continue;
      const [x, width] = this.#box(panel, i);
      const y = this.#y(panel, rank);
      pen.fillStyle = panel.shades[panel.kinds[i]][panel.chunks[i]];
      pen.fillRect(x, y, Math.max(3, width - 1), this.boxHeight);
      if (i !== pass) continue;
      pen.strokeStyle = this.theme.accent;
      pen.lineWidth = 2;
      pen.strokeRect(x, y, Math.max(3, width - 1), this.boxHeight);
    }
    for (const { needed, needing, ranks } of links) {
      const direct = needed === pass || needing === pass;
      const [begin, end] = ranks.map((rank) => this.#y(panel, rank) + this.boxHeight / 2);
      pen.strokeStyle = direct ? this.theme.accent : this.theme.faint;
      pen.lineWidth = direct ? 2 : 1;
      pen.beginPath();
      pen.moveTo(this.x(panel.ends[needed]), begin);
      pen.lineTo(this.x(panel.starts[needing]), end);
      pen.stroke();
    }
  }

  #labels(panel, first, last) {
    const { pen } = this;
    const every = 2 ** Math.max(0, Math.ceil(Math.log2(11 / this.pitch)));
    pen.font = `${Math.min(12, Math.max(9, this.boxHeight - 2))}px system-ui, sans-serif`;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    let above = -Infinity;
    for (let rank = first; rank < last; rank++) {
      if (rank % every) continue;
      const lit = this.pointer?.panel === panel && this.pointer.rank === rank;
      pen.fillStyle = lit ? this.theme.accent : this.theme.ink;
      const y = Math.max(this.#y(panel, rank) + this.boxHeight / 2, this.#y(panel, 0) + 5); // below the title
      if (y < above + 11) continue; // rank 0 has moved down
      above = y;
      pen.fillText("rank " + rank, LABELS - 6, y + 0.5);
    }
  }

  /** The title stays below the axis while its panel is in view. */
  #title(panel) {
    const { pen } = this;
    const y = Math.max(panel.top - TITLE - this.scroll, Math.min(AXIS, panel.bottom - TITLE - this.scroll));
    pen.fillStyle = this.theme.paper;
    pen.fillRect(0, y, this.width, TITLE - 2);
    pen.fillStyle = this.theme.ink;
    pen.font = "bold 13px system-ui, sans-serif";
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(panel.title, 12, y + TITLE / 2, this.width - 24);
  }

  #axis() {
    const { pen, theme } = this;
    pen.fillStyle = theme.paper;
    pen.fillRect(0, 0, this.width, AXIS);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.fillStyle = theme.faint;
    pen.fillText("time", 12, AXIS / 2 - 2, LABELS - 22);
    pen.textAlign = "center";
    const step = roundStep(((this.to - this.from) * 110) / (this.right - LABELS));
    for (let tick = Math.ceil(this.from / step); tick * step <= this.to; tick++) {
      const x = this.x(tick * step);
      pen.fillRect(x, AXIS - 4, 1, 4);
      pen.fillText(plain(tick * step), Math.max(x, LABELS + 10), AXIS / 2 - 2);
    }
    pen.fillStyle = theme.line;
    pen.fillRect(0, AXIS - 1, this.width, 1);
    if (this.pointer && this.pointer.time >= this.from) {
      pen.fillStyle = theme.accent;
      pen.fillRect(this.x(this.pointer.time), AXIS, 1, this.height);
    }
  }
}
