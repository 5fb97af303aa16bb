// Puts the page together, and draws again what depends on the reader's choice.

const LEVELS = { bad: "Act now", warning: "Look at this", note: "To know" };

function showHead() {
  const { summary } = report;
  document.title = `${report.name} · aiockpt report`;
  byId("name").textContent = report.name;
  byId("about").textContent = `${count(summary.ranks, "rank")} on ${count(summary.hosts, "host")}, ${seconds(summary.ended_s - summary.begun_s)} ` +
    `from ${moment(summary.begun_s)} to ${moment(summary.ended_s)}${summary.forked_from && `, forked from ${summary.forked_from}`}; this report is of ${moment(report.made_s)}. ` +
    `Clock: ${Intl.DateTimeFormat().resolvedOptions().timeZone}.`;
}

function showVerdict() {
  const all = report.findings.length ? report.findings : [{ level: "good", what: "All is well: no failure, no slow rank, nothing lost.", advice: "" }];
  for (const one of all) {
    const shown = element("div", { class: `finding ${one.level}` },
      element("b", {}, LEVELS[one.level] || "All well"), element("span", { class: "what" }, one.what),
      element("span", { class: "when" }, one.since_s ? `since ${moment(one.since_s)}` : ""));
    if (one.advice) shown.append(element("span", { class: "more" }, one.advice));
    if (one.stage || one.step !== null && one.step !== undefined) {
      const button = element("button", {}, "show");
      button.addEventListener("click", () => showFinding(one));
      shown.append(element("span", { class: "when" }, button));
    }
    byId("verdict").append(shown);
  }
}

function showFinding(one) {
  const change = {};
  if (one.rank !== null) change.rank = one.rank;
  if (one.stage) {
    const [operation, stage] = one.stage.split(" ");
    Object.assign(change, { grid: grids.find((grid) => grid.operation === operation), stage });
  }
  const saves = report.saves.filter((save) => save.step === one.step);
  if (saves.length) change.timeline = timelineOf("save", saves[saves.length - 1]);
  choose(change);
  byId(one.stage ? "places" : "timeline").scrollIntoView({ block: "center" });
}

function showTiles() {
  const { summary } = report;
  const last = report.saves.filter((one) => one.durable_s !== null).sort((a, b) => a.ended_s - b.ended_s).pop();
  const tiles = [
    [last ? `step ${last.step}` : "none", last ? `last durable, ${seconds(report.made_s - last.ended_s)} before this report` : "is durable"],
    [`${summary.committed}`, `saves committed, ${summary.failed} failed`],
    [seconds(summary.pauses_s[0]), `pause of training, at most ${seconds(summary.pauses_s[1])}`],
    [seconds(summary.durable_s[0]), `until durable, at most ${seconds(summary.durable_s[1])}`],
    [last ? speed(median(report.saves.filter((one) => one.durable_s).map((one) => one.bytes / one.durable_s))) : "–", last ? `bandwidth; ${size(last.bytes)} a save` : "bandwidth"],
    [`${(100 * summary.effective).toFixed(1)} %`, "of the time trained: not held, loading, lost or down (ETTR)"],
    [`${summary.restarts.length}`, summary.restarts.length ? `restarts, ${seconds(summary.restarts.reduce((sum, one) => sum + one.lost_s, 0))} of work lost` : "restarts"],
    [`${summary.retries}`, "retried calls to storage"],
  ];
  for (const [number, what] of tiles) byId("tiles").append(element("div", { class: "tile" }, element("b", {}, number), element("span", {}, what)));
}

function fillTable(table, headings, rows) {
  const side = (at) => (headings[at].startsWith(">") ? { class: "right" } : headings[at].startsWith("~") ? { class: "wide" } : {});
  const bare = (heading) => heading.replace(/^[>~]/, "");
  table.replaceChildren(element("thead", {}, element("tr", {}, ...headings.map((heading, at) => element("th", side(at), bare(heading))))));
  const body = element("tbody");
  for (const { cells, clicked, rank } of rows) {
    const row = element("tr", clicked ? { "data-rank": rank } : {}, ...cells.map((cell, at) => element("td", side(at), cell)));
    if (clicked) row.addEventListener("click", clicked);
    body.append(row);
  }
  table.append(body);
}

function showStragglers() {
  const { stragglers } = report.summary;
  if (!stragglers.length) {
    byId("straggler-card").append(element("p", { class: "hint" }, "None: no rank takes longer than its peers, step after step."));
    return;
  }
  const begun = new Map([...report.saves].reverse().map((one) => [one.step, one.begun_s]));
  const rows = stragglers.map((one) => ({
    rank: one.rank,
    clicked: () => showFinding({ rank: one.rank, stage: `${one.operation} ${one.stage}`, step: null }),
    cells: [String(one.rank), one.host, `${one.operation} · ${one.stage}`, `${one.factor.toFixed(1)} ×`, seconds(one.extra_s),
      begun.has(one.since) ? `step ${one.since}, ${moment(begun.get(one.since))}` : `step ${one.since}`, String(one.steps), one.cause],
  }));
  fillTable(byId("stragglers"), [">rank", "host", "stage", ">of the median", ">more each time", "since", ">steps since", "~likely cause"], rows);
}

function showStages() {
  const rows = report.summary.stages.map((one) => ({
    cells: [`${one.operation} · ${stageName(one.stage)}`, one.count.toLocaleString("en"), seconds(one.median_s), seconds(one.most_s),
      `rank ${one.slowest_rank}, step ${one.slowest_step}`, one.bytes_per_s ? speed(one.bytes_per_s) : ""],
  }));
  fillTable(byId("stages"), ["stage", ">count", ">median", ">most", "where", ">speed of a rank"], rows);
}

function buttons(box, label, entries, pressed, take) {
  box.replaceChildren(element("span", {}, label));
  for (const [key, text, value] of entries) {
    const button = element("button", { "data-key": key, "aria-pressed": String(pressed(value)) }, text);
    button.addEventListener("click", () => take(value));
    box.append(button);
  }
}

function showControls() {
  const phases = grids.flatMap((grid) => grid.stages
    .filter((stage) => rankCount === 1 || grid.ranksWith(stage) > 1)
    .map((stage) => [`${grid.operation}-${stage}`, grid.operation === "save" ? stageName(stage) : `${grid.operation}: ${stageName(stage)}`, { grid, stage }]));
  buttons(byId("phases"), "phase", phases, ({ grid, stage }) => grid === chosen.grid && stage === chosen.stage, (value) => choose({ ...value, over: "last" }));
  const names = groupings();
  buttons(byId("groups"), names.length > 1 ? "group by" : "by", names.map((name) => [name, name, name]), (name) => name === chosen.group, (name) => choose({ group: name }));
  const { occasions, operation } = chosen.grid;
  const whole = [["last", `the last ${Math.min(LAST, occasions.length)} ${operation}s (median)`], ["all", `all ${occasions.length} ${operation}s (median)`], ["most", "its slowest"]];
  const each = occasions.map((one, at) => [String(at), `step ${one.step}${one.start ? `, start ${one.start + 1}` : ""}`]);
  byId("over").replaceChildren(...[...whole, ...each].map(([value, text]) => element("option", { value }, text)));
  byId("over").value = chosen.over;
}

const HEAT = [drawPlaces, drawSince, drawRank];

function choose(change) {
  for (const [name, value] of Object.entries(change)) if (value !== undefined && !(name === "timeline" && value === null)) chosen[name] = value;
  if ("grid" in change || "group" in change || "stage" in change) showControls();
  for (const one of [...HEAT, drawTimeline]) one();
}

function chooseAtFirst() {
  const named = report.findings.find((one) => one.stage);
  const [operation, stage] = named ? named.stage.split(" ") : ["save", grids[0]?.stages.includes("write") ? "write" : grids[0]?.stages[0]];
  chosen.grid = grids.find((grid) => grid.operation === operation) || grids[0];
  chosen.stage = stage;
  chosen.group = "host";
  chosen.rank = named?.rank ?? report.ranks[0].rank;
  const last = report.saves[report.saves.length - 1];
  chosen.timeline = (last && timelineOf("save", last)) ?? (report.timelines.length ? report.timelines.length - 1 : null);
}

function listen() {
  byId("over").addEventListener("change", (event) => choose({ over: event.target.value }));
  byId("rows").addEventListener("change", drawTimeline);
  byId("operation").replaceChildren(...report.timelines.map((one, at) =>
    element("option", { value: String(at) }, `${one.operation} of step ${one.step}${one.start ? `, start ${one.start + 1}` : ""}`)));
  byId("operation").addEventListener("change", (event) => choose({ timeline: Number(event.target.value) }));
  const move = (by) => () => choose({ timeline: Math.max(0, Math.min(report.timelines.length - 1, chosen.timeline + by)) });
  byId("before").addEventListener("click", move(-1));
  byId("after").addEventListener("click", move(1));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}

function drawAll() {
  const all = [drawHistory, ...(grids.length ? HEAT : []), drawTimeline, drawMetrics, drawPause, drawBandwidth, drawSizes];
  for (const one of all) one();
}

showHead();
showVerdict();
showTiles();
showStragglers();
showStages();
if (grids.length) {
  chooseAtFirst();
  showControls();
}
listen();
byId("foot").textContent = "Hosts are laid side by side by their wall clocks, moved where their saves prove these wrong.";
drawAll();
requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.readyMs = performance.now().toFixed(0); }));
