// Plans from the server, and those that were asked for before: one answer for each set of flags.

import { words } from "./fields.js";

const KEPT = 600; // answers
const AT_ONCE = 2; // requests ahead of what is looked at: the browser keeps its other connections for what is

export function address(flags, suffix = "") {
  return `/api/plan${suffix}?${new URLSearchParams(flags)}`;
}

/** What the server answers, with the status of HTTP; without one where the server is gone. Throws only where the signal aborts. */
async function fetched(flags, signal) {
  const response = await fetch(address(flags), { signal }).catch((error) => {
    if (signal.aborted) throw error;
  });
  const received = response ? await response.json() : {};
  delete received.plan?.passes; // the panel has them, packed
  return { ...received, status: response?.status };
}

export class Plans {
  #answers = new Map(); // address -> {flags, plan, panel} or {flags, message}, the one used last behind
  #ahead = new AbortController();

  constructor(arrived) {
    this.arrived = arrived; // called with every answer
  }

  /** The answer to these flags, if it is here. */
  known(flags) {
    const key = address(flags);
    const answer = this.#answers.get(key);
    if (answer) {
      this.#answers.delete(key);
      this.#answers.set(key, answer);
    }
    return answer;
  }

  /** All answers that are here. */
  all() {
    return [...this.#answers.values()];
  }

  /** Ask for a plan. Answers with a message, also where the server is gone; throws only where the signal aborts. */
  async ask(flags, signal, ahead = false) {
    const known = this.known(flags);
    if (known) return known;
    const { status, ...received } = await fetched(ahead ? { ...flags, ahead: "1" } : flags, signal);
    if (!status) return { flags, message: "mpipe serve does not answer: is it still running?" };
    const answer = { flags, ...received };
    if (status === 200 || status === 400) {
      if (answer.message) answer.message = words(answer.message);
      this.#answers.set(address(flags), answer); // else it gave way to others, and may be asked for again
      if (this.#answers.size > KEPT) this.#answers.delete(this.#answers.keys().next().value);
      this.arrived(answer);
    }
    return answer;
  }

  /** The first good plan for these flags, which a search would make shorter; undefined where there is none yet. */
  async first(flags, signal) {
    const { status, ...received } = await fetched({ ...flags, quick: "1" }, signal);
    return status === 200 ? { flags, ...received } : undefined;
  }

  /**
   * Ask for many plans, in their order, while nothing else is asked for, until a time of `Date.now()`. What was asked for ahead
   * before is given up. `progress(left)` takes how many are left. Resolves to how many were not planned, or null where it was stopped.
   */
  async askAhead(wanted, until, progress) {
    this.stopAhead();
    const { signal } = this.#ahead;
    const ending = AbortSignal.any([signal, AbortSignal.timeout(Math.max(0, until - Date.now()))]);
    const queue = wanted.filter((flags) => !this.known(flags));
    const takeTurns = async () => {
      while (queue.length && !ending.aborted) {
        progress(queue.length);
        await this.ask(queue.shift(), ending, true);
      }
    };
    try {
      await Promise.all(Array.from({ length: AT_ONCE }, takeTurns));
    } catch (error) {
      if (!ending.aborted) throw error;
    }
    return signal.aborted ? null : wanted.filter((flags) => !this.known(flags)).length;
  }

  stopAhead() {
    this.#ahead.abort();
    this.#ahead = new AbortController();
  }
}
