// 4: error along depth: outputs forward, gradients backward, dW beside them.
function showGrowth(growth, open) {
  const host = byId("growth-body");
  if (!growth.modules.length || !growth.steps.length) {
    add(host, make("p", { class: "empty" }, "No module's outputs or gradients were recorded in a compared step."));
    return;
  }
  let step = growth.steps[0];
  const place = make("div", {}), readout = make("p", { class: "readout", role: "status" });
  const buttons = growth.steps.map((one) => make("button", { type: "button", "aria-pressed": String(one === step), onclick: () => choose(one) }, `step ${one}`));
  const again = figure(place, (width) => growthOf(growth, step, width, readout, open));
  function choose(one) {
    step = one;
    buttons.forEach((button, n) => button.setAttribute("aria-pressed", String(growth.steps[n] === step)));
    again();
  }
  add(host, make("div", { class: "filters" }, buttons), make("ul", { class: "legend" },
    make("li", {}, "× beyond tolerance"), make("li", {}, "○ within, or the same bits (on the line at 0)"), make("li", {}, "◇ dW"), make("li", {}, "paler: an estimate, or a bound below")), place, readout);
  const worst = Object.values(growth.points).flat().reduce((found, point) => Math.max(found, number(point[1]) || 0), 0);
  byId("growth-brief").textContent = worst > 0 ? `largest relative error shown: ${digits(worst, 2)}` : Object.values(growth.points).flat().every((point) => point[1] === 0) ? "the same bits everywhere" : "no size is known";
  if (growth.left_out) add(host, make("p", { class: "says" }, `${plural(growth.left_out, "module")} beyond these are not drawn.`));
}

function growthOf(growth, step, width, readout, open) {
  const height = 350, left = 58, right = width - 14;
  const panels = [["forward", "forward: outputs", 20, 158, ["forward"]], ["backward", "backward: gradients and dW", 192, 312, ["backward", "wgrad"]]];
  const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Relative error along the depth of the model at step ${step}, forward and backward` });
  const x = linear([0, Math.max(growth.modules.length - 1, 1)], [left + 10, right - 10]);
  const at = (series) => growth.points[`${step} ${series}`] || [];
  const sizes = panels.flatMap((panel) => panel[4].flatMap(at)).map((point) => number(point[1])).filter((value) => value > 0 && Number.isFinite(value));
  const least = Math.max(0, ...sizes) / 1e10;
  for (const [, title, top, bottom, names] of panels) {
    const points = names.flatMap(at), y = logarithmic(sizes.map((size) => Math.max(size, least)), [bottom, top + 6]);
    add(picture, text(left, top - 5, title, { class: "strong" }));
    for (const tick of y.ticks) add(picture, segment(left, y(tick), right, y(tick), "grid"), text(left - 6, y(tick) + 4, powerText(tick), { "text-anchor": "end" }));
    add(picture, segment(left, y.zero, right, y.zero, "axis"), text(left - 6, y.zero + 4, "0", { "text-anchor": "end" }));
    if (!points.length) add(picture, text((left + right) / 2, (top + bottom) / 2, "not recorded in this step", { "text-anchor": "middle" }));
    for (const name of names) for (const point of at(name)) add(picture, pointOf(growth, name, point, x, y, readout, open));
  }
  add(picture, ...layerTicks(growth.modules, x, 330, 20, 312));
  return picture;
}

function pointOf(growth, series, [module, error, verdict, estimated], x, y, readout, open) {
  const value = number(error), at = [x(module), value === null ? y.zero : y(Number.isNaN(value) ? Infinity : value)];
  const apart = verdict > 2, colour = apart ? css("bad") : css("candidate");
  const words = `${growth.modules[module] || "(model)"}, ${series}: ${value === null ? "size not known" : digits(value, 3)}${estimated ? " (estimate or bound)" : ""}, ${Object.values(WORDS)[verdict]}`;
  const group = draw("g", { class: "point", opacity: estimated ? 0.6 : 1, css: { cursor: "pointer" }, onpointerenter: () => { readout.textContent = words; }, onclick: () => open(growth.modules[module], series) }, draw("title", {}, words));
  const [cx, cy] = at;
  if (series === "wgrad") group.append(draw("path", { d: `M${cx} ${cy - 5}l5 5l-5 5l-5 -5z`, fill: apart ? colour : css("paper"), stroke: colour, "stroke-width": 1.4 }));
  else if (apart) group.append(draw("path", { d: `M${cx - 3.5} ${cy - 3.5}l7 7m0 -7l-7 7`, stroke: colour, "stroke-width": 2, fill: "none" }));
  else group.append(draw("circle", { cx, cy, r: 3.2, fill: css("paper"), stroke: colour, "stroke-width": 1.4 }));
  group.append(draw("rect", { x: cx - 6, y: cy - 8, width: 12, height: 16, fill: "transparent" }));
  return group;
}

// Ticks where a layer begins; numbers of layers come before other names where room is short.
function layerTicks(modules, x, y, top, bottom) {
  const starts = [], taken = [], ticks = [];
  let last = null;
  modules.forEach((name, n) => {
    const found = /^(.*?\.)?(\d+)(?=\.|$)/.exec(name);
    const layer = found ? found[0] : name.split(".")[0] || "(model)";
    if (layer === last) return;
    last = layer;
    starts.push({ at: x(n), words: found ? found[2] : layer.slice(0, 18), layer: Boolean(found) });
  });
  for (const start of [...starts].sort((a, b) => b.layer - a.layer)) {
    ticks.push(segment(start.at - 6, top, start.at - 6, bottom, "grid"));
    const wide = start.words.length * 6.4 + 8, late = start.at + wide > x(modules.length - 1) + 24;
    const from = late ? start.at + 8 - wide : start.at - 4;
    if (taken.some(([a, b]) => from < b && from + wide > a)) continue;
    taken.push([from, from + wide]);
    ticks.push(text(late ? start.at + 8 : from, y, start.words, { "text-anchor": late ? "end" : "start" }));
  }
  ticks.push(text(x(0) - 4, y + 16, "modules in the order of the forward pass, numbers are layers; the backward pass goes from right to left"));
  return ticks;
}
