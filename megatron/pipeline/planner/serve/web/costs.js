// Costs from a file, in place of the times that are typed: opened by the server, and the unit of memory that follows.

const BYTES = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, MB: 1e6, GB: 1e9 };
const SIZE = /^(\d+\.?\d*|\.\d+)(KiB|MiB|GiB|MB|GB)$/;

/** Whether a text is bytes, such as 20GiB. */
export const isSize = (text) => SIZE.test(text);

/** An amount of memory, in microbatches or in the unit of a costs file. */
export class Unit {
  /** `name`: behind a number; `size`: of one, in what costs count. */
  constructor(name = "microbatches", size = 1) {
    Object.assign(this, { name, size, counts: name === "MiB" });
  }

  /** What a typed limit is in what costs count; NaN for none. */
  read(text) {
    const [, number, unit] = SIZE.exec(text) ?? [];
    return number === undefined ? Number(text === "" ? NaN : text) : number * BYTES[unit];
  }

  /** A limit to type; bytes in whole MiB, never less than it is. */
  write(limit) {
    return this.counts ? `${this.whole(limit) / this.size}MiB` : String(limit);
  }

  /** The least limit of this much that can be typed. */
  whole(limit) {
    return this.counts ? Math.ceil(limit / this.size - 1e-9) * this.size : limit;
  }

  /** A number to be read. */
  number(memory, digits = 5) {
    return String(Number((memory / this.size).toPrecision(digits)));
  }

  amount(memory, digits) {
    return this.name ? `${this.number(memory, digits)} ${this.name}` : this.number(memory, digits);
  }
}

export const MICROBATCHES = new Unit();

async function answer(response) {
  const about = await response.json();
  if (response.status !== 200) throw new Error(about.message.replace(/^mpipe: /, ""));
  return { ...about, unit: new Unit(about.unit, about.size) };
}

/** Have the server open a file. Throws an Error with a message for the user. */
export async function open(file) {
  return answer(await fetch(`/api/costs?${new URLSearchParams({ name: file.name })}`, { method: "POST", body: file }));
}

/** What is known of a file that was opened before. Throws as `open`. */
export async function known(id) {
  return answer(await fetch(`/api/costs/${encodeURIComponent(id)}`));
}
