// What the page shows, as text that its address holds and as the flags of mpipe plan. All values are what was typed, so that the
// command, not the page, says what is wrong with them.

const COMMON = {
  pp: "8",
  microbatches: "32",
  objective: "span",
  F: "1",
  B: "1.2",
  W: "0.8",
  comm: "0.05",
  "vocab-parallel": "off",
  S: "",
  T: "",
  offload: "off",
  bandwidth: "",
};
const CARD = { schedule: "zb-v", chunks: "", "memory-limit": "" };
const FIRST = [{ schedule: "1f1b" }, { schedule: "zb-h1" }, { schedule: "v-auto", "memory-limit": "6" }];

/** A schedule beside the others: its name, and what may differ from one to the next. */
export function card(values = {}) {
  return { ...CARD, ...values };
}

/** The state that an address stands for: `pp=8&F=1&..&plan=schedule%3Dzb-v&plan=..`. What it leaves out is as at first. */
export function parse(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const read = (known, from) => Object.fromEntries(Object.entries(known).map(([name, value]) => [name, from.get(name) ?? value]));
  const plans = given.getAll("plan").map((text) => read(CARD, new URLSearchParams(text)));
  return { common: read(COMMON, given), cards: plans.length ? plans : FIRST.map(card) };
}

/** The address of a state. */
export function format({ common, cards }) {
  const text = new URLSearchParams(common);
  for (const one of cards) text.append("plan", new URLSearchParams(Object.entries(one).filter(([, value]) => value !== "")));
  return "#" + text;
}

const listed = (names, values) =>
  names
    .filter((name) => values[name] !== "")
    .map((name) => `${name}=${values[name]}`)
    .join(",");

/** The flags of mpipe plan, without the dashes, for one card; flags that are left out are missing. */
export function flags(common, { schedule, chunks, "memory-limit": limit }) {
  const bandwidth = common.bandwidth.trim();
  const seconds = bandwidth !== "" && Number(bandwidth) > 0 ? String(1 / Number(bandwidth)) : bandwidth;
  const offloads = common.offload !== "off";
  const spreads = common["vocab-parallel"] !== "off";
  const cost = { ...common, D2H: offloads ? seconds : "", H2D: offloads ? seconds : "" };
  const all = {
    schedule,
    pp: common.pp,
    microbatches: common.microbatches,
    chunks,
    cost: listed(["F", "B", "W", "comm", "D2H", "H2D"], cost),
    "memory-limit": limit,
    objective: common.objective === "span" ? "" : common.objective,
    "vocab-parallel": spreads ? common["vocab-parallel"] : "",
    "vocab-cost": spreads ? listed(["S", "T"], common) : "",
    offload: offloads ? common.offload : "",
  };
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value.trim() !== ""));
}

/** The command that these flags are of, to be copied into a shell. */
export function command(given) {
  const quoted = (value) => (/^[\w.,=:/+-]+$/.test(value) ? value : `'${value.replaceAll("'", `'\\''`)}'`);
  return ["mpipe plan", ...Object.entries(given).map(([name, value]) => `--${name} ${quoted(value)}`)].join(" ");
}

/** A card's name beside others. */
export function label({ schedule, chunks, "memory-limit": limit }) {
  return [schedule, chunks && `v=${chunks}`, limit && `within ${limit}`].filter(Boolean).join(" ");
}

/** The limits that a slider goes through: by chunks, up to twice the memory of 1F1B, or what a plan holds if that is more. */
export function limits(common, chunks, peak = 0) {
  const [ranks, microbatches] = [Number(common.pp), Number(common.microbatches)];
  if (!(ranks >= 1 && microbatches >= 1 && chunks >= 1)) return [];
  const most = Math.max(Math.min(2 * ranks, microbatches), Math.ceil(peak));
  const step = Math.ceil((most * chunks) / MOST_LIMITS) / chunks;
  return Array.from({ length: Math.floor(most / step + 1e-9) }, (_, i) => Number(((i + 1) * step).toPrecision(12)));
}

const MOST_LIMITS = 64;
