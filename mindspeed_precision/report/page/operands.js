// 8: how the operands of a divergent GEMM lie in memory: the addresses of the first elements, and their order.
const CELL = 42, SHOWN = 5;

function showOperands(gemms) {
  const host = byId("operands-body");
  if (!gemms.length) {
    add(host, make("p", { class: "empty" }, "No dW of a GEMM is an origin here."));
    byId("operands-brief").textContent = "no GEMM diverges by itself";
    return;
  }
  const place = make("div", {}), choice = make("select", { "aria-label": "GEMM", onchange: () => again() }, gemms.map((gemm, n) => make("option", { value: n }, `${gemm.name}, ${gemm.moment}`.slice(0, 160))));
  add(host, gemms.length > 1 ? make("div", { class: "filters" }, choice) : null, place);
  const again = () => place.replaceChildren(gemmOf(gemms[Number(choice.value) || 0]));
  redraws.push(again);
  again();
  const lying = gemms[0].operands.filter((one) => !sameLayout(one[7], one[8])).map((one) => one[0]);
  byId("operands-brief").textContent = lying.length ? `${lying.join(" and ")} lie${lying.length === 1 ? "s" : ""} differently in memory` : "every operand lies alike on both sides";
}

function sameLayout(one, two) {
  return two === 0 || (one && two && JSON.stringify(one[2]) === JSON.stringify(two[2]));
}

function gemmOf(gemm) {
  if (!gemm.operands.length) return make("p", { class: "empty" }, "Its operands were not recorded.");
  const box = make("div", { class: "operands" });
  for (const [role, verdict, , , , , , one, two] of gemm.operands) {
    const alike = sameLayout(one, two), shown = alike ? [["both runs", one]] : [["baseline", one], ["candidate", two]];
    for (const [side, record] of shown) {
      if (!record) continue;
      const [shape, dtype, layout] = record;
      box.append(make("div", {}, make("h3", {}, `${role === "wgrad" ? "dW" : role}, ${side}`),
        make("p", {}, `${shape.join(" × ")} ${dtype}; values ${WORDS[verdict]}`),
        make("p", { class: alike ? "" : "notlike" }, layout ? `strides (${layout[0].join(", ")}), ${layout[1] ? "contiguous" : "not contiguous"}${layout[2] ? `, offset ${layout[2]}` : ""}${layout[3] ? `, format ${layout[3]}` : ""}` : "layout not recorded"),
        layout && shape.length ? memoryOf(shape, layout, `${role}, ${side}`) : null));
    }
  }
  return box;
}

// The first rows and columns of the last two dimensions, each with its address; the line follows memory.
function memoryOf(shape, layout, label) {
  const rows = Math.min(shape.length > 1 ? shape[shape.length - 2] : 1, SHOWN), columns = Math.min(shape[shape.length - 1], SHOWN);
  const strides = layout[0], down = shape.length > 1 ? strides[strides.length - 2] : 0, across = strides[strides.length - 1];
  const width = columns * CELL + 40, height = rows * 24 + 24;
  const words = Math.abs(across) <= Math.abs(down) || rows === 1 ? "rows" : "columns";
  const picture = draw("svg", { class: "memory", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${label}: neighbours in memory are neighbours along ${words}; strides ${strides.join(", ")}` });
  const cells = [];
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) cells.push({ row, column, address: layout[2] + row * down + column * across });
  const order = [...cells].sort((a, b) => a.address - b.address), most = Math.max(order.length - 1, 1);
  order.forEach((cell, n) => { cell.place = n / most; });
  const x = (column) => column * CELL + 1, y = (row) => row * 24 + 1;
  for (const cell of cells) {
    const colour = mixed([css("within-0"), css("within-1")], cell.place);
    add(picture, draw("rect", { x: x(cell.column), y: y(cell.row), width: CELL, height: 24, fill: painted(colour), "fill-opacity": 0.55 }));
  }
  const point = (cell) => `${x(cell.column) + CELL - 7} ${y(cell.row) + 19}`;
  order.slice(1).forEach((cell, n) => {
    const near = Math.abs(cell.column - order[n].column) + Math.abs(cell.row - order[n].row) === 1;
    add(picture, draw("path", { class: near ? "near" : "jump", d: `M${point(order[n])}L${point(cell)}` }));
  });
  for (const cell of cells) add(picture, text(x(cell.column) + CELL / 2 - 3, y(cell.row) + 13, cell.address > 99999 ? `${Math.round(cell.address / 1000)}k` : cell.address));
  if (shape[shape.length - 1] > columns) add(picture, text(columns * CELL + 14, y(0) + 14, "…"));
  if (shape.length > 1 && shape[shape.length - 2] > rows) add(picture, text(CELL / 2, rows * 24 + 14, "⋮"));
  return picture;
}
