// Keys, theme, printing.
const KEYS = [
  ["/", "search records and modules"], ["Esc", "clear the search, close this"], ["1 to 9", "go to a part"],
  ["↑ ↓ ← →", "move in the heat map or the tree, once it has the focus"], ["Enter", "heat map: to the tensor's panel; tree: open the worst record"],
  ["n, p", "next and previous record that differs"], ["o", "next origin"], ["f", "only what differs, or everything"],
  ["t", "light or dark"], ["?", "this list"],
];

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  themed.clear();
  byId("theme").textContent = dark ? "Light" : "Dark";
  redrawAll();
}

function watchTheme() {
  const wanted = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null, printing = false;
  const apply = () => setTheme(!printing && (chosen ?? wanted.matches));
  wanted.addEventListener("change", apply);
  byId("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme !== "dark";
    apply();
  });
  const print = (now) => {
    printing = now;
    apply();
  };
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  printing = matchMedia("print").matches;
  apply();
}

function watchKeys(records, map) {
  const search = byId("search"), help = byId("help");
  byId("help-list").append(...KEYS.flatMap(([key, words]) => [make("dt", {}, make("kbd", {}, key)), make("dd", {}, words)]));
  byId("keys").addEventListener("click", () => help.showModal());
  search.addEventListener("input", () => records.set({ text: search.value }));
  records.listeners.filter.push(() => {
    if (document.activeElement !== search) search.value = records.filter.text;
  });
  let origin = -1;
  const differing = (direction) => {
    const row = records.next(direction);
    if (row !== null) map.open(row, telling(records, row));
  };
  const actions = {
    "/": () => { search.focus(); search.select(); },
    n: () => differing(1), p: () => differing(-1), f: () => map.apart.click(), t: () => byId("theme").click(), "?": () => help.showModal(),
    o: () => {
      const found = records.grid.origins.filter((one) => one.cell[0] >= 0);
      if (found.length) map.open(...found[(origin = (origin + 1) % found.length)].cell);
    },
  };
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && document.activeElement === search) {
      search.value = "";
      records.set({ text: "" });
      search.blur();
    }
    if (event.ctrlKey || event.metaKey || event.altKey || help.open || /INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) return;
    const part = /^[1-9]$/.test(event.key) && document.querySelectorAll("details.part")[Number(event.key) - 1];
    const act = part ? () => goTo(part) : actions[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  for (const link of document.querySelectorAll(".bar nav a")) link.addEventListener("click", () => { byId(link.hash.slice(1)).open = true; });
}

function goTo(part) {
  part.open = true;
  part.scrollIntoView();
  part.querySelector("summary").focus({ preventScroll: true });
}
