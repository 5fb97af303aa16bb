// Figures of the whole run: its line of time, pauses, bandwidth, sizes; and what all figures share.

const draw = (id, traces, layout, clicked) => {
  const target = byId(id);
  target.style.height = `${layout.height}px`; // else it collapses when the window is resized
  Plotly.react(target, traces, layout, { responsive: true, displayModeBar: false });
  if (clicked && !target.dataset.clicks) {
    target.dataset.clicks = "true";
    target.on("plotly_click", clicked);
  }
};

function base(layout) {
  const colour = theme();
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("ink"), size: 12, family: "inherit" },
    hoverlabel: { align: "left", bgcolor: colour("card"), bordercolor: colour("soft"), font: { color: colour("ink"), size: 13 } },
    hovermode: "closest", ...layout,
  };
}
const plain = (axis = {}) => ({ showgrid: false, zeroline: false, ...axis });
const lined = () => ({ gridcolor: theme()("line"), zeroline: false });

// A numeric axis whose ticks read as times.
function secondsAxis(traces) {
  const highest = Math.max(0, ...traces.flatMap((trace) => trace.y.filter((value) => value === value && value !== null)));
  const rough = highest / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const every = [1, 2, 5, 10].map((digit) => digit * power).find((tick) => tick >= rough);
  const ticks = Array.from({ length: Math.ceil(highest / every) + 1 }, (_, at) => at * every);
  return { ...lined(), tickvals: ticks, ticktext: ticks.map((tick) => (tick ? seconds(tick) : "0")) };
}

function drawHistory() {
  const colour = theme();
  const { restarts, failures } = report.summary;
  const kinds = [
    ["committed", report.saves.filter((one) => one.durable_s !== null), "circle", "good", "saves", 8],
    ["not ended", report.saves.filter((one) => one.durable_s === null && !one.error), "circle-open", "warning", "saves", 9],
  ].map(([name, some, symbol, tone, row, dot]) => marks(name, symbol, tone, row, dot, some.map((one) => [one.begun_s,
    `step ${one.step}: ${one.durable_s === null ? name : `durable after ${seconds(one.durable_s)}`}<br>${size(one.bytes)}`])));
  kinds.push(marks("failed", "x", "bad", "failures", 12, failures.map((one) => [one.at_s,
    `step ${one.step} on rank ${one.rank}${one.ranks > 1 ? ` and ${one.ranks - 1} more` : ""}<br>${escapeText(one.error)}`])));
  kinds.push(marks("retry", "diamond", "warning", "retries", 9, report.retries.map(([at, rank, what]) => [at, `rank ${rank}<br>${escapeText(what)}`])));
  kinds.push(marks("start", "triangle-right", "accent", "starts", 11, report.starts.map((at, number) => [at,
    number ? startText(restarts[number - 1]) : "the run began"])));
  const span = (from, to, tone) => ({ type: "rect", xref: "x", yref: "paper", x0: plotTime(from), x1: plotTime(to), y0: 0, y1: 1, fillcolor: colour(tone), line: { width: 0 }, layer: "below" });
  const shapes = restarts.flatMap((one) => [
    span(one.at_s - one.down_s - one.lost_s, one.at_s - one.down_s, "lost"), span(one.at_s - one.down_s, one.at_s, "down"),
  ]);
  const swatch = (name, tone) => ({ type: "bar", x: [null], y: [null], name, marker: { color: colour(tone) } });
  const traces = [...kinds.filter((trace) => trace.x.length), ...(restarts.length ? [swatch("work lost", "lost"), swatch("down", "down")] : [])];
  draw("history", traces, base({
    height: 190, shapes, margin: { l: 70, r: 10, t: 6, b: 30 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 1, xanchor: "right" },
    xaxis: { ...lined(), type: "date", range: [plotTime(report.summary.begun_s - edge()), plotTime(report.summary.ended_s + edge())] },
    yaxis: { ...plain(), type: "category", categoryorder: "array", categoryarray: ["starts", "retries", "failures", "saves"], range: [-0.6, 3.6] },
  }));
}
const edge = () => 0.02 * (report.summary.ended_s - report.summary.begun_s) + 0.5;

const escapeText = (text) => text.replaceAll("<", "&lt;");

function startText(restart) {
  if (!restart) return "started again";
  const how = restart.resumed_from === null ? "started from nothing" : `resumed from step ${restart.resumed_from}`;
  return `${how}, on ${count(restart.world_size, "rank")}<br>${seconds(restart.lost_s)} of work lost, down for ${seconds(restart.down_s)}`;
}

function marks(name, symbol, tone, row, dot, some) {
  return {
    type: "scatter", mode: "markers", name, x: some.map(([at]) => plotTime(at)), y: some.map(() => row),
    text: some.map(([at, text]) => `<b>${name}</b> ${clock(at)}<br>${text}`), hovertemplate: "%{text}<extra></extra>",
    marker: { symbol, size: dot, color: theme()(tone), line: { width: symbol.endsWith("open") ? 2 : 0, color: theme()(tone) } },
  };
}

function bySave(name, y, text, more) {
  return {
    type: "scatter", mode: "lines+markers", name, x: report.saves.map((_, at) => at), y, marker: { size: 4 }, text: report.saves.map(text),
    hovertemplate: "%{text}<extra></extra>", ...more,
  };
}
const stepTicks = () => plain({ title: { text: "step" }, ...thinned(report.saves.map((one) => String(one.step)), 10) });
const openSave = ({ points: [point] }) => choose({ timeline: timelineOf("save", report.saves[point.x]) });

function drawPause() {
  const colour = theme();
  const traces = [
    bySave("slowest rank", report.saves.map((one) => one.most_pause_s), (one) =>
      `step ${one.step}: at most <b>${seconds(one.most_pause_s)}</b><br>on ${rankName(one.most_pause_rank)}`, { line: { color: colour("bad"), width: 1.5 } }),
    bySave("median of the ranks", report.saves.map((one) => one.pause_s), (one) =>
      `step ${one.step}: <b>${seconds(one.pause_s)}</b>, median of the ranks`, { line: { color: colour("accent"), width: 2 } }),
  ];
  draw("pause", traces, base({
    height: 250, margin: { l: 64, r: 10, t: 6, b: 40 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    xaxis: stepTicks(), yaxis: { ...secondsAxis(traces), rangemode: "tozero" },
  }), openSave);
}

function drawBandwidth() {
  const colour = theme();
  const rate = (one) => (one.durable_s ? one.bytes / one.durable_s : null);
  const text = (one) => (one.durable_s === null ? `step ${one.step}: not committed` :
    `step ${one.step}: <b>${speed(rate(one))}</b><br>${size(one.bytes)} durable after ${seconds(one.durable_s)}`);
  const highest = Math.max(1, ...report.saves.map((one) => rate(one) || 0));
  const unit = 1024 ** Math.floor(Math.log2(highest) / 10);
  const traces = [
    bySave("until durable", report.saves.map((one) => one.durable_s), text, { line: { color: colour("accent"), width: 2 } }),
    { ...bySave("bandwidth", report.saves.map((one) => rate(one) && rate(one) / unit), text, { line: { color: colour("good"), width: 2 } }), yaxis: "y2" },
  ];
  draw("bandwidth", traces, base({
    height: 250, margin: { l: 64, r: 64, t: 6, b: 40 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    xaxis: stepTicks(), yaxis: { ...secondsAxis([traces[0]]), rangemode: "tozero" },
    yaxis2: { ...plain(), overlaying: "y", side: "right", rangemode: "tozero", tickmode: "auto", nticks: 6, title: { text: `${size(unit).split(" ")[1]}/s` } },
  }), openSave);
}

// A row of lines for each metric: their scales have nothing in common.
function drawMetrics() {
  const names = [...new Set(report.saves.flatMap((one) => Object.keys(one.metrics)))].sort().slice(0, MOST_METRICS);
  byId("metrics-card").hidden = !names.length;
  if (!names.length) return;
  const axis = (at) => (at ? String(at + 1) : "");
  const traces = names.map((name, at) => ({
    ...bySave(escapeText(name), report.saves.map((one) => one.metrics[name] ?? null),
      (one) => `step ${one.step}: ${escapeText(name)} <b>${one.metrics[name] ?? "not finite, or none"}</b>`,
      { line: { color: theme()("accent"), width: 2 } }),
    yaxis: `y${axis(at)}`, connectgaps: false, showlegend: false,
  }));
  const rows = Object.fromEntries(names.map((_, at) => [`yaxis${axis(at)}`, { ...lined(), nticks: 5, domain: rowOf(at, names.length) }]));
  const titles = names.map((name, at) => ({
    text: escapeText(name), xref: "paper", yref: "paper", x: 0, y: rowOf(at, names.length)[1], xanchor: "left", yanchor: "bottom", showarrow: false,
    font: { size: 12.5, color: theme()("soft") },
  }));
  draw("metrics", traces, base({
    height: 60 + 140 * names.length, margin: { l: 64, r: 10, t: 22, b: 40 }, annotations: titles, xaxis: { ...stepTicks(), anchor: "free", position: 0 }, ...rows,
  }), openSave);
}
const MOST_METRICS = 8;
const rowOf = (at, rows) => [(rows - 1 - at) / rows, (rows - 1 - at) / rows + 0.78 / rows];

function drawSizes() {
  const { sizes } = report;
  if (!sizes) {
    byId("sizes").textContent = "No checkpoint of the run could be read here.";
    return;
  }
  draw("sizes", [{
    type: "treemap", labels: sizes.labels.map(escapeText), ids: sizes.labels.map((_, at) => String(at)),
    parents: sizes.parents.map((at) => (at < 0 ? "" : String(at))), values: sizes.bytes, branchvalues: "total",
    text: sizes.bytes.map((bytes, at) => `${size(bytes)}<br>${sizes.about[at]}`), textinfo: "label+text+percent root",
    hovertemplate: "<b>%{label}</b><br>%{text}<br>%{percentRoot:.1%} of all<extra></extra>", maxdepth: 4, tiling: { pad: 1 },
    marker: { line: { width: 1, color: theme()("card") } },
  }], base({ height: 380, margin: { l: 0, r: 0, t: 0, b: 0 }, treemapcolorway: ["#3b82d6", "#e8a33d", "#2a9d78", "#8e5bb5", "#d1495b", "#5ec4d6"] }));
}
