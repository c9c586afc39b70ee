// 5: exponent histograms of a pair, the baseline upwards and the candidate downwards.
function histogramOf(one, two, width, height) {
  const known = [one, two].filter(Boolean);
  const low = Math.min(...known.map((side) => side[0])), high = Math.max(...known.map((side) => side[0] + side.length - 2));
  const left = 62, right = width - 8, middle = (height - 22) / 2;
  const most = Math.max(...known.flatMap((side) => side.slice(1)), 1);
  const size = (count) => (count ? 3 + (Math.log10(count + 1) / Math.log10(most + 1)) * (middle - 10) : 0);
  const cell = (right - left) / (high - low + 1);
  const picture = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Histogram of exponents: baseline above the line, candidate below it; heights are logarithmic" });
  [one, two].forEach((side, n) => {
    if (!side) return;
    side.slice(1).forEach((count, k) => {
      if (!count) return;
      const high = size(count), x = left + (side[0] - low + k) * cell;
      const bar = draw("rect", { x: x + (cell > 4 ? 0.5 : 0), width: Math.max(cell - (cell > 4 ? 1 : 0), 0.8), y: n ? middle + 1 : middle - high, height: high, fill: css(SIDES[n]), "fill-opacity": differs(one, two, side[0] + k) ? 1 : 0.45 });
      bar.append(draw("title", {}, `${binText(side[0] + k)}: ${grouped(count)} in the ${SIDES[n]}`));
      add(picture, bar);
    });
  });
  add(picture, segment(left, middle + 0.5, right, middle + 0.5, "axis"), text(left - 6, middle - 6, "baseline", { "text-anchor": "end" }), text(left - 6, middle + 14, "candidate", { "text-anchor": "end" }));
  const every = Math.ceil((high - low + 1) / Math.max((right - left) / 46, 1));
  for (let bin = low; bin <= high; bin += every) add(picture, text(left + (bin - low + 0.5) * cell, height - 6, binText(bin), { "text-anchor": "middle" }));
  return picture;
}

function differs(one, two, bin) {
  const count = (side) => (side && side[1 + bin - side[0]]) || 0;
  return count(one) !== count(two);
}

const binText = (bin) => (bin === 0 ? "0" : bin === 255 ? "∞ NaN" : powerOf("2", bin - 127));

function showDistribution(records) {
  const host = byId("distribution-body"), place = make("div", {}), title = make("h3", {}), said = make("p", { class: "readout" });
  add(host, title, place, said);
  let found = null, single = "";
  const again = figure(place, (width) => (single ? make("p", {}, single) : found && (found[0] || found[1]) ? histogramOf(found[0], found[1], width, 240) : make("p", { class: "empty" }, "No statistics were recorded of the selected pair (capture.level=statistics keeps them).")));
  return (row, column) => {
    const detail = records.detail(row, column);
    const sides = detail && [detail[5], detail[6] === 0 ? detail[5] : detail[6]];
    found = sides && sides.map((side) => side && side[5]);
    const alone = sides && (sides[0] || sides[1])[0].every((size) => size === 1);
    single = alone ? `One number: ${SIDES.map((side, n) => `${sides[n] && sides[n][4] ? digits(sides[n][4][2], 10) : "not known"} in the ${side}`).join(", ")}.` : "";
    title.textContent = records.label(row);
    byId("distribution-brief").textContent = `of the selected pair, step ${records.stepText(column)}`;
    const bins = found && found[0] && found[1] ? range(Math.min(found[0][0], found[1][0]), Math.max(found[0][0] + found[0].length, found[1][0] + found[1].length) - 1).filter((bin) => differs(found[0], found[1], bin)) : null;
    said.textContent = !bins || single ? "" : bins.length ? `${plural(bins.length, "exponent")} counted differently (drawn full): ${bins.slice(0, 12).map(binText).join(", ")}${bins.length > 12 ? " …" : ""}` : "Every exponent is counted alike on both sides: what differs is within the mantissas, or in the order.";
    again();
  };
}

function range(from, to) {
  return Array.from({ length: Math.max(to - from, 0) }, (_, n) => from + n);
}
