// Scales and axes of a chart.
function linear(domain, range) {
  const [low, high] = domain[0] === domain[1] ? [domain[0] - 1, domain[1] + 1] : domain;
  const scale = (value) => range[0] + ((value - low) / (high - low)) * (range[1] - range[0]);
  scale.ticks = (count) => niceTicks(low, high, count);
  scale.inverse = (at) => low + ((at - range[0]) / (range[1] - range[0])) * (high - low);
  return scale;
}

function niceTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((one) => one >= rough * 0.999) || power * 10;
  const ticks = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) ticks.push(Number(value.toPrecision(12)));
  return ticks;
}

// A logarithmic scale with a place of its own for zero, below all else.
function logarithmic(values, range) {
  const sizes = values.filter((value) => value > 0 && Number.isFinite(value));
  let low = Math.floor(Math.log10(sizes.length ? Math.min(...sizes) : 1e-7));
  let high = Math.ceil(Math.log10(sizes.length ? Math.max(...sizes) : 1e-6));
  if (high - low < 2) {
    low -= 1;
    high = Math.max(high, low + 2);
  }
  const zero = range[0], base = range[0] + (range[1] - range[0]) * 0.14;
  const scale = (value) => (value > 0 ? (Number.isFinite(value) ? base + ((Math.log10(value) - low) / (high - low)) * (range[1] - base) : range[1]) : zero);
  const every = Math.ceil((high - low) / 5);
  scale.ticks = [];
  for (let power = low; power <= high; power += every) scale.ticks.push(10 ** power);
  scale.zero = zero;
  return scale;
}

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const powerOf = (base, exponent) => base + [...String(exponent)].map((digit) => SUPERSCRIPTS[digit]).join("");
const powerText = (value) => powerOf("10", Math.round(Math.log10(value)));

function text(x, y, words, attributes = {}) {
  return draw("text", { x, y, ...attributes }, words);
}

function segment(x1, y1, x2, y2, name) {
  return draw("line", { x1, y1, x2, y2, class: name });
}

// A line through points; what is not finite breaks it.
function pathOf(points) {
  let path = "", open = false;
  for (const [x, y] of points) {
    if (!Number.isFinite(y)) {
      open = false;
      continue;
    }
    path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    open = true;
  }
  return path;
}

function wholeTicks(scale, count) {
  return scale.ticks(count).filter(Number.isInteger);
}
