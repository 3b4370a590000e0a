// What may be typed into the fields, and what the page says where it is something else, or where no plan can be made of it.

import { isSize } from "./costs.js";

const NUMBER = /^(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const whole = { what: "a whole number of at least 1", fits: (text) => /^\d{1,9}$/.test(text) && Number(text) >= 1 };
const amount = { what: "a number of at least 0", fits: (text) => NUMBER.test(text) && Number(text) <= 1e100 };
const rate = { what: "a number above 0", fits: (text) => amount.fits(text) && Number(text) > 0 };
const memory = { what: "a number of at least 0, or bytes such as 20GiB", fits: (text) => amount.fits(text) || isSize(text) };
const LINKS = /^(\d+(-|to)\d+=[\d.]+(e[+-]?\d+)?(,|$))+$/;
const SLOW = /^(\d+=[\d.]+(,|$))+$/;
const FIELDS = {
  pp: whole,
  microbatches: whole,
  F: amount,
  B: amount,
  W: amount,
  comm: amount,
  links: { what: "times by link, such as 2-3=60,0to1=5", fits: (text) => LINKS.test(text) },
  slow: { what: "ranks and how many times as long they take, such as 2=1.3", fits: (text) => SLOW.test(text) },
  S: amount,
  T: amount,
  bandwidth: rate,
  chunks: whole,
  "memory-limit": memory,
};
const NEEDED = ["pp", "microbatches"]; // all others may be empty: there is a default

// Flags that a message of the command may name, as the page calls them.
const LABELS = {
  "--pp": "ranks",
  "--costs": "the costs file",
  "--memory-limit": "the memory limit",
  "--vocab-parallel": "the vocabulary on all ranks",
  "--vocab-cost": "S and T",
  "--cost": "the times",
  "--slow": "slow ranks",
  "--overlap-experts": "overlapped all-to-alls",
};

/** What is wrong with the values of fields, by field; `most`: the ranks and passes that the server takes. */
export function check(values, most) {
  const wrong = {};
  for (const [name, text] of Object.entries(values)) {
    if (!(name in FIELDS) || (text === "" && !NEEDED.includes(name)) || FIELDS[name].fits(text)) continue;
    const comma = text.replace(",", ".");
    const hint = FIELDS[name] !== whole && text.includes(",") && FIELDS[name].fits(comma) ? `; write ${comma}` : "";
    wrong[name] = text === "" ? `give ${FIELDS[name].what}` : `“${text}” is not ${FIELDS[name].what}${hint}`;
  }
  const [ranks, microbatches] = NEEDED.map((name) => Number(values[name]));
  if (ranks > most.pp) wrong.pp ??= `at most ${most.pp} ranks`;
  const fit = Math.floor(most.passes / 3 / ranks);
  if (microbatches > fit) wrong.microbatches ??= `with ${ranks} ranks at most ${fit} microbatches`;
  return wrong;
}

/** A message of the command in the words of the page. */
export function words(message) {
  return message.replace(/^mpipe: /, "").replace(/--[a-z-]+/g, (flag) => LABELS[flag] ?? flag.replaceAll("-", " ").trim());
}

/** The field of a schedule that a refusal is about. */
export function culprit({ message, least }) {
  if (least !== undefined || /memory|limit/.test(message)) return "memory-limit";
  return /chunk/.test(message) ? "chunks" : "schedule";
}

/** Mark a field as wrong, or as right where there is no message; `id`: of the element that has the message. */
export function mark(input, message, id) {
  if (!message) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
    return;
  }
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-describedby", id);
}
