// 1: loss and grad norm of both runs, their difference below.
function showCurves(curves) {
  const host = byId("curves-body");
  const names = ["loss", "grad_norm"].filter((name) => curves[name].some((side) => side.some((value) => value !== null)));
  const first = Object.entries(curves.first).filter(([, step]) => step !== null).map(([name, step]) => `${name.replace("_", " ")} from step ${step}`);
  byId("curves-brief").textContent = names.length ? (first.length ? `they differ: ${first.join(", ")}` : bothRecorded(curves, names) ? "no difference in the compared steps" : "one run alone recorded them") : "not recorded";
  if (!names.length) {
    add(host, make("p", { class: "empty" }, "Neither run recorded a loss or a grad norm."));
    return;
  }
  add(host, make("ul", { class: "legend" },
    make("li", {}, make("span", { class: "swatch" }), "baseline"),
    make("li", { class: "candidate" }, make("span", { class: "swatch" }), "candidate (dashed)"),
    curves.divergence === null ? null : make("li", {}, "▼ first divergence of any tensor"),
    curves.each > 1 ? make("li", {}, `of each ${curves.each} steps the one with the largest difference is drawn`) : null));
  const two = make("div", { class: names.length > 1 ? "two" : "" });
  add(host, two);
  for (const name of names) {
    const place = make("div", {}), readout = make("p", { class: "readout", "aria-live": "polite" });
    add(two, make("figure", {}, make("h3", {}, name.replace("_", " ")), place, readout));
    figure(place, (width) => curveOf(curves, name, width, readout));
  }
  add(host, asTable("as a table", () => curveTable(curves, names)));
}

function bothRecorded(curves, names) {
  return names.some((name) => curves[name].every((side) => side.some((value) => value !== null)));
}

function curveOf(curves, name, width, readout) {
  const height = 264, left = 54, right = width - 12, top = 20, split = 158, low = 176, bottom = 240;
  const steps = curves.steps, sides = curves[name].map((side) => side.map(number));
  const x = linear([steps[0], steps[steps.length - 1]], steps.length > 1 ? [left + 6, right - 6] : [left, right]);
  const finite = sides.flat().filter((value) => value !== null && Number.isFinite(value));
  const bounds = finite.length ? finite.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]) : [0, 1];
  const y = linear(bounds, [split - 6, top + 6]);
  const apart = steps.map((_, n) => relative(sides[0][n], sides[1][n]));
  const gap = logarithmic(apart.filter((value) => value !== null), [bottom, low + 4]);
  const label = `${name.replace("_", " ")} of baseline and candidate over ${plural(steps.length, "step")}, and their relative difference`;
  const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  add(picture, ...outsides(curves, x, left, right, top, bottom));
  for (const tick of y.ticks(4)) add(picture, segment(left, y(tick), right, y(tick), "grid"), text(left - 6, y(tick) + 4, digits(tick), { "text-anchor": "end" }));
  for (const tick of gap.ticks) add(picture, segment(left, gap(tick), right, gap(tick), "grid"), text(left - 6, gap(tick) + 4, powerText(tick), { "text-anchor": "end" }));
  add(picture, segment(left, gap.zero, right, gap.zero, "axis"), text(left - 6, gap.zero + 4, "0", { "text-anchor": "end" }));
  add(picture, text(left, low - 6, "relative difference"));
  for (const tick of wholeTicks(x, Math.min(steps.length, width / 70))) add(picture, text(x(tick), bottom + 18, tick, { "text-anchor": "middle" }));
  const dots = steps.length <= 60;
  SIDES.forEach((side, n) => {
    add(picture, draw("path", { class: `line ${side}`, d: pathOf(steps.map((step, k) => [x(step), sides[n][k] === null ? NaN : y(sides[n][k])])) }));
    steps.forEach((step, k) => {
      const value = sides[n][k];
      if (value === null) return;
      if (Number.isNaN(value) || !Number.isFinite(value)) add(picture, text(x(step), top + 4, Number.isNaN(value) ? "NaN" : "∞", { class: "marked", "text-anchor": "middle" }));
      else if (dots) add(picture, draw("circle", { class: `dot ${side}`, cx: x(step), cy: y(value), r: n ? 2.2 : 3.4 }));
    });
  });
  const equal = apart.every((value) => !value);
  add(picture, draw("path", { class: equal ? "line difference equal" : "line difference", d: pathOf(steps.map((step, k) => [x(step), apart[k] === null ? NaN : gap(apart[k])])) }));
  if (dots) steps.forEach((step, k) => apart[k] !== null && !Number.isNaN(apart[k]) && add(picture, draw("circle", { class: equal ? "dot difference equal" : "dot difference", cx: x(step), cy: gap(apart[k]), r: 2.4 })));
  add(picture, ...marksOf(curves, name, x, top, bottom, right));
  hoverOn(picture, curves, name, sides, x, readout, top, bottom);
  return picture;
}

function relative(one, two) {
  if (one === null || two === null) return null;
  if (Number.isNaN(one) && Number.isNaN(two)) return 0;
  if (one === two) return 0;
  return one === 0 ? Infinity : Math.abs(two - one) / Math.abs(one);
}

function outsides(curves, x, left, right, top, bottom) {
  if (!curves.compared) return [];
  const [from, to] = curves.compared, parts = [];
  const first = curves.steps[0], last = curves.steps[curves.steps.length - 1];
  if (first < from) parts.push([left, x(from - 0.5)]);
  if (last > to) parts.push([x(to + 0.5), right]);
  return parts.map(([a, b]) => draw("g", {}, draw("rect", { class: "outside", x: a, y: top, width: Math.max(b - a, 0), height: bottom - top }), text((a + b) / 2, top + 14, "not compared", { "text-anchor": "middle" })));
}

function marksOf(curves, name, x, top, bottom, right) {
  const marks = [];
  if (curves.divergence !== null) {
    const at = x(Math.max(curves.divergence, curves.steps[0]));
    marks.push(segment(at, top - 6, at, bottom, "mark"), text(at, top - 8, "▼", { class: "marked", "text-anchor": "middle" }));
    const words = curves.divergence < 0 ? "before the first step" : `step ${curves.divergence}`;
    marks.push(text(at > right - 90 ? at - 8 : at + 8, top - 8, words, { class: "marked", "text-anchor": at > right - 90 ? "end" : "start" }));
  }
  const step = curves.first[name];
  if (step !== null && step !== curves.divergence) marks.push(draw("path", { class: "mark", fill: "none", d: `M${x(step)} ${bottom}l-4 7h8z` }));
  return marks;
}

function hoverOn(picture, curves, name, sides, x, readout, top, bottom) {
  const line = segment(0, top, 0, bottom, "hover");
  line.style.visibility = "hidden";
  add(picture, line);
  picture.addEventListener("pointermove", (event) => {
    const wanted = x.inverse(event.clientX - picture.getBoundingClientRect().left);
    const n = curves.steps.reduce((best, step, k) => (Math.abs(step - wanted) < Math.abs(curves.steps[best] - wanted) ? k : best), 0);
    line.setAttribute("x1", x(curves.steps[n]));
    line.setAttribute("x2", x(curves.steps[n]));
    line.style.visibility = "visible";
    readout.textContent = `step ${curves.steps[n]}: ${digits(sides[0][n], 9)} baseline, ${digits(sides[1][n], 9)} candidate, relative difference ${digits(relative(sides[0][n], sides[1][n]), 3)}`;
  });
  picture.addEventListener("pointerleave", () => {
    line.style.visibility = "hidden";
    readout.textContent = "";
  });
}

function curveTable(curves, names) {
  const titles = ["step", ...names.flatMap((name) => SIDES.map((side) => `${name.replace("_", " ")} ${side}`))];
  const rows = curves.steps.map((step, n) => [step, ...names.flatMap((name) => curves[name].map((side) => digits(side[n], 9)))]);
  return tableOf(titles, rows, titles.map(() => "number"));
}
