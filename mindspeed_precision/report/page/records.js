// The grid: rows (records in execution order) and columns (steps), filtered and selected in one place.
class Records {
  constructor(grid, rows, cells, details) {
    this.grid = grid;
    [this.height, this.width] = grid.size;
    this.rows = rows;
    this.cells = cells;
    this.details = details;
    this.levels = grid.levels;
    this.worst = new Uint8Array(this.height);
    this.first = new Int32Array(this.height).fill(-1);
    for (let row = 0; row < this.height; row++) this.survey(row);
    this.labels = Array.from({ length: this.height }, (_, row) => this.label(row));
    this.searched = this.labels.map((label, row) => `${label} ${this.phase(row)}`.toLowerCase());
    this.shown = [];
    this.filter = { text: "", phase: "", apart: false };
    this.selected = null;
    this.listeners = { select: [], filter: [] };
    this.refilter();
  }

  survey(row) {
    for (let column = 0; column < this.width; column++) {
      const code = this.cells[row * this.width + column];
      if (worse(code, this.worst[row])) this.worst[row] = code;
      if ((code & 7) > 2 && this.first[row] < 0) this.first[row] = column;
    }
  }

  phase(row) {
    return this.grid.phases[this.rows.phase[row]];
  }

  role(row) {
    return this.grid.roles[this.rows.role[row]];
  }

  name(row) {
    return this.rows.names[this.rows.name[row]];
  }

  what(row) {
    const slot = this.rows.slots[this.rows.slot[row]];
    return `${this.role(row)}${slot ? ` [${slot}]` : ""}`;
  }

  call(row) {
    const parts = [];
    if (this.rows.microbatch[row] >= 0) parts.push(`mb${this.rows.microbatch[row]}`);
    if (this.manyRanks() && this.rows.rank[row] >= 0) parts.push(`r${this.rows.rank[row]}`);
    if (this.rows.occurrence[row]) parts.push(`call ${this.rows.occurrence[row]}`);
    if (this.rows.recomputed[row]) parts.push("recomputed");
    return parts.join(" ");
  }

  manyRanks() {
    this.many ??= this.rows.rank.some((rank) => rank > 0);
    return this.many;
  }

  label(row) {
    return [this.name(row) || "(model)", this.what(row), this.call(row)].filter(Boolean).join("  ");
  }

  code(row, column) {
    return this.cells[row * this.width + column];
  }

  verdict(code) {
    return this.grid.verdicts[code & 7];
  }

  stepText(column) {
    const [from, to] = this.grid.columns[column];
    return from < 0 ? "init" : from === to ? String(from) : `${from}–${to}`;
  }

  // The error of a code in units of tolerance, as a range.
  amount(code) {
    const level = levelOf(code), verdict = code & 7, bound = code > 127;
    if (verdict !== 2 && verdict !== 5) return "";
    if (!level || (bound && level === 1)) return "size not known";
    const unit = this.grid.exact ? "roundings" : "× tolerance";
    const edge = (n) => (this.levels[n] > 999 ? powerText(this.levels[n]) : digits(this.levels[n]));
    if (bound) return `at least ${edge(level - 2)} ${unit}`;
    if (level > this.levels.length) return `beyond ${edge(level - 2)} ${unit}`;
    return level === 1 ? `up to ${edge(0)} ${unit}` : `${edge(level - 2)} to ${edge(level - 1)} ${unit}`;
  }

  refilter() {
    const words = this.filter.text.toLowerCase().split(/\s+/).filter(Boolean);
    this.shown = [];
    for (let row = 0; row < this.height; row++) {
      if (this.filter.apart && (this.worst[row] & 7) < 2) continue;
      if (this.filter.phase && this.phase(row) !== this.filter.phase) continue;
      if (words.every((word) => this.searched[row].includes(word))) this.shown.push(row);
    }
    for (const listener of this.listeners.filter) listener();
  }

  set(changes) {
    Object.assign(this.filter, changes);
    this.refilter();
  }

  select(row, column, scroll = true) {
    this.selected = { row, column };
    if (this.shown.indexOf(row) < 0) this.set({ text: "", phase: "", apart: false });
    for (const listener of this.listeners.select) listener(row, column, scroll);
  }

  detail(row, column) {
    return this.details.get(row * this.width + column);
  }

  // The next shown row that differs, in a direction; null: there is none.
  next(direction) {
    const at = this.selected ? this.shown.indexOf(this.selected.row) : -1;
    for (let n = at + direction; n >= 0 && n < this.shown.length; n += direction) {
      if ((this.worst[this.shown[n]] & 7) > 2) return this.shown[n];
    }
    return null;
  }
}

// Verdict first, then the level of the error.
function worse(one, two) {
  return (one & 7) > (two & 7) || ((one & 7) === (two & 7) && (one & 127) > (two & 127));
}

async function readRecords(grid, details) {
  const rows = await unpackJson(grid.rows);
  const cells = grid.size[0] * grid.size[1] ? await unpack(grid.cells) : new Uint8Array(0);
  const found = new Map();
  for (const chunk of details.chunks) {
    for (const one of await unpackJson(chunk)) found.set(one[0] * grid.size[1] + one[1], one);
  }
  return new Records(grid, rows, cells, found);
}
