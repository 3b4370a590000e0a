// What is shown, without how: the passes of every panel as columns, and what can be asked about them.

/** Undo what page.py did to a panel's columns: base64 of a zlib stream. */
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** Passes as columns, rank after rank: rank r has first[r] .. first[r + 1] - 1. */
class Table {
  constructor(counts, buffer, memory = false) {
    this.first = [0];
    for (const count of counts) this.first.push(this.first.at(-1) + count);
    this.count = this.first.at(-1);
    let at = 0;
    const column = (Type) => {
      const values = new Type(buffer, at, this.count);
      at += values.byteLength;
      return values;
    };
    this.starts = column(Float64Array);
    this.ends = column(Float64Array);
    this.changes = memory ? column(Float64Array) : null; // of activation memory, by the pass
    this.numbers = column(Uint32Array);
    this.chunks = column(Uint16Array);
    this.kinds = column(Uint8Array);
  }

  /** Make a time 0. */
  beginAt(origin) {
    for (let i = 0; i < this.count; i++) {
      this.starts[i] -= origin;
      this.ends[i] -= origin;
    }
  }
}

/** One schedule or recording: all its passes in the order they ran. */
class Panel extends Table {
  static async read(entry, kinds) {
    const copies = entry.copies ? new Table(entry.copies.counts, await inflate(entry.copies.columns)) : null;
    return new Panel(entry, kinds, await inflate(entry.columns), copies);
  }

  constructor(entry, kinds, buffer, copies) {
    super(entry.counts, buffer, entry.memory);
    this.copies = copies; // on their lanes; among the passes they are moments, without length
    this.title = entry.title;
    this.kindNames = kinds.map((kind) => kind.name);
    this.braided = kinds.map((kind) => kind.braided);
    this.lanes = kinds.filter((kind) => kind.lane).map((kind) => kind.name);
    this.needs = kinds.map((kind) => kind.needs.filter(({ modes }) => !modes.length || modes.includes(entry.vocabulary)));
    this.stages = entry.stages; // stages[rank][chunk]; null for a recording, whose placement is not known
    this.splits = entry.splits;
    this.ranks = entry.counts.length;
    this.#beginAtZero();
    this.#sumMemory();
    const last = this.numbers.reduce((most, number) => Math.max(most, number), 0);
    this.letters = this.number(this.numbers.indexOf(last)).length; // of the longest number
    this.chunkCount = this.stages ? this.stages[0].length : 1 + this.chunks.reduce((most, chunk) => Math.max(most, chunk), 0);
  }

  #beginAtZero() {
    let origin = Infinity;
    for (const start of this.starts) origin = Math.min(origin, start);
    this.beginAt(origin);
    this.copies?.beginAt(origin);
    this.makespan = this.ends.reduce((most, end) => Math.max(most, end), 0);
  }

  /** What its rank holds after each pass has changed it, and the most any rank holds. */
  #sumMemory() {
    this.peak = 0;
    if (!this.changes) return;
    this.held = new Float64Array(this.count);
    for (let rank = 0; rank < this.ranks; rank++) {
      let held = 0;
      for (let i = this.first[rank]; i < this.first[rank + 1]; i++) {
        held += this.changes[i];
        this.held[i] = held;
        this.peak = Math.max(this.peak, held);
      }
    }
  }

  /** When a pass changes the memory of its rank: what it allocates, at its start; what it frees, at its end. */
  changeTime(i) {
    return this.changes[i] > 0 ? this.starts[i] : this.ends[i];
  }

  /** The first pass of a rank that ends after a time; the end of the rank if none does. */
  after(rank, time) {
    let low = this.first[rank];
    let high = this.first[rank + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The pass that a rank runs at a time, or -1. */
  at(rank, time) {
    const i = this.after(rank, time);
    return i < this.first[rank + 1] && this.starts[i] <= time ? i : -1;
  }

  /** The copy of a kind that is on the way at a time, or -1. */
  copyAt(rank, kind, time) {
    const { first, starts, ends, kinds } = this.copies;
    for (let i = first[rank]; i < first[rank + 1]; i++) {
      if (this.kindNames[kinds[i]] === kind && starts[i] <= time && time < ends[i]) return i;
    }
    return -1;
  }

  rankOf(i) {
    return this.first.findIndex((_, rank) => i < this.first[rank + 1]);
  }

  stageOf(i) {
    return this.stages ? this.stages[this.rankOf(i)][this.chunks[i]] : -1;
  }

  /** Which share of each of `bins` equal parts of a time range a rank spends on each kind: shares[bin * kinds + kind]. */
  density(rank, from, to, bins) {
    const kinds = this.kindNames.length;
    const shares = new Float32Array(bins * kinds);
    const perTime = bins / (to - from);
    for (let i = this.after(rank, from); i < this.first[rank + 1] && this.starts[i] < to; i++) {
      const begin = Math.max(0, (this.starts[i] - from) * perTime);
      const end = Math.min(bins, (this.ends[i] - from) * perTime);
      for (let bin = Math.floor(begin); bin < end; bin++) {
        shares[bin * kinds + this.kinds[i]] += Math.min(end, bin + 1) - Math.max(begin, bin);
      }
    }
    return shares;
  }

  /** The most passes that a rank runs in a time range. */
  crowd(from, to) {
    let most = 0;
    for (let rank = 0; rank < this.ranks; rank++) most = Math.max(most, this.after(rank, to) - this.after(rank, from));
    return most;
  }

  /** All passes of a microbatch (slice). */
  passesOf(number) {
    const passes = [];
    for (let i = 0; i < this.count; i++) if (this.numbers[i] === number) passes.push(i);
    return passes;
  }

  /** The pairs [needed, needing] among the passes of one microbatch, by the needs in the table of kinds. */
  links(passes) {
    if (!this.stages) return [];
    const found = new Map(passes.map((i) => [this.kindNames[this.kinds[i]] + this.stageOf(i), i]));
    const needed = (i) => {
      const stage = this.stageOf(i);
      const needs = this.needs[this.kinds[i]].filter(({ on }) => !on || this.#stages(on, stage).includes(stage));
      const first = (kinds, other) => kinds.map((kind) => found.get(kind + other)).find((one) => one !== undefined);
      return needs.flatMap(({ kinds, where }) => this.#stages(where, stage).map((other) => first(kinds, other)));
    };
    return passes.flatMap((i) => needed(i).flatMap((other) => (other === undefined ? [] : [[other, i]])));
  }

  /** The stages that a need of a pass on a stage is about; passes of the vocabulary are on the first stage of their rank. */
  #stages(where, stage) {
    const last = this.ranks * this.stages[0].length - 1;
    const around = { SAME: [stage], PREVIOUS: stage === 0 ? [] : [stage - 1], NEXT: stage === last ? [] : [stage + 1] };
    return around[where] ?? { FIRST: [0], LAST: [last], ALL: this.stages.map(([first]) => first) }[where];
  }

  /** The microbatch of a pass and the letter of its slice: 3, 3a. */
  number(i, table = this) {
    const number = table.numbers[i];
    if (this.splits === 1) return String(number);
    let letters = "";
    for (let slice = number % this.splits; slice >= 0; slice = Math.floor(slice / 26) - 1) {
      letters = String.fromCharCode(97 + (slice % 26)) + letters;
    }
    return Math.floor(number / this.splits) + letters;
  }

  /** As people write a pass: F3, or F3.1 where there are several chunks. */
  name(i, table = this) {
    return this.kindNames[table.kinds[i]] + this.number(i, table) + (this.chunkCount > 1 ? "." + table.chunks[i] : "");
  }
}

/** The least of 1, 2, 5, 10, 20, .. times a power of ten that is at least this: the distance of an axis's ticks. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

/** A number with six digits, without the noise that floats leave behind them. */
function plain(value) {
  return String(Number(value.toPrecision(6)));
}
