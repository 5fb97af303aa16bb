// Ranks by where they stand and by when they were slow, in one phase.

const LAST = 10;
const MOST_BANDS = 160;
const HOT = [[0, "#fff7e6"], [0.25, "#fdd49a"], [0.5, "#f79d4d"], [0.75, "#d8482f"], [1, "#7a0f1c"]];
const HOT_IN_THE_DARK = [[0, "#22303c"], [0.25, "#3f4f86"], [0.5, "#9a4f96"], [0.75, "#f0724f"], [1, "#ffe08a"]];
const inTheDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

function groupings() {
  const names = [];
  for (const one of report.ranks) for (const name of Object.keys(one.mesh)) if (!names.includes(name)) names.push(name);
  return ["host", ...names];
}

// Ranks by group, in the order of hosts or coordinates: [label, rows].
function grouped(name) {
  const groups = new Map();
  report.ranks.forEach((one, row) => {
    const key = name === "host" ? one.host : one.mesh[name] ?? "–";
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  });
  const some = [...groups].map(([key, rows]) => [name === "host" ? key : `${name} ${key}`, rows, key]);
  return name === "host" ? some : some.sort((a, b) => a[2] - b[2]);
}

// What a cell of the map shows: one number for each rank.
function valuesOver() {
  const { grid, stage, over } = chosen;
  if (over !== "last" && over !== "all" && over !== "most") return grid.column(stage, Number(over));
  return Float32Array.from({ length: rankCount }, (_, row) => {
    const all = grid.row(stage, row);
    return over === "most" ? most(all) : median(over === "last" ? all.slice(-LAST) : all);
  });
}

// Colours begin below the median and end at five times it: quiet runs look quiet, and what is slow does not hide what is slower.
function scale(values) {
  const usual = median(values);
  const highest = most(values);
  if (!(usual > 0)) return { zmin: 0, zmax: highest > 0 ? highest : 1 };
  return { zmin: usual / 2, zmax: Math.min(Math.max(highest, 2 * usual), 5 * usual) };
}

function heatTrace(values) {
  const { zmin, zmax } = scale(values);
  const ends = [zmin, (zmin + zmax) / 2, zmax];
  return {
    type: "heatmap", colorscale: inTheDark() ? HOT_IN_THE_DARK : HOT, zmin, zmax, hoverongaps: false,
    colorbar: { thickness: 10, tickvals: ends, ticktext: ends.map(seconds), tickfont: { size: 11 }, outlinewidth: 0 },
  };
}

function drawPlaces() {
  const values = valuesOver();
  const usual = median(values);
  const groups = grouped(chosen.group);
  const largest = Math.max(...groups.map(([, rows]) => rows.length));
  const across = groups.length >= largest; // groups side by side, their ranks below each other
  const blank = () => Array.from({ length: across ? largest : groups.length }, () => Array(across ? groups.length : largest));
  const [z, text, ranks] = [blank(), blank(), blank()];
  groups.forEach(([, rows], group) => rows.forEach((row, place) => {
    const [y, x] = across ? [place, group] : [group, place];
    z[y][x] = values[row] === values[row] ? values[row] : null;
    ranks[y][x] = report.ranks[row].rank;
    text[y][x] = `${whereIs(row)}<br>${stageName(chosen.stage)}: <b>${seconds(values[row])}</b>` +
      (usual > 0 ? `, ${three(values[row] / usual)} × the median` : "");
  }));
  const labels = groups.map(([label]) => label);
  const along = thinned(labels, across ? 12 : 24);
  const inner = { showticklabels: false, ticks: "" };
  const gap = Math.max(z.length / 24, z[0].length / 80) > 1 ? 0 : 1;
  const trace = { ...heatTrace(values), z, text, customdata: ranks, hovertemplate: "%{text}<extra></extra>", xgap: gap, ygap: gap };
  const layout = base({
    height: heatHeight(), margin: { l: across ? 12 : 80, r: 10, t: 6, b: across ? 70 : 14 },
    xaxis: plain(across ? along : inner), yaxis: { ...plain(across ? inner : along), autorange: "reversed" },
    shapes: frame(ranks),
  });
  byId("place-caption").textContent = `${stageName(chosen.stage)}, ${byId("over").selectedOptions[0].textContent}; a ` +
    `${across ? "column" : "row"} for each ${chosen.group}; median of the ranks ${seconds(usual)}`;
  draw("places", [trace], layout, ({ points: [point] }) => choose({ rank: point.customdata }));
}

// Around the cell of the chosen rank, wide enough that the cell itself stays in sight.
function frame(ranks) {
  for (let y = 0; y < ranks.length; y++) {
    const x = ranks[y].indexOf(chosen.rank);
    if (chosen.rank !== null && x >= 0) {
      const [beside, above] = [Math.max(0.5, ranks[y].length / 100), Math.max(0.5, ranks.length / 50)];
      const at = { x0: x - beside, x1: x + beside, y0: y - above, y1: y + above };
      return [{ type: "rect", ...at, line: { color: theme()("accent"), width: 2 } }];
    }
  }
  return [];
}

const heatHeight = () => Math.max(190, Math.min(430, 70 + 26 * Math.min(rankCount, 16)));

function thinned(labels, most_) {
  const every = Math.ceil(labels.length / most_);
  const kept = labels.map((_, at) => at).filter((at) => at % every === 0);
  return { tickvals: kept, ticktext: kept.map((at) => labels[at]) };
}

// Rows of the map over time: a rank each, or, of more ranks than there are lines of pixels, neighbours of one group.
function bands() {
  const groups = grouped(chosen.group).map(([, rows]) => rows);
  const each = Math.ceil(rankCount / MOST_BANDS);
  return groups.flatMap((rows) => {
    const parts = [];
    for (let at = 0; at < rows.length; at += each) parts.push(rows.slice(at, at + each));
    return parts;
  });
}

function slowestOf(band) {
  const { grid, stage } = chosen;
  return grid.occasions.map((_, occasion) => {
    let slowest = band[0];
    for (const row of band) if (!(grid.row(stage, row)[occasion] <= grid.row(stage, slowest)[occasion])) slowest = row;
    return slowest;
  });
}

function drawSince() {
  const { grid, stage } = chosen;
  const slowest = bands().map(slowestOf);
  const z = slowest.map((rows) => rows.map((row, occasion) => grid.row(stage, row)[occasion]));
  const steps = grid.occasions.map((one) => String(one.step));
  const trace = {
    ...heatTrace(z.flat()), z, customdata: slowest, hovertemplate: "%{text}<extra></extra>",
    text: z.map((values, y) => values.map((value, x) =>
      `${whereIs(slowest[y][x])}<br>step ${steps[x]}, ${stageName(stage)}: <b>${seconds(value)}</b>`)),
    ...(rankCount <= 64 ? { xgap: 1, ygap: 1 } : {}),
  };
  const names = slowest.map((rows) => String(report.ranks[rows[0]].rank));
  const layout = base({
    height: heatHeight(), margin: { l: rankCount > 99 ? 60 : 44, r: 10, t: 6, b: 40 },
    xaxis: plain({ title: { text: "step" }, ...thinned(steps, 10) }),
    yaxis: { ...plain({ title: { text: "rank" }, ...thinned(names, 16) }), autorange: "reversed" },
  });
  byId("since-caption").textContent = `${stageName(stage)} of every ${grid.operation}, a row for ` +
    (z.length === rankCount ? "each rank" : `the slowest of ${Math.round(rankCount / z.length)} ranks`);
  draw("since", [trace], layout, ({ points: [point] }) => choose({
    rank: report.ranks[point.customdata].rank, timeline: timelineOf(chosen.grid.operation, chosen.grid.occasions[point.x]),
  }));
}

function drawRank() {
  const { grid, stage } = chosen;
  const rank = chosen.rank ?? report.ranks[0].rank;
  const at = grid.occasions.map((_, occasion) => occasion);
  const columns = at.map((occasion) => Array.from(grid.column(stage, occasion)).filter((value) => value === value)
    .sort((a, b) => a - b));
  const part = (share) => columns.map((some) => (some.length ? some[Math.round(share * (some.length - 1))] : null));
  const steps = grid.occasions.map((one) => String(one.step));
  const colour = theme();
  const line = (y, name, more) => ({
    type: "scatter", mode: "lines", x: at, y, name, text: y.map((value, x) => `${name}, step ${steps[x]}: ${seconds(value)}`),
    hovertemplate: "%{text}<extra></extra>", ...more,
  });
  const quiet = { color: "rgba(0,0,0,0)", width: 0 };
  const traces = [
    ...(rankCount >= 10 ? [
      line(part(0.05), "the fastest 5 %", { line: quiet, showlegend: false }),
      line(part(0.95), "9 of 10 ranks", { line: quiet, fill: "tonexty", fillcolor: colour("band") }),
    ] : []),
    line(part(0.5), "median of the ranks", { line: { color: colour("accent"), width: 2 } }),
    line(Array.from(grid.row(stage, rowOfRank.get(rank))), `rank ${rank}`, {
      mode: "lines+markers", line: { color: colour("bad"), width: 2 }, marker: { size: 5 },
    }),
  ];
  byId("rank-caption").textContent = `${stageName(stage)} of ${rankName(rank)}, beside the other ranks`;
  draw("rank", traces, base({
    height: 210, margin: { l: 60, r: 10, t: 6, b: 34 }, legend: { orientation: "h", y: 1.18, x: 1, xanchor: "right" },
    xaxis: plain({ ...thinned(steps, 16) }), yaxis: { ...secondsAxis(traces), rangemode: "tozero" },
  }));
}
