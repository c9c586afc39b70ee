// Elements, numbers and colours. Text enters the page by textContent alone.
const SVG = "http://www.w3.org/2000/svg";
const SIDES = ["baseline", "candidate"];
const SIGNS = { none: "·", identical: "=", within_tolerance: "≈", incomparable: "?", missing: "∅", diverged: "≠" };
const WORDS = {
  none: "not recorded", identical: "identical", within_tolerance: "within tolerance",
  incomparable: "incomparable", missing: "missing", diverged: "diverged",
};

function make(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "css") Object.assign(element.style, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined) element.append(child.nodeType ? child : String(child));
  }
  return element;
}

// Append what there is; null stands for nothing.
function add(host, ...children) {
  return fill(host, {}, children);
}

const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const plural = (count, noun) => `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;

function grouped(number) {
  return Math.round(number).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

// JSON has no NaN and no infinity: they come as texts.
function number(value) {
  if (value === null || value === undefined) return null;
  if (typeof value !== "string") return value;
  return value === "nan" ? NaN : value === "inf" ? Infinity : -Infinity;
}

function digits(value, count = 4) {
  const one = number(value);
  if (one === null) return "–";
  if (Number.isNaN(one)) return "NaN";
  if (!Number.isFinite(one)) return one > 0 ? "∞" : "−∞";
  if (one === 0) return "0";
  if (Number.isInteger(one) && Math.abs(one) < 1e7) return grouped(one);
  const size = Math.abs(one);
  return size >= 1e-3 && size < 1e6 ? String(Number(one.toPrecision(count))) : one.toExponential(Math.max(count - 2, 1));
}

// Values of the theme, read once: each reading makes the browser settle its styles.
const themed = new Map();
function css(name) {
  if (!themed.has(name)) themed.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return themed.get(name);
}

function rgb(colour) {
  const text = colour.slice(1);
  return [0, 2, 4].map((at) => parseInt(text.slice(at, at + 2), 16));
}

function mixed(stops, share) {
  const at = clamp(share, 0, 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return rgb(stops[low]).map((value, n) => Math.round(value + (rgb(stops[low + 1])[n] - value) * (at - low)));
}

// A cell: verdict in the lowest three bits, level of the error in the next four, then whether that is a bound below.
const levelOf = (code) => (code >> 3) & 15;

// The level at which the colours of divergence begin: 1, or the first one beyond a tolerance.
let apartFrom = 1;

// A colour for each cell.
function palette() {
  if (!themed.has("palette")) themed.set("palette", allColours());
  return themed.get("palette");
}

function allColours() {
  const within = [css("within-0"), css("within-1")];
  const apart = [css("diverged-0"), css("diverged-1"), css("diverged-2")];
  const plain = { 0: css("none"), 1: css("identical"), 3: css("incomparable"), 4: css("missing") };
  const colours = [];
  for (let code = 0; code < 256; code++) {
    const verdict = code & 7, level = levelOf(code);
    if (verdict === 2) colours.push(mixed(within, level ? (level - 1) / 4 : 0.5));
    else if (verdict === 5) colours.push(mixed(apart, level ? (level - apartFrom) / (15 - apartFrom) : 0.4));
    else colours.push(rgb(plain[verdict] || plain[0]));
  }
  return colours;
}

const painted = (colour) => `rgb(${colour[0]} ${colour[1]} ${colour[2]})`;
const inkOn = (colour) => (0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 140 ? "#1c2128" : "#ffffff");

// What must be drawn again when the colours or the width change.
const redraws = [];
function redrawAll() {
  for (const again of redraws) again();
}

// Draw into a host at its own width, and again when that changes.
function figure(host, drawing) {
  let width = 0;
  const again = () => {
    const now = Math.round(host.clientWidth);
    if (now > 0) {
      width = now;
      host.replaceChildren(...[drawing(now)].flat());
    }
  };
  redraws.push(again);
  new ResizeObserver(() => {
    if (Math.abs(host.clientWidth - width) > 1) again();
  }).observe(host);
  return again;
}

function chip(verdict, colour) {
  const found = colour || palette()[{ identical: 1, within_tolerance: 2, incomparable: 3, missing: 4, diverged: 5 }[verdict] || 0];
  return make("span", { class: "chip", title: WORDS[verdict], "aria-hidden": "true", css: { background: painted(found), color: inkOn(found) } }, SIGNS[verdict]);
}

function tableOf(titles, rows, classes = []) {
  return make("div", { class: "wide" }, make("table", {},
    make("thead", {}, make("tr", {}, titles.map((title, n) => make("th", { scope: "col", class: classes[n] }, title)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell, n) => (cell && cell.nodeType && cell.tagName === "TD" ? cell : make("td", { class: classes[n] }, cell))))))));
}

function asTable(title, build) {
  const box = make("details", { class: "table" }, make("summary", {}, title));
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) box.append(build());
  });
  return box;
}
