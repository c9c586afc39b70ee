// 2: records in execution order × steps, a scrolled list with a map of the whole beside it.
const ROW = 16, TOP = 22;

class HeatMap {
  constructor(records) {
    this.records = records;
    this.host = byId("heatmap-body");
    this.build();
    records.listeners.filter.push(() => this.refresh());
    records.listeners.select.push((row, column, scroll) => this.reveal(row, scroll));
    redraws.push(() => this.refresh());
    new ResizeObserver(() => this.refresh()).observe(this.scroller);
    this.refresh();
  }

  build() {
    this.count = make("span", { class: "count", role: "status" });
    this.readout = make("p", { class: "readout", id: "heatmap-readout", role: "status" });
    this.axis = make("canvas", { class: "axis-canvas", "aria-hidden": "true" });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.spacer = make("div", {});
    this.scroller = make("div", {
      class: "scroller", id: "heatmap-list", tabindex: "0", role: "application", "aria-describedby": "heatmap-readout",
      "aria-label": "Heat map of records by steps. Arrow keys move, Enter opens the tensor, n and p go to the next and previous record that differs.",
      onscroll: () => this.paint(), onclick: (event) => this.click(event), onpointermove: (event) => this.hover(event),
      onpointerleave: () => this.say(), onkeydown: (event) => this.key(event),
    }, this.canvas, this.spacer);
    this.mini = make("canvas", { class: "mini", role: "img", "aria-label": "The whole heat map; click to go there", title: "the whole map: click to go there" });
    const jump = (event) => this.jump(event);
    this.mini.addEventListener("pointerdown", jump);
    this.mini.addEventListener("pointermove", (event) => event.buttons && jump(event));
    this.detail = make("aside", { class: "detail", id: "detail", tabindex: "-1", "aria-label": "The selected tensor" });
    this.heat = make("div", { class: "heat" }, make("div", {}, this.axis, this.scroller), make("div", { class: "mini-box" }, this.mini), this.readout);
    add(this.host, this.legend(), this.filters(), make("div", { class: "explore" }, this.heat, this.detail));
  }

  legend() {
    const list = make("ul", { class: "legend" });
    const again = () => {
      const colours = palette();
      const ramp = (verdict, from, to) => make("span", { class: "ramp", "aria-hidden": "true" }, range(from, to).map((level) => make("i", { css: { background: painted(colours[verdict + 8 * level]) } })));
      const unit = this.records.grid.exact ? "from 0.01 to 10⁸ roundings of its dtype" : "from 1 to 10⁸ times the tolerance";
      list.replaceChildren(
        make("li", {}, chip("identical"), "same bits"),
        make("li", {}, chip("within_tolerance"), ramp(2, 1, 6), "within tolerance"),
        make("li", {}, chip("diverged"), ramp(5, apartFrom, 16), `diverged, ${unit}`),
        make("li", {}, chip("incomparable"), "incomparable"),
        make("li", {}, chip("missing"), "missing"),
        make("li", {}, "blank: not recorded in that step"));
    };
    redraws.push(again);
    again();
    return list;
  }

  filters() {
    const { records } = this;
    const phases = [...new Set(records.rows.phase)].sort((a, b) => a - b).map((n) => records.grid.phases[n]);
    this.phases = make("select", { "aria-label": "Phase", onchange: (event) => records.set({ phase: event.target.value }) },
      make("option", { value: "" }, "every phase"), phases.map((phase) => make("option", { value: phase }, phase)));
    this.apart = make("button", { type: "button", "aria-pressed": "false", title: "f", onclick: () => records.set({ apart: !records.filter.apart }) }, "only what differs");
    const found = records.grid.origins;
    const origins = make("div", { class: "origins", "aria-label": "Origins" }, found.slice(0, 6).map((origin) =>
      make("button", { type: "button", title: `origin: ${origin.moment}; ${origin.difference}`, onclick: () => this.open(origin.cell[0], origin.cell[1]) }, `◆ ${origin.name}`)),
    found.length > 6 ? make("span", { class: "quiet" }, `and ${plural(found.length - 6, "more origin")} (key o)`) : null);
    const said = records.grid.folded.length ? make("p", { class: "says" }, `${records.grid.folded.join("; ")}.`) : null;
    return make("div", {}, said, found.length ? origins : null, make("div", { class: "filters" }, this.phases, this.apart, this.count));
  }

  refresh() {
    const { records } = this;
    const whole = matchMedia("print").matches;
    this.size = whole ? 420 : clamp(records.shown.length * ROW, 60, 608);
    this.scroller.style.height = `${this.size}px`;
    this.spacer.style.height = whole ? "0" : `${Math.max(records.shown.length * ROW - this.size, 0)}px`;
    this.phases.value = records.filter.phase;
    this.apart.setAttribute("aria-pressed", String(records.filter.apart));
    this.count.textContent = `${grouped(records.shown.length)} of ${plural(records.height, "record")} × ${plural(records.width, "step")}`;
    this.colours = palette();
    this.paint();
    this.paintMini();
  }

  // Where things are, by the width that there is.
  measure() {
    const wide = this.scroller.clientWidth, columns = this.records.width;
    if (matchMedia("print").matches) {
      const left = 76, cells = Math.max(wide - left, 1);
      return { wide, cell: cells / Math.max(columns, 1), cells, left, spare: 0 };
    }
    const room = Math.max(wide - clamp(wide * 0.42, 150, 430), 40);
    const cell = Math.min(room / Math.max(columns, 1), 40);
    const cells = Math.max(cell * columns, 1);
    const spare = room - cells > 210 ? 210 : 0;
    return { wide, cell, cells, left: wide - cells - spare - 4, spare };
  }

  context(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(Math.round(width * ratio), 1);
    canvas.height = Math.max(Math.round(height * ratio), 1);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d", { willReadFrequently: canvas === this.mini });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.direction = "ltr";
    return context;
  }

  paint() {
    const { records } = this, place = this.measure();
    if (place.wide < 20) return;
    this.paintAxis(place);
    const context = this.context(this.canvas, place.wide, this.size);
    if (matchMedia("print").matches) {
      this.paintWhole(context, place.left, 0, place.cells, this.size);
      this.paintPhases(context, place);
      return;
    }
    const from = Math.floor(this.scroller.scrollTop / ROW);
    const to = Math.min(from + Math.ceil(this.size / ROW) + 1, records.shown.length);
    if (!records.shown.length) {
      context.fillStyle = css("quiet");
      context.font = `13px ${css("sans")}`;
      context.fillText("no record fits the search and filters", 12, 34);
    }
    for (let n = from; n < to; n++) this.paintRow(context, place, records.shown[n], n * ROW - this.scroller.scrollTop);
    if (this.kept) this.frame(this.scroller.scrollTop);
  }

  paintRow(context, place, row, y) {
    const { records } = this, chosen = records.selected && records.selected.row === row;
    if (chosen) {
      context.fillStyle = css("accent-soft");
      context.fillRect(0, y, place.wide, ROW);
    }
    context.fillStyle = css(phaseColour(records.phase(row)));
    context.fillRect(0, y, 3, ROW);
    context.textBaseline = "middle";
    const quiet = `${records.what(row)} ${records.call(row)}`.trim();
    context.font = `11px ${css("sans")}`;
    const end = context.measureText(quiet).width;
    context.fillStyle = css("quiet");
    context.textAlign = "right";
    context.fillText(quiet, place.left - 8, y + ROW / 2 + 1);
    context.textAlign = "left";
    context.font = `11.5px ${css("mono")}`;
    context.fillStyle = css("ink");
    context.fillText(shortened(context, records.name(row) || "(model)", place.left - 26 - end), 9, y + ROW / 2 + 1);
    this.paintCells(context, place, row, y, chosen);
    if (place.spare) {
      context.font = `11px ${css("sans")}`;
      context.fillStyle = (records.worst[row] & 7) > 2 ? css("bad") : css("faint");
      context.fillText(this.words(row), place.left + place.cells + 12, y + ROW / 2 + 1);
    }
  }

  words(row) {
    const { records } = this, code = records.worst[row], verdict = records.verdict(code);
    const said = `${WORDS[verdict]}${records.amount(code) ? `, ${records.amount(code)}` : ""}`;
    return verdict === "identical" ? "identical" : said;
  }

  paintCells(context, place, row, y, chosen) {
    const { records } = this, { cell, left } = place;
    if (cell < 1) {
      for (let x = 0; x < place.cells; x++) {
        let code = 0;
        for (let column = Math.floor(x / cell); column < Math.min((x + 1) / cell, records.width); column++) {
          const one = records.code(row, column);
          if (worse(one, code)) code = one;
        }
        context.fillStyle = painted(this.colours[code]);
        context.fillRect(left + x, y, 1, ROW - 1);
      }
    } else {
      const gap = cell > 5 ? 1 : 0;
      for (let column = 0; column < records.width; column++) {
        const code = records.code(row, column), x = left + column * cell;
        if (!code) continue;
        context.fillStyle = painted(this.colours[code]);
        context.fillRect(x, y, cell - gap, ROW - 1);
        if (cell >= 12 && (code & 7) > 1) {
          context.fillStyle = inkOn(this.colours[code]);
          context.font = `600 10px ${css("mono")}`;
          context.textAlign = "center";
          context.fillText(SIGNS[records.verdict(code)], x + (cell - gap) / 2, y + ROW / 2 + 1);
          context.textAlign = "left";
        }
      }
    }
    if (chosen) {
      context.strokeStyle = css("ink");
      context.lineWidth = 1.5;
      context.strokeRect(left + records.selected.column * cell - 0.5, y - 0.5, Math.max(cell, 3), ROW);
    }
  }

  paintAxis(place) {
    const context = this.context(this.axis, place.wide, TOP), { records } = this;
    context.font = `11px ${css("sans")}`;
    context.fillStyle = css("quiet");
    context.textAlign = "right";
    if (place.left > 150) context.fillText("record, in execution order", place.left - 34, 14);
    context.textAlign = "center";
    const every = Math.max(Math.ceil(34 / place.cell), 1);
    for (let column = 0; column < records.width; column += every) context.fillText(records.stepText(column), place.left + (column + 0.5) * place.cell, 14);
    if (place.spare) {
      context.textAlign = "left";
      context.fillText("step · worst", place.left + place.cells + 12, 14);
    }
    const first = records.grid.origins[0];
    if (first) {
      context.fillStyle = css("bad");
      context.textAlign = "center";
      context.fillText("▼", place.left + (first.cell[1] + 0.5) * place.cell, 22);
    }
  }

  // Every shown row and column in a rectangle, each pixel the worst of what it covers.
  paintWhole(context, x0, y0, width, height) {
    const { records } = this, rows = records.shown.length, columns = records.width;
    const high = Math.min(height, rows * ROW), wide = Math.floor(width);
    for (let y = 0; y < high; y++) {
      const from = Math.floor((y * rows) / high), to = Math.max(Math.floor(((y + 1) * rows) / high), from + 1);
      let start = 0, before = -1;
      for (let x = 0; x <= wide; x++) {
        const a = Math.floor((x * columns) / wide), b = Math.max(Math.floor(((x + 1) * columns) / wide), a + 1);
        const code = x < wide ? this.worstIn(from, to, a, b) : -2;
        if (code !== before) {
          if (before > 0) {
            context.fillStyle = painted(this.colours[before]);
            context.fillRect(x0 + start, y0 + y, x - start, 1);
          }
          [start, before] = [x, code];
        }
      }
    }
  }

  // On paper: names of the phases beside the whole map, where each begins.
  paintPhases(context, place) {
    const { records } = this, rows = records.shown.length, high = Math.min(this.size, rows * ROW);
    let last = null, edge = -20;
    context.font = `11px ${css("sans")}`;
    records.shown.forEach((row, n) => {
      const phase = passOf(records.phase(row)), y = (n / rows) * high;
      context.fillStyle = css(phaseColour(records.phase(row)));
      context.fillRect(place.left - 6, y, 4, Math.max(high / rows, 1));
      if (phase === last || y < edge) return;
      [last, edge] = [phase, y + 13];
      context.fillStyle = css("quiet");
      context.fillText(phase, 2, y + 10);
    });
  }

  worstIn(from, to, a, b) {
    let found = 0;
    for (let n = from; n < to; n++) {
      for (let column = a; column < b; column++) {
        const code = this.records.code(this.records.shown[n], column);
        if (worse(code, found)) found = code;
      }
    }
    return found;
  }

  paintMini() {
    const context = this.context(this.mini, 74, this.size);
    this.mini.style.marginTop = `${TOP}px`;
    if (this.records.width) this.paintWhole(context, 0, 0, 74, this.size);
    this.kept = context.getImageData(0, 0, this.mini.width, this.mini.height);
    this.frame(this.scroller.scrollTop);
  }

  // The part of the whole map that the list shows.
  frame(scrolled) {
    const all = this.records.shown.length * ROW, context = this.mini.getContext("2d");
    context.putImageData(this.kept, 0, 0);
    if (all <= this.size) return;
    context.strokeStyle = css("ink");
    context.lineWidth = 1.5;
    context.strokeRect(0.75, (scrolled / all) * this.size + 0.75, 72.5, Math.max((this.size / all) * this.size, 6));
  }

  jump(event) {
    const share = (event.clientY - this.mini.getBoundingClientRect().top) / this.size;
    this.scroller.scrollTop = share * this.records.shown.length * ROW - this.size / 2;
  }

  at(event) {
    const box = this.scroller.getBoundingClientRect(), place = this.measure();
    const n = Math.floor((event.clientY - box.top - 1 + this.scroller.scrollTop) / ROW);
    const column = Math.floor((event.clientX - box.left - 1 - place.left) / place.cell);
    const row = this.records.shown[n];
    if (row === undefined) return null;
    return { row, column: column >= 0 && column < this.records.width ? column : null };
  }

  click(event) {
    const found = this.at(event);
    if (found) this.records.select(found.row, found.column ?? telling(this.records, found.row), false);
  }

  hover(event) {
    const found = this.at(event);
    this.scroller.style.cursor = found ? "pointer" : "default";
    this.say(found && (found.column === null ? { row: found.row, column: telling(this.records, found.row) } : found));
  }

  say(place = this.records.selected) {
    if (!place) {
      this.readout.textContent = "";
      return;
    }
    const code = this.records.code(place.row, place.column), amount = this.records.amount(code);
    this.readout.textContent = `${this.records.label(place.row)} · ${this.records.phase(place.row)} · step ${this.records.stepText(place.column)}: ${WORDS[this.records.verdict(code)]}${amount ? `, ${amount}` : ""}`;
  }

  key(event) {
    const { records } = this, moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-20, 0], PageDown: [20, 0] };
    if (event.key === "Enter") this.detail.focus();
    if (!moves[event.key] || !records.shown.length) return;
    event.preventDefault();
    const now = records.selected || { row: records.shown[0], column: 0 };
    const at = Math.max(records.shown.indexOf(now.row), 0), [down, across] = moves[event.key];
    records.select(records.shown[clamp(at + down, 0, records.shown.length - 1)], clamp(now.column + across, 0, records.width - 1));
  }

  open(row, column) {
    if (row < 0) return;
    this.records.select(row, column);
    this.scroller.scrollIntoView({ block: "nearest" });
  }

  reveal(row, scroll) {
    const at = this.records.shown.indexOf(row) * ROW;
    if (scroll && (at < this.scroller.scrollTop || at + ROW > this.scroller.scrollTop + this.size)) this.scroller.scrollTop = at - this.size / 3;
    this.paint();
    this.say();
  }
}

// The column that tells most of a row: where it first differs, else the last that has it.
function telling(records, row) {
  if (records.first[row] >= 0) return records.first[row];
  let found = 0;
  for (let column = 0; column < records.width; column++) if (worse(records.code(row, column), records.code(row, found))) found = column;
  return found;
}

function passOf(phase) {
  const passes = { init: "start", batch: "forward", fprop: "forward", loss: "forward", clip: "update", optimizer: "update" };
  return passes[phase] || "backward";
}

function phaseColour(phase) {
  return phase === "fprop" || phase === "batch" || phase === "loss" ? "fprop" : phase === "dgrad" ? "dgrad" : phase === "wgrad" || phase === "accumulate" || phase === "reduce" ? "wgrad" : "other";
}

// A name that fits, its end kept: that is where names differ.
function shortened(context, name, room) {
  if (context.measureText(name).width <= room) return name;
  const letters = [...name].slice(-200), wide = context.measureText("m").width;
  return `…${letters.slice(-Math.max(Math.floor(room / wide) - 1, 4)).join("")}`;
}
