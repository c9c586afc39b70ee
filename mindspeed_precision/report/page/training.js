// 6 and 7: what the two runs were given to do: parameter groups, configuration.
function showGroups(training) {
  const host = byId("groups-body");
  if (!training || !SIDES.some((side) => training.groups[side].length)) {
    add(host, make("p", { class: "empty" }, "No run declared its parameters, or the runs were not at hand."));
    byId("groups-brief").textContent = "not known";
    return;
  }
  byId("groups-brief").textContent = training.apart_in_all ? `${training.apart_in_all} of ${plural(training.parameters, "parameter")} differ` : `${plural(training.parameters, "parameter")}, trained alike`;
  const names = [...new Set(SIDES.flatMap((side) => training.groups[side].flatMap((group) => Object.keys(group.settings))))];
  const every = SIDES.flatMap((side) => training.groups[side]);
  const varying = names.filter((name) => new Set(every.map((group) => group.settings[name])).size > 1);
  const wordsOf = (group) => varying.map((name) => `${name} ${group.settings[name]}`).join(", ") || "one group";
  const total = Math.max(...SIDES.map((side) => training.groups[side].reduce((sum, group) => sum + group.elements, 0)), 1);
  const kinds = [...new Set(every.map(wordsOf))];
  const bars = make("div", { class: "bars" });
  const again = () => bars.replaceChildren(...SIDES.flatMap((side) => [make("span", {}, side), barOf(training.groups[side], total, wordsOf, kinds, side, training)]));
  redraws.push(again);
  again();
  add(host, bars);
  if (varying.length) add(host, tableOf(["", "group", ...varying, "parameters", "elements"], SIDES.flatMap((side) => training.groups[side].map((group) => [side, String.fromCharCode(65 + kinds.indexOf(wordsOf(group))), ...varying.map((name) => group.settings[name]), grouped(group.parameters), grouped(group.elements)]))));
  else add(host, make("p", { class: "says" }, `All parameters of both runs are trained alike: ${names.map((name) => `${name} ${every[0].settings[name]}`).join(", ")}.`));
  if (training.apart.length) {
    add(host, make("h3", {}, "Parameters that are not trained alike"), tableOf(["parameter", "", "baseline", "candidate"], training.apart.flatMap((one) => Object.entries(one.cells).map(([name, [a, b]], n) => [n ? "" : one.fqn, name, a || "–", make("td", { class: "apart" }, b || "–")]))));
    if (training.apart_in_all > training.apart.length) add(host, make("p", { class: "says" }, `and ${training.apart_in_all - training.apart.length} more: mindspeed-precision verify lists them.`));
  }
}

function barOf(groups, total, wordsOf, kinds, side, training) {
  const other = training.groups[side === "baseline" ? "candidate" : "baseline"];
  const bar = make("div", { class: "stack", role: "img", "aria-label": `${side}: ${groups.map((group) => `${group.parameters} parameters with ${wordsOf(group)}`).join("; ")}` });
  for (const group of groups) {
    const twin = other.find((one) => wordsOf(one) === wordsOf(group));
    const alike = twin && twin.elements === group.elements && twin.parameters === group.parameters;
    const kind = kinds.indexOf(wordsOf(group)), colour = mixed([css("within-0"), css("within-1")], kinds.length > 1 ? kind / (kinds.length - 1) : 0.2);
    bar.append(make("span", { title: `${wordsOf(group)}: ${plural(group.parameters, "parameter")}, ${plural(group.elements, "element")}`, css: { width: `${Math.max((group.elements / total) * 100, 1.5)}%`, background: painted(colour), color: inkOn(colour), boxShadow: alike ? "none" : `inset 0 0 0 2px ${css("bad")}` } }, `${String.fromCharCode(65 + kind)}${alike ? "" : " ≠"}`));
  }
  return bar;
}

const EFFECTS = { error: "changes numbers", warning: "may change numbers", unknown: "meaning not known", info: "changes no number" };

function showConfiguration(training) {
  const host = byId("configuration-body");
  if (!training || !training.arguments) {
    add(host, make("p", { class: "empty" }, "No argument is known of both runs."));
    byId("configuration-brief").textContent = "not known";
    return;
  }
  const found = training.differences, same = training.arguments - training.differences_in_all;
  const counts = Object.keys(EFFECTS).map((severity) => [severity, found.filter((one) => one.severity === severity).length]).filter(([, count]) => count);
  byId("configuration-brief").textContent = counts.length ? counts.map(([severity, count]) => `${count} ${EFFECTS[severity].replace("changes", count === 1 ? "changes" : "change")}`).join(", ") : `all ${plural(training.arguments, "argument")} are equal`;
  const share = (count) => `${Math.max((count / training.arguments) * 100, 3)}%`;
  add(host, make("div", { class: "bars" }, make("span", {}, "arguments"), make("div", { class: "stack", role: "img", "aria-label": `${same} of ${training.arguments} arguments are equal` },
    counts.map(([severity, count]) => make("span", { class: `severity-${severity}`, title: EFFECTS[severity], css: { flex: `0 0 ${share(count)}` } }, count)),
    make("span", { class: "severity-same", css: { flex: "1" } }, `${grouped(same)} equal`))));
  if (found.length) add(host, tableOf(["argument", "baseline", "candidate", "it", "why"], found.map((one) => [make("code", {}, one.name), one.baseline, one.candidate, make("td", { class: "severity-cell" }, make("span", { class: `tag severity-${one.severity}` }, EFFECTS[one.severity])), one.reason])));
  if (training.differences_in_all > found.length) add(host, make("p", { class: "says" }, `and ${training.differences_in_all - found.length} more: mindspeed-precision verify lists them.`));
}
