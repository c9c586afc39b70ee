async function main() {
  const facts = JSON.parse(byId("facts").textContent);
  facts.grid.exact = facts.grid.policy.startsWith("exact:");
  apartFrom = facts.grid.exact ? 1 : 6;
  const records = await readRecords(facts.grid, facts.details);
  watchTheme();
  showCurves(facts.curves);
  const map = new HeatMap(records);
  const open = (row) => map.open(row, telling(records, row));
  new Tree(records, open);
  showGrowth(facts.growth, (module, series) => {
    const phase = { forward: "fprop", backward: "dgrad", wgrad: "wgrad" }[series];
    const row = records.shown.find((one) => records.name(one) === module && records.phase(one) === phase);
    if (row !== undefined) open(row);
  });
  const distribution = showDistribution(records);
  showGroups(facts.training);
  showConfiguration(facts.training);
  showOperands(facts.gemms);
  showCoverage(facts.coverage, facts.decided);
  records.listeners.select.push((row, column) => {
    showDetail(records, facts.runs, row, column);
    distribution(row, column);
  });
  redraws.push(() => records.selected && showDetail(records, facts.runs, records.selected.row, records.selected.column));
  const apart = records.worst.reduce((count, code) => count + ((code & 7) > 2), 0);
  byId("heatmap-brief").textContent = apart ? `${grouped(apart)} of ${plural(records.height, "record")} differ${apart === 1 ? "s" : ""} somewhere` : `${plural(records.height, "record")}, none differs beyond tolerance`;
  const first = facts.grid.origins.find((one) => one.cell[0] >= 0);
  if (first) records.select(...first.cell);
  else if (records.height) records.select(0, telling(records, 0));
  watchKeys(records, map);
  document.body.dataset.ready = "yes";
}

main().catch((error) => {
  const trouble = byId("trouble");
  trouble.hidden = false;
  trouble.textContent = `The pictures could not be drawn: ${error.message}. verdict.json and report.md hold the same facts.`;
  throw error;
});
