// 9: what was looked at, and what was not.
function showCoverage(coverage, decided) {
  const host = byId("coverage-body");
  byId("coverage-brief").textContent = coverage.text;
  const stack = (label, parts) => [make("span", {}, label), make("div", { class: "stack", role: "img", "aria-label": `${label}: ${parts.map(([words, count]) => `${count} ${words}`).join(", ")}` },
    parts.filter(([, count]) => count).map(([words, count, name]) => make("span", { class: name, title: `${count} ${words}`, css: { flex: `${count} 0 ${count ? "3%" : "0"}` } }, `${grouped(count)} ${words}`)))];
  const verdicts = Object.keys(WORDS).filter((verdict) => decided[verdict]);
  const bars = make("div", { class: "bars" }, stack("records", [["matched", coverage.matched, "severity-same"], ["without a partner", coverage.unmatched, "severity-warning"]]),
    stack("dW", [["parameters with dW", coverage.parameters_with_wgrad, "severity-same"], ["without", coverage.parameters - coverage.parameters_with_wgrad, "severity-warning"]]));
  const shares = make("div", { class: "stack", role: "img", "aria-label": verdicts.map((verdict) => `${decided[verdict]} ${WORDS[verdict]}`).join(", ") });
  const again = () => {
    const colours = palette(), code = { identical: 1, within_tolerance: 26, incomparable: 3, missing: 4, diverged: 61 };
    shares.replaceChildren(...verdicts.map((verdict) => make("span", { title: `${decided[verdict]} ${WORDS[verdict]}`, css: { flex: `${decided[verdict]} 0 3%`, background: painted(colours[code[verdict]]), color: inkOn(colours[code[verdict]]) } }, `${SIGNS[verdict]} ${grouped(decided[verdict])} ${WORDS[verdict]}`)));
  };
  redraws.push(again);
  again();
  add(bars, make("span", {}, "verdicts"), shares);
  add(host, bars, make("p", { class: "says" }, `policy ${coverage.policy}`));
  const list = (title, lines) => lines.length && add(host, make("h3", {}, title), make("ul", { class: "list" }, lines.map((line) => make("li", {}, line))));
  const idle = coverage.checks.filter((one) => one.skipped && one.applies), failed = coverage.checks.filter((one) => one.failed);
  const absent = coverage.checks.filter((one) => !one.applies);
  list("Checks of verify that did not hold", failed.map((one) => `${one.holds}: not held by ${one.failed} of ${one.exercised} ${one.unit} (${one.name})`));
  list("Checks without data, or with less than there is", idle.map((one) => `${one.holds}: ${one.skipped} (${one.exercised ? `${one.exercised} ${one.unit} looked at` : "nothing looked at"}; ${one.name})`));
  list("Records that could not be judged", coverage.unjudged.map(([name, when, reason]) => `${name} ${when}: ${reason}`));
  list(`Records without a partner (${grouped(coverage.unmatched)})`, coverage.unmatched_list.map(([side, name, when, rank, closest]) => `only the ${side}: ${name} ${when}, rank ${rank}${closest.length ? `; closest: ${closest.join(" | ")}` : ""}`));
  list("Notes", coverage.notes);
  if (coverage.checks.length) add(host, asTable(`all ${plural(coverage.checks.length, "check")} of verify${absent.length ? `, ${absent.length} of them about nothing that these runs have` : ""}`, () => tableOf(["check", "holds", "looked at", "not held by", "skipped"], coverage.checks.map((one) => [make("code", {}, one.name), one.holds, `${one.exercised} ${one.unit}`, one.failed || "", one.applies ? one.skipped : "nothing of the kind here"]))));
}
