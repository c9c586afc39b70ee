// 3: the model as a tree, coloured by the worst verdict of each phase.
const PARTS = [
  ["start", ["init"]], ["fprop", ["batch", "fprop", "loss"]], ["dgrad", ["dgrad"]],
  ["wgrad", ["wgrad", "accumulate", "reduce"]], ["update", ["clip", "optimizer"]],
];

class Node3 {
  constructor(name, path, parent) {
    Object.assign(this, { name, path, parent, children: new Map(), cells: {}, level: parent ? parent.level + 1 : 0, open: false });
  }
}

class Tree {
  constructor(records, open) {
    this.records = records;
    this.openCell = open;
    this.root = this.grow();
    this.parts = PARTS.filter(([name]) => this.root.cells[name]);
    this.host = byId("tree-body");
    this.body = make("tbody", {});
    this.active = null;
    const open_ = () => [this.root, ...this.root.children.values()];
    for (const node of open_()) node.open = true;
    const first = records.grid.origins[0];
    if (first && first.cell[0] >= 0) this.unfold(records.name(first.cell[0]));
    const buttons = make("div", { class: "filters" },
      make("button", { type: "button", onclick: () => this.foldAll(true) }, "open all"),
      make("button", { type: "button", onclick: () => this.foldAll(false) }, "fold all"),
      make("button", { type: "button", onclick: () => this.unfoldApart() }, "open what differs"));
    add(this.host, buttons, make("div", { class: "tree" }, make("table", { role: "treegrid", "aria-label": "The model by modules" },
      make("colgroup", {}, make("col", {}), this.parts.map(() => make("col", { class: "phase" }))),
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "module"), this.parts.map(([name, phases]) => make("th", { scope: "col", title: phases.join(", ") }, name)))), this.body)));
    this.body.addEventListener("keydown", (event) => this.key(event));
    records.listeners.filter.push(() => this.render());
    redraws.push(() => this.render());
    this.render();
    const ends = [...this.leaves(this.root)], apart = ends.filter((node) => (this.worstOf(node) & 7) > 2).length;
    byId("tree-brief").textContent = apart ? `${grouped(apart)} of its ${grouped(ends.length)} smallest parts differ somewhere` : "nothing differs beyond tolerance";
  }

  grow() {
    const root = new Node3("model", "", null), { records } = this;
    for (let row = 0; row < records.height; row++) {
      let node = root;
      const part = PARTS.find(([, phases]) => phases.includes(records.phase(row)))[0];
      this.add(node, part, row);
      const name = records.name(row);
      let path = "";
      for (const word of name ? name.split(".") : []) {
        path = path ? `${path}.${word}` : word;
        if (!node.children.has(word)) node.children.set(word, new Node3(word, path, node));
        node = node.children.get(word);
        this.add(node, part, row);
        if (node.level > 40) break;
      }
    }
    return root;
  }

  add(node, part, row) {
    const cell = (node.cells[part] ??= { code: 0, row, apart: 0, all: 0 });
    const code = this.records.worst[row];
    cell.all++;
    if ((code & 7) > 2) cell.apart++;
    if (worse(code, cell.code)) Object.assign(cell, { code, row });
  }

  worstOf(node) {
    return Object.values(node.cells).reduce((found, cell) => (worse(cell.code, found) ? cell.code : found), 0);
  }

  *leaves(node) {
    if (!node.children.size) yield node;
    for (const child of node.children.values()) yield* this.leaves(child);
  }

  *everyNode(node) {
    yield node;
    for (const child of node.children.values()) yield* this.everyNode(child);
  }

  unfold(name) {
    let node = this.root;
    node.open = true;
    for (const word of name.split(".")) {
      node = node.children.get(word);
      if (!node) return;
      node.open = true;
    }
  }

  foldAll(open) {
    const many = [...this.everyNode(this.root)];
    for (const node of many) node.open = open || node === this.root;
    this.render();
  }

  unfoldApart() {
    for (const node of this.everyNode(this.root)) node.open = (this.worstOf(node) & 7) > 2 || node === this.root;
    this.render();
  }

  // Nodes that are shown: what is unfolded, or what a search finds and all above it.
  *visible(node, words) {
    const found = words.length ? this.matches(node, words) : true;
    if (!found) return;
    yield node;
    if (node.open || words.length) for (const child of node.children.values()) yield* this.visible(child, words);
  }

  matches(node, words) {
    const path = node.path.toLowerCase();
    if (words.every((word) => path.includes(word))) return true;
    for (const child of node.children.values()) if (this.matches(child, words)) return true;
    return false;
  }

  render() {
    const words = this.records.filter.text.toLowerCase().split(/\s+/).filter((word) => /[a-z0-9_.]/.test(word));
    const fits = words.length && this.matches(this.root, words) ? words : [];
    const colours = palette();
    this.listed = [];
    for (const node of this.visible(this.root, fits)) if (this.listed.push(node) >= 3000) break;
    this.body.replaceChildren(...this.listed.map((node) => this.rowOf(node, fits, colours)));
    if (!this.active || !this.listed.includes(this.active)) this.active = this.listed[0];
    this.mark();
  }

  rowOf(node, words, colours) {
    const found = words.length && words.every((word) => node.path.toLowerCase().includes(word));
    const many = node.children.size, open = many && (node.open || words.length);
    const row = make("tr", { role: "row", class: found ? "found" : null, "aria-level": node.level + 1, "aria-expanded": many ? String(Boolean(open)) : null, tabindex: "-1", title: node.path });
    const twist = make("span", { class: "twist", "aria-hidden": "true" }, many ? (open ? "▾" : "▸") : "");
    const name = make("td", { role: "rowheader", css: { paddingLeft: `${8 + Math.min(node.level, 14) * 16}px` }, onclick: () => this.toggle(node) }, twist, make("span", { class: "node" }, node.name.slice(0, 120)));
    add(row, name, ...this.parts.map(([part]) => make("td", { role: "gridcell" }, this.cellOf(node, part, colours))));
    row.node = node;
    return row;
  }

  cellOf(node, part, colours) {
    const cell = node.cells[part];
    if (!cell) return "";
    const verdict = this.records.verdict(cell.code), colour = colours[cell.code];
    const words = `${part} of ${node.path || "the model"}: ${WORDS[verdict]}; ${cell.apart} of ${plural(cell.all, "record")} differ`;
    return make("button", { class: "cell", type: "button", tabindex: "-1", title: words, "aria-label": words, css: { background: painted(colour), color: inkOn(colour) }, onclick: (event) => { event.stopPropagation(); this.openCell(cell.row); } }, SIGNS[verdict], cell.apart ? ` ${grouped(cell.apart)}` : "");
  }

  toggle(node) {
    this.active = node;
    node.open = !node.open;
    this.render();
    this.focus();
  }

  mark() {
    for (const row of this.body.children) {
      const here = row.node === this.active;
      row.setAttribute("aria-selected", String(here));
      row.tabIndex = here ? 0 : -1;
    }
  }

  focus() {
    const row = [...this.body.children].find((one) => one.node === this.active);
    if (row) row.focus({ preventScroll: false });
  }

  key(event) {
    const at = this.listed.indexOf(this.active), node = this.active;
    const go = (one) => { if (one) { this.active = one; this.mark(); this.focus(); } };
    if (event.key === "ArrowDown") go(this.listed[at + 1]);
    else if (event.key === "ArrowUp") go(this.listed[at - 1]);
    else if (event.key === "ArrowRight") node.children.size && !node.open ? this.toggle(node) : go(this.listed[at + 1]);
    else if (event.key === "ArrowLeft") node.open && node.children.size ? this.toggle(node) : go(node.parent);
    else if (event.key === "Enter") {
      const cells = Object.values(node.cells).sort((a, b) => (worse(a.code, b.code) ? -1 : 1));
      if (cells.length) this.openCell(cells[0].row);
    } else return;
    event.preventDefault();
  }
}
