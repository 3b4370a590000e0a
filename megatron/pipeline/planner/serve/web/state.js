// What the page shows, as text that its address holds and as the flags of mpipe plan. All values are what was typed.

import { MICROBATCHES } from "./costs.js";

const COMMON = {
  pp: "8",
  microbatches: "32",
  objective: "makespan",
  F: "1",
  B: "1.2",
  W: "0.8",
  comm: "0.05",
  links: "",
  slow: "",
  "vocab-parallel": "off",
  S: "",
  T: "",
  offload: "off",
  bandwidth: "",
  "overlap-experts": "off",
  costs: "", // which file has them; the times above then do not count
};
const CARD = { schedule: "zb-v", chunks: "", group: "", "memory-limit": "" };
const FIRST = [{ schedule: "zb-v" }, { schedule: "v-auto", "memory-limit": "6" }, { schedule: "1f1b" }];
const MOST_LIMITS = 64;

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

/** Times of single links, 2-3=60, as --cost has them. */
const ofLinks = (text) => text.replace(/([^,=\s]+)(\s*=)/g, "comm[$1]$2");

/**
 * The flags of mpipe plan, without the dashes, for one card; flags that are left out are missing, and `costs` is what the server
 * calls the file.
 */
export function flags(common, { schedule, chunks, group, "memory-limit": limit }) {
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
    group,
    costs: common.costs,
    cost: [common.costs ? "" : listed(["F", "B", "W", "comm", "D2H", "H2D"], cost), ofLinks(common.links)].filter(Boolean).join(","),
    slow: common.slow,
    "memory-limit": limit,
    objective: common.objective,
    "vocab-parallel": spreads ? common["vocab-parallel"] : "",
    "vocab-cost": spreads ? listed(["S", "T"], common) : "",
    offload: offloads ? common.offload : "",
    "overlap-experts": common["overlap-experts"] === "off" ? "" : common["overlap-experts"],
  };
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value.trim() !== ""));
}

/** The command that these flags are of, to be copied into a shell; `file`: the name of the costs file, if there is one. */
export function command(flags, file) {
  const given = file ? { ...flags, costs: file } : flags;
  const quoted = (value) => (/^[\w.,=:/+-]+$/.test(value) ? value : `'${value.replaceAll("'", `'\\''`)}'`);
  return ["mpipe plan", ...Object.entries(given).map(([name, value]) => `--${name} ${quoted(value)}`)].join(" ");
}

/** A card's name beside others; `plan`: what is there for it, if anything is. */
export function label({ schedule, chunks, group, "memory-limit": limit }, plan) {
  const name = plan?.candidates ? [`${schedule}: ${chosen(plan)}`] : [schedule, chunks && `v=${chunks}`, group && `g=${group}`];
  return [...name, limit && `within ${limit}`].filter(Boolean).join(" ");
}

/** A limit in microbatches that was typed for another size: the same share of 1F1B's memory; other texts stay. */
export function rescaled(limit, before, now) {
  const [old, most] = [before, now].map(({ pp, microbatches }) => Math.min(Number(pp), Number(microbatches)));
  return limit !== "" && Number(limit) > 0 && old > 0 && most > 0 ? String(Number(((Number(limit) * most) / old).toPrecision(6))) : limit;
}

/** Which schedule a plan of auto is. */
export function chosen({ schedule, candidates }) {
  return candidates.find((one) => one.why_not === null)?.label ?? schedule;
}

/** What schedules are held against: time and bubble of what is to be short, the gap to its lower bound, and the most memory. */
export function measures(plan) {
  const memory = Math.max(...plan.peak_activation);
  if (plan.objective === "span") return { value: plan.span, bubble: plan.span_bubble_rate, gap: plan.gap, memory };
  return { value: plan.makespan, bubble: plan.bubble_rate, gap: plan.makespan_gap, memory };
}

/** The flags of what stock has, without offload: 1F1B, then interleaved with 2 to `most` chunks where stock can interleave. */
export function stock(common, most) {
  const interleaves = Number(common.pp) > 1 && Number(common.microbatches) % Number(common.pp) === 0;
  const chunks = interleaves ? Array.from({ length: most - 1 }, (_, i) => String(i + 2)) : [];
  const cards = [card({ schedule: "1f1b" }), ...chunks.map((chunks) => card({ schedule: "interleaved", chunks }))];
  return cards.map((one) => flags({ ...common, offload: "off" }, one));
}

/**
 * The limits that a slider goes through: by chunks, from the least that there is a plan for up to twice the memory of 1F1B.
 * `unit`: in which a limit can be typed; `microbatch`: the memory of one on a rank.
 */
export function limits(common, chunks, least = 0, unit = MICROBATCHES, microbatch = 1) {
  const [ranks, microbatches] = [Number(common.pp), Number(common.microbatches)];
  if (!(ranks >= 1 && microbatches >= 1 && chunks >= 1)) return [];
  const most = Math.min(2 * ranks, microbatches);
  const step = Math.ceil((most * chunks) / MOST_LIMITS) / chunks;
  const counted = Array.from({ length: Math.floor(most / step + 1e-9) }, (_, i) => Number(((i + 1) * step).toPrecision(12)));
  const all = counted.map((count) => unit.whole(count * microbatch));
  const first = unit.whole(least);
  const above = all.filter((limit) => limit > first * (1 + 1e-9));
  return first > 0 ? [first, ...above] : above;
}
