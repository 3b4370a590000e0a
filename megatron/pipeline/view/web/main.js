// The page: header, mouse, touch and keyboard. All drawing waits for the next frame, so that events are cheap.

function byId(id) {
  return document.getElementById(id);
}

function element(tag, text, parent) {
  const made = document.createElement(tag);
  made.textContent = text;
  parent.append(made);
  return made;
}

/** The table of facts: one row a panel, one column for every fact that any panel has. */
function fillFacts(entries) {
  const table = document.querySelector("#facts table");
  const names = [...new Set(entries.flatMap((entry) => Object.keys(entry.facts)))];
  const head = element("tr", "", element("thead", "", table));
  for (const name of ["schedule", ...names]) element("th", name, head);
  const body = element("tbody", "", table);
  for (const entry of entries) {
    const row = element("tr", "", body);
    element("th", entry.title, row);
    for (const name of names) element("td", entry.facts[name] ?? "", row);
  }
}

function fillLegend(kinds, panels, lightest) {
  const legend = byId("legend");
  const add = (colour, text) => {
    const item = element("li", "", legend);
    element("i", "", item).style.background = colour;
    item.append(text);
  };
  kinds.forEach((kind, index) => {
    if (panels.some((panel) => panel.kinds.includes(index))) add(kind.colour, `${kind.name} ${kind.meaning}`);
  });
  const chunks = Math.max(...panels.map((panel) => panel.chunkCount));
  for (let chunk = 0; chunks > 1 && chunk < chunks; chunk++) add(shade("#777777", chunk, chunks, lightest), `chunk ${chunk}`);
  add("var(--idle)", "idle");
  element("li", "", legend).id = "density";
}

/** What is known about a pass, as lines. */
function describe(panel, rank, pass, kinds) {
  const [start, end] = [panel.starts[pass], panel.ends[pass]];
  const stage = panel.stages ? `, stage ${panel.stages[rank][panel.chunks[pass]]}` : "";
  const lines = [
    `${panel.name(pass)}: ${kinds[panel.kinds[pass]].meaning} of microbatch ${panel.number(pass)}`,
    `rank ${rank}, chunk ${panel.chunks[pass]}${stage}`,
    `start ${plain(start)}, end ${plain(end)}, duration ${plain(end - start)}`,
  ];
  if (panel.changes) {
    const before = panel.held[pass] - panel.changes[pass];
    const [during, after] = [Math.max(before, panel.held[pass]), panel.held[pass]];
    lines.push(`memory ${plain(during)} during it, ${plain(after)} after it`);
  }
  return lines;
}

/** What is known about a copy on its lane, as lines. */
function describeCopy(panel, rank, copy, kinds) {
  const { starts, ends, chunks } = panel.copies;
  return [
    `${panel.name(copy, panel.copies)}: ${kinds[panel.copies.kinds[copy]].meaning} of microbatch ${panel.number(copy, panel.copies)}`,
    `rank ${rank}, chunk ${chunks[copy]}`,
    `start ${plain(starts[copy])}, end ${plain(ends[copy])}, duration ${plain(ends[copy] - starts[copy])}`,
  ];
}

async function main() {
  const data = JSON.parse(byId("data").textContent);
  const { kinds, lightest } = data;
  const panels = await Promise.all(data.entries.map((entry) => Panel.read(entry, kinds)));
  const scroller = byId("scroller");
  const canvas = byId("chart");
  const tip = byId("tip");
  const chart = new Chart(canvas, panels, kinds, lightest, data.unit);
  const overview = new Overview(byId("overview"), chart);
  fillFacts(data.entries);
  fillLegend(kinds, panels, lightest);
  byId("memory").hidden = chart.peak === 0;

  let waiting = false;
  function repaint() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      chart.scroll = scroller.scrollTop;
      chart.paint();
      overview.paint();
      byId("density").textContent = chart.crowded ? "columns: share of time, blank is idle; zoom in for passes" : "";
    });
  }

  function layout() {
    chart.theme = theme();
    const height = chart.layout(scroller.clientWidth, scroller.clientHeight);
    byId("content").style.height = Math.max(height, scroller.clientHeight) + "px";
    if (scroller.clientWidth !== chart.width) chart.layout(scroller.clientWidth, scroller.clientHeight); // a bar appeared
    overview.layout(document.documentElement.clientWidth);
    repaint();
  }

  function setRows(height) {
    chart.boxHeight = Math.max(4, Math.min(60, Math.round(height)));
    layout();
  }

  function zoom(factor, x = (LABELS + chart.right) / 2) {
    chart.zoom(factor, x);
    repaint();
  }

  /** Move what is shown by pixels. */
  function move(x, y) {
    chart.show(chart.from - x / chart.scale, chart.to - x / chart.scale);
    scroller.scrollTop -= y;
    repaint();
  }

  function toggleMemory() {
    chart.showMemory = !chart.showMemory && chart.peak > 0;
    byId("memory").setAttribute("aria-pressed", chart.showMemory);
    layout();
  }

  function select(panel, pass) {
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
      const lines = describe(panel, rank, pass, kinds);
      if (panel.stages) lines.push(`needs ${needs}`, `needed by ${feeds}`);
      byId("status").textContent = lines.join("; ");
    }
    repaint();
  }

  /** Select the pass that many places further on the same rank, and bring it into view. */
  function step(by) {
    if (!chart.selected) return;
    const { panel, rank, pass } = chart.selected;
    const next = Math.max(panel.first[rank], Math.min(panel.first[rank + 1] - 1, pass + by));
    const length = chart.to - chart.from;
    if (panel.starts[next] < chart.from || panel.ends[next] > chart.to) {
      chart.show(panel.starts[next] - length / 2, panel.starts[next] + length / 2);
    }
    select(panel, next);
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  function hover(event) {
    const { x, y } = point(event);
    const found = chart.hit(x, y);
    chart.pointer = found;
    tip.hidden = !found || (found.pass < 0 && found.copy < 0);
    if (!tip.hidden) {
      const { panel, rank, pass, copy } = found;
      const lines = pass < 0 ? describeCopy(panel, rank, copy, kinds) : describe(panel, rank, pass, kinds);
      tip.textContent = lines.join("\n");
      const left = event.clientX + 14 + tip.offsetWidth > window.innerWidth ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
      const top = event.clientY + 14 + tip.offsetHeight > window.innerHeight ? event.clientY - 14 - tip.offsetHeight : event.clientY + 14;
      tip.style.left = Math.max(0, left) + "px";
      tip.style.top = Math.max(0, top) + "px";
    }
    repaint();
  }

  function leave() {
    chart.pointer = null;
    tip.hidden = true;
    repaint();
  }

  // Mouse and touch: one pointer drags, two pinch, and one that stays in place selects.
  const down = new Map(); // pointer -> where it was last
  let travelled = 0;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    if (down.size === 0) travelled = 0;
    down.set(event.pointerId, point(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const last = down.get(event.pointerId);
    if (!last) {
      if (event.pointerType !== "touch") hover(event);
      return;
    }
    const now = point(event);
    travelled += Math.abs(now.x - last.x) + Math.abs(now.y - last.y);
    down.set(event.pointerId, now);
    if (down.size === 1) {
      if (travelled < 5) return;
      leave();
      move(now.x - last.x, now.y - last.y);
    } else if (down.size === 2) {
      const other = [...down].find(([id]) => id !== event.pointerId)[1];
      const [before, after] = [Math.abs(last.x - other.x), Math.abs(now.x - other.x)];
      if (before > 8 && after > 8) chart.zoom(after / before, other.x);
      else move((now.x - last.x) / 2, (now.y - last.y) / 2);
      repaint();
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const { x, y } = point(event);
    if (down.delete(event.pointerId) && down.size === 0 && travelled < 5) {
      const found = chart.hit(x, y);
      select(found?.panel, found ? found.pass : -1);
      hover(event);
    }
  });
  canvas.addEventListener("pointercancel", (event) => down.delete(event.pointerId));
  canvas.addEventListener("pointerleave", leave);
  scroller.addEventListener(
    "wheel",
    (event) => {
      const pixels = event.deltaMode === 1 ? 16 : 1; // some browsers count lines
      const nothingToScroll = scroller.scrollHeight <= scroller.clientHeight;
      const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
      if (sideways && Math.abs(sideways) >= Math.abs(event.deltaY) * (event.shiftKey ? 0 : 1)) {
        event.preventDefault();
        move(-sideways * pixels, 0);
      } else if (event.ctrlKey || event.metaKey || nothingToScroll) {
        event.preventDefault();
        // A pinch on a touchpad comes as small steps with ctrlKey, a wheel as steps of about 100.
        const steps = Math.max(-120, Math.min(120, event.deltaY * pixels));
        zoom(Math.exp(-steps * (Math.abs(steps) < 50 ? 0.01 : 0.003)), point(event).x);
      }
    },
    { passive: false },
  );
  scroller.addEventListener("scroll", repaint);

  // The overview: its window follows the pointer.
  const follow = (event) => {
    const middle = overview.time(event.clientX - overview.canvas.getBoundingClientRect().left);
    const half = (chart.to - chart.from) / 2;
    chart.show(middle - half, middle + half);
    repaint();
  };
  overview.canvas.addEventListener("pointerdown", (event) => {
    overview.canvas.setPointerCapture(event.pointerId);
    follow(event);
  });
  overview.canvas.addEventListener("pointermove", (event) => {
    if (overview.canvas.hasPointerCapture(event.pointerId)) follow(event);
  });

  const fit = () => zoom(1e-9);
  const actions = {
    "+": () => zoom(1.5),
    "=": () => zoom(1.5),
    "-": () => zoom(1 / 1.5),
    0: fit,
    "[": () => setRows(chart.boxHeight / 1.25 - 0.5),
    "]": () => setRows(chart.boxHeight * 1.25 + 0.5),
    m: toggleMemory,
    n: () => step(1),
    p: () => step(-1),
    Escape: () => select(null, -1),
    ArrowLeft: () => move(80, 0),
    ArrowRight: () => move(-80, 0),
    ArrowUp: () => move(0, 60),
    ArrowDown: () => move(0, -60),
  };
  document.addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  const buttons = { in: "+", out: "-", fit: 0, taller: "]", flatter: "[", memory: "m" };
  for (const [id, key] of Object.entries(buttons)) byId(id).addEventListener("click", actions[key]);
  window.addEventListener("resize", layout);
  new ResizeObserver(layout).observe(scroller); // header and footer grow and shrink with what they say
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layout);

  chart.layout(scroller.clientWidth, scroller.clientHeight);
  overview.layout(document.documentElement.clientWidth); // takes its height first
  chart.fitRows(scroller.clientHeight);
  layout();
}

main().catch((error) => {
  byId("status").textContent = `This browser cannot show the page (${error}); it needs one from 2023 or later.`;
});
