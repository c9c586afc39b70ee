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
  byId("growth-brief").textContent = worst > 0 ? `largest relative error shown: ${digits(worst, 2)}` : "no size is known, or everything is equal";
  if (growth.left_out) add(host, make("p", { class: "says" }, `${plural(growth.left_out, "module")} beyond these are not drawn.`));
}

function growthOf(growth, step, width, readout, open) {
  const height = 360, left = 58, right = width - 14;
  const panels = [["forward", "forward: outputs", 20, 158, ["forward"]], ["backward", "backward: gradients and dW", 192, 312, ["backward", "wgrad"]]];
  const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Relative error along the depth of the model at step ${step}, forward and backward` });
  const x = linear([0, Math.max(growth.modules.length - 1, 1)], [left + 10, right - 10]);
  const at = (series) => growth.points[`${step} ${series}`] || [];
  for (const [, title, top, bottom, names] of panels) {
    const points = names.flatMap(at), y = logarithmic(points.map((point) => number(point[1])).filter((value) => value !== null), [bottom, top + 6]);
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

// Ticks where a layer begins.
function layerTicks(modules, x, y, top, bottom) {
  const ticks = [];
  let last = null, edge = -Infinity;
  modules.forEach((name, n) => {
    const found = /^(.*?\.)?(\d+)(?=\.|$)/.exec(name);
    const layer = found ? found[0] : name.split(".")[0] || "(model)";
    if (layer === last) return;
    last = layer;
    ticks.push(segment(x(n) - 3, top, x(n) - 3, bottom, "grid"));
    const words = found ? `${found[2]}` : layer.slice(0, 18);
    const wide = words.length * 6.2 + 8;
    if (x(n) - 3 < edge) return;
    edge = x(n) - 3 + wide;
    ticks.push(text(x(n) - 3, y, words));
  });
  ticks.push(text(x(0) - 3, y + 16, "modules in the order of the forward pass; numbers are layers. The backward pass goes from right to left."));
  return ticks;
}
