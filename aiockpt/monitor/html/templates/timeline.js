// One save or load, a row for each rank: what ran when, and when save() returned.

const LANES = {
  whole: [-0.46, 0.92], pause: [-0.44, 0.1], walk: [-0.34, 0.22], plan: [-0.34, 0.22], snapshot: [-0.34, 0.22], barrier: [-0.44, 0.1],
  begin: [0.16, 0.22], write: [-0.1, 0.24], flush: [-0.06, 0.16], vote: [0.16, 0.22], wait: [0.16, 0.22], commit: [0.16, 0.22],
  find: [-0.34, 0.22], match: [-0.34, 0.22], read: [-0.1, 0.24], verify: [-0.06, 0.16], exchange: [0.16, 0.22],
  scatter: [0.16, 0.22], copy: [-0.1, 0.24],
};
const WAITING = ["whole", "wait", "commit"];

function timelineOf(operation, { start, step }) {
  const at = report.timelines.findIndex((one) => one.operation === operation && one.start === start && one.step === step);
  return at < 0 ? null : at;
}

// The spans of each rank: [stage, begin, length, bytes, failed, key], times in seconds.
function spansByRank({ rows, keys }) {
  const found = new Map();
  for (let at = 0; at < keys.length; at++) {
    const [rank, stage, begin, length, bytes, failed] = rows.slice(6 * at, 6 * at + 6);
    if (!found.has(rank)) found.set(rank, []);
    found.get(rank).push({ stage: report.stages[stage], begin: begin / 1e6, length: length / 1e6, bytes, failed, key: keys[at] });
  }
  return found;
}

const workedUntil = (spans) =>
  Math.max(0, ...spans.filter((one) => !WAITING.includes(one.stage)).map((one) => one.begin + one.length));

function shownRanks(found) {
  const slowest = [...found.keys()].sort((a, b) => workedUntil(found.get(b)) - workedUntil(found.get(a)));
  const rows = slowest.slice(0, Number(byId("rows").value));
  for (const rank of [chosen.rank, report.ranks[0].rank])
    if (rank !== null && found.has(rank) && !rows.includes(rank)) rows.splice(-1, 1, rank);
  return rows;
}

function spanText(rank, one) {
  const rate = one.bytes && one.length ? `<br>${size(one.bytes)}, ${speed(one.bytes / one.length)}` : "";
  return `<b>${one.failed ? "failed: " : ""}${stageName(one.stage)}</b> · ${rankName(rank)}<br>${seconds(one.length)}, ` +
    `${seconds(one.begin)} after the beginning${rate}${one.key ? `<br>${one.key.slice(-80)}` : ""}`;
}

function bars(stage, found, ranks) {
  const bar = { x: [], base: [], y: [], text: [], lines: [] };
  ranks.forEach((rank, row) => {
    for (const one of found.get(rank)) {
      if (one.stage !== stage) continue;
      bar.x.push(one.length);
      bar.base.push(one.begin);
      bar.y.push(row);
      bar.text.push(spanText(rank, one));
      bar.lines.push(one.failed ? theme()("bad") : "rgba(0,0,0,0)");
    }
  });
  const [offset, width] = LANES[stage] || [0.16, 0.22];
  return {
    type: "bar", orientation: "h", name: stageName(stage), ...bar, offset, width, textposition: "none",
    hovertemplate: "%{hovertext}<extra></extra>", hovertext: bar.text,
    marker: { color: stageColour(stage), line: { color: bar.lines, width: 2 } },
    opacity: stage === "whole" ? 0.16 : stage === "write" || stage === "read" ? 0.85 : 1,
  };
}

// Where the program went on: a save's call ends with its pause.
function returns(found, ranks) {
  const mark = { x: [], y: [], text: [] };
  ranks.forEach((rank, row) => {
    for (const one of found.get(rank).filter((span) => span.stage === "pause")) {
      mark.x.push(one.begin + one.length);
      mark.y.push(row);
      mark.text.push(`<b>save() returned</b> · ${rankName(rank)}<br>${seconds(one.length)} after the call`);
    }
  });
  return {
    type: "scatter", mode: "markers", name: "save() returned", x: mark.x, y: mark.y, text: mark.text,
    hovertemplate: "%{text}<extra></extra>",
    marker: { symbol: "line-ns", size: 20, line: { width: 3, color: theme()("ink") } },
  };
}

function drawTimeline() {
  const one = report.timelines[chosen.timeline];
  if (!one) return;
  const found = spansByRank(one);
  const ranks = shownRanks(found);
  const present = new Set(ranks.flatMap((rank) => found.get(rank).map((span) => span.stage)));
  const stages = Object.keys(LANES).filter((stage) => present.has(stage));
  const others = [...present].filter((stage) => !(stage in LANES));
  const traces = [...stages, ...others].map((stage) => bars(stage, found, ranks));
  if (present.has("pause")) traces.push(returns(found, ranks));
  draw("timeline", traces, base({
    height: 90 + Math.max(30, Math.min(46, 500 / ranks.length)) * ranks.length, barmode: "overlay", hovermode: "closest",
    margin: { l: 150, r: 10, t: 34, b: 34 }, legend: { orientation: "h", y: 1, yanchor: "bottom", traceorder: "normal" },
    xaxis: { ...lined(), title: { text: "seconds since the first rank began" }, rangemode: "tozero" },
    yaxis: { ...plain({ tickvals: ranks.map((_, row) => row), ticktext: ranks.map(rankName) }), range: [ranks.length - 0.5, -0.5] },
  }));
  byId("operation").value = String(chosen.timeline);
  const missing = chosen.rank !== null && !found.has(chosen.rank) && rowOfRank.has(chosen.rank);
  byId("timeline-hint").textContent =
    `The slowest ${ranks.length} of ${count(one.ranks, "rank")}, from ${moment(one.begun_s)}` +
    (found.size < one.ranks ? `; this page has the spans of ${found.size}, aiockpt report --chrome those of all` : "") +
    (missing ? `. Rank ${chosen.rank} is not among them.` : ".");
}
