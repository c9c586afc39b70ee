// The selected tensor: verdict, how far apart, both sides, exponents.
const METRICS = {
  tolerances: "of the tolerance", rel_frobenius: "relative error ‖b−a‖/‖a‖", max_abs_err: "largest absolute error", mean_abs_err: "mean absolute error",
  max_rel_err: "largest relative error", max_ulp: "largest distance, ulp", mismatched: "elements that differ", elements: "of so many",
  cosine: "cosine", scale: "best factor α", norm_change: "change of the norm", norm_ratio: "ratio of the norms", extreme_change: "change of the extremes",
  sketch_distance: "relative error (estimated)", sketch_low: "at least (estimated)", sketch_high: "at most (estimated)", permutation: "same elements, other order",
  worst_rows_rel_err: "relative error of the worst rows", worst_rows_first: "worst rows from", worst_rows_count: "worst rows, how many",
};

function showDetail(records, runs, row, column) {
  const host = byId("detail"), code = records.code(row, column), verdict = records.verdict(code);
  const found = records.detail(row, column);
  const origin = records.grid.origins.find((one) => one.cell[0] === row && one.cell[1] === column);
  const parts = [
    make("h3", {}, records.name(row) || "(model)"),
    make("p", { class: "where" }, [records.what(row), records.call(row), `in ${records.phase(row)}`, found ? (found[2] < 0 ? "before the first step" : `step ${found[2]}`) : `step ${records.stepText(column)}`].filter(Boolean).join(" · ")),
    make("p", { class: "verdict" }, chip(verdict, palette()[code]), WORDS[verdict], records.amount(code) ? `, ${records.amount(code)}` : ""),
  ];
  if (origin) parts.push(make("p", {}, `◆ An origin: ${origin.inputs}. It explains ${plural(origin.propagated, "more record")}.`));
  if (!found) parts.push(...notKept(records, runs, row, column, code));
  else parts.push(...sidesOf(records, runs, row, found));
  host.replaceChildren(...parts);
}

function notKept(records, runs, row, column, code) {
  if (!(code & 7)) return [make("p", {}, "No comparison here: neither run recorded it in this step.")];
  return [make("p", {}, "This file keeps the details of the most telling records only. The runs have the rest:"), commandOf(records, runs, row, records.grid.columns[column][0])];
}

function commandOf(records, runs, row, step) {
  const quoted = (word) => (/^[\w./:-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
  const name = records.name(row), lines = SIDES.map((side) => `mindspeed-precision show ${quoted(runs[side].path)} --fqn ${quoted(name || "")} --role ${records.role(row)} --step ${step}`);
  return make("pre", {}, lines.join("\n"));
}

function sidesOf(records, runs, row, found) {
  const [, , step, reason, metrics, one, two] = found;
  const left = one, right = two === 0 ? one : two;
  const parts = [];
  if (reason) parts.push(make("p", {}, reason));
  const known = Object.keys(METRICS).filter((name) => name in metrics);
  const others = Object.keys(metrics).filter((name) => !(name in METRICS));
  const lines = (names) => tableOf([], names.map((name) => [METRICS[name] || name.replaceAll("_", " "), make("td", { class: "number" }, metrics[name] === true ? "yes" : digits(metrics[name], 5))]));
  if (known.length + others.length) parts.push(make("h3", {}, "How far apart"), lines(known.slice(0, 6)));
  if (known.length > 6 || others.length) parts.push(asTable("all metrics", () => lines([...known.slice(6), ...others])));
  const single = (left || right)[0].every((size) => size === 1);
  if (!single && ((left && left[5]) || (right && right[5]))) {
    const place = make("div", {});
    parts.push(make("h3", {}, "Exponents"), place);
    requestAnimationFrame(() => place.isConnected && place.append(histogramOf(left && left[5], right && right[5], place.clientWidth, 150)));
  }
  parts.push(make("h3", {}, "Both sides"), pairTable(left, right));
  parts.push(make("h3", {}, "Look at it in the runs"), commandOf(records, runs, row, step));
  return parts;
}

function pairTable(left, right) {
  const sides = [left, right], rows = [];
  const add = (name, get) => {
    const [a, b] = sides.map((side) => (side ? get(side) : "not recorded"));
    if (a === null && b === null) return;
    const cell = (value) => make("td", { class: a === b ? "number" : "number apart" }, value === null ? "–" : value);
    rows.push([name, cell(a), cell(b)]);
  };
  add("shape", (side) => side[0].join(" × ") || "scalar");
  add("dtype", (side) => side[1]);
  add("strides", (side) => side[2] && `(${side[2][0].join(", ")})`);
  add("contiguous", (side) => side[2] && (side[2][1] ? "yes" : "no"));
  add("offset", (side) => side[2] && (side[2][2] ? String(side[2][2]) : null));
  add("format", (side) => side[2] && (side[2][3] || null));
  add("fingerprint", (side) => side[3] || "not known");
  ["minimum", "maximum", "mean", "norm (L2)"].forEach((name, n) => add(name, (side) => side[4] && digits(side[4][n], 8)));
  ["zeros", "NaN", "infinities"].forEach((name, n) => add(name, (side) => side[4] && grouped(side[4][4 + n])));
  add("elements kept", (side) => (side[6] ? "yes" : "no"));
  add("held by ranks", (side) => (side[8].length ? side[8].join(", ") : null));
  add("note", (side) => side[7] || null);
  return tableOf(["", "baseline", "candidate"], rows, ["", "number", "number"]);
}
