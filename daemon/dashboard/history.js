// The daemon's history as the page has it: rows by number, new ones appended, old ones dropped.

// Of each span: the rows that it is drawn from, how many, and how many become one point.
export const SPANS = {
  recent: { step: "second", rows: 120, stride: 1 },
  hour: { step: "second", rows: 3600, stride: 15 },
  day: { step: "minute", rows: 1440, stride: 5 },
};

const KEPT_ROWS = { second: 3600, minute: 1440 };

export class Table {
  constructor(step) {
    this.step = step;
    this.clear();
  }

  clear() {
    this.last = 0;
    this.times = [];
    this.columns = {};
  }

  append({ first, times, columns }) {
    if (first !== this.last + 1) this.clear();
    this.times.push(...times);
    for (const [name, values] of Object.entries(columns)) (this.columns[name] ??= []).push(...values);
    this.last = first + times.length - 1;
    const surplus = this.times.length - KEPT_ROWS[this.step];
    if (surplus <= 0) return;
    for (const column of [this.times, ...Object.values(this.columns)]) column.splice(0, surplus);
  }

  has(name) {
    return name in this.columns;
  }

  // Places of the rows where the points of a span end. They are multiples of the stride, so that
  // a point stays what it is while time goes on.
  ends({ rows, stride }) {
    const offset = this.last - this.times.length + 1;
    const ends = [];
    for (let at = Math.max(0, this.times.length - rows); at < this.times.length; at++) {
      if ((at + offset) % stride === 0) ends.push(at);
    }
    return ends;
  }

  // Of a counter: how much more a second, for each point but the first.
  rates(names, ends) {
    const total = (at) => names.reduce((sum, name) => sum + (this.columns[name]?.[at] ?? 0), 0);
    return ends.slice(1).map((end, index) => {
      const seconds = this.times[end] - this.times[ends[index]];
      return seconds > 0 ? Math.max(0, total(end) - total(ends[index])) / seconds : null;
    });
  }

  // Of a gauge: the value at each point but the first.
  values(name, ends) {
    return ends.slice(1).map((end) => this.columns[name]?.[end] ?? null);
  }

  // Of a gauge: the largest value of the rows of each point but the first.
  largest(name, ends) {
    return ends.slice(1).map((end, index) => {
      const known = (this.columns[name] ?? []).slice(ends[index] + 1, end + 1).filter((v) => v !== null);
      return known.length ? Math.max(...known) : null;
    });
  }

  misses() {
    return Object.keys(this.columns).filter((name) => name.startsWith("misses_"));
  }
}
