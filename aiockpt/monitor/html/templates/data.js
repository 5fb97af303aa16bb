// What the page has, and how numbers are shown.

const report = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function decodeFloats(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
  return new Float32Array(bytes.buffer);
}

const rankCount = report.ranks.length;
const rowOfRank = new Map(report.ranks.map((one, row) => [one.rank, row]));

class Grid {
  constructor(told) {
    this.operation = told.operation;
    this.stages = told.stages;
    this.occasions = told.occasions.map(([start, step]) => ({ start, step }));
    this.values = decodeFloats(told.seconds);
  }
  // Seconds of one rank in one stage, an occasion after the other.
  row(stage, rank) {
    const width = this.occasions.length;
    const begin = (this.stages.indexOf(stage) * rankCount + rank) * width;
    return this.values.subarray(begin, begin + width);
  }
  column(stage, occasion) {
    return Float32Array.from({ length: rankCount }, (_, rank) => this.row(stage, rank)[occasion]);
  }
  ranksWith(stage) {
    let count = 0;
    for (let rank = 0; rank < rankCount; rank++) count += this.row(stage, rank).some((value) => value === value);
    return count;
  }
}
const grids = report.grids.map((told) => new Grid(told));

function median(values) {
  const known = Array.from(values).filter((value) => value === value).sort((a, b) => a - b);
  if (!known.length) return NaN;
  const middle = known.length >> 1;
  return known.length % 2 ? known[middle] : (known[middle - 1] + known[middle]) / 2;
}
const most = (values) => values.reduce((best, value) => (value > best || best !== best ? value : best), NaN);

function three(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}
function seconds(value) {
  if (value !== value || value === null) return "–";
  if (value >= 7200) return `${three(value / 3600)} h`;
  if (value >= 120) return `${three(value / 60)} min`;
  if (value >= 1) return `${three(value)} s`;
  if (value >= 1e-3) return `${three(value * 1e3)} ms`;
  return `${three(value * 1e6)} µs`;
}
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; bytes >= 1024 && at < units.length - 1; at++) bytes /= 1024;
  return at ? `${three(bytes)} ${units[at]}` : `${bytes} B`;
}
const speed = (bytesPerSecond) => `${size(bytesPerSecond)}/s`;

const two = (number) => String(number).padStart(2, "0");
function clock(at) {
  const date = new Date(at * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
function moment(at) {
  const date = new Date(at * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(at)}`;
}
// Plotly shows a date in words as they are; a number it would show in UTC.
const plotTime = (at) => `${moment(at)}.${String(Math.floor((at % 1) * 1000)).padStart(3, "0")}`;
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const stageName = (stage) => (stage === "whole" ? "all of it" : stage);

function rankName(rank) {
  const row = rowOfRank.get(rank);
  return row === undefined ? `rank ${rank}` : `rank ${rank} · ${report.ranks[row].host}`;
}
function whereIs(row) {
  const { rank, host, mesh } = report.ranks[row];
  return [`rank ${rank}`, host, ...Object.entries(mesh).map(([name, at]) => `${name} ${at}`)].join(" · ");
}

const STAGE_COLOURS = {
  whole: "#9aa5af", pause: "#1c2126", snapshot: "#3b82d6", write: "#e8a33d", flush: "#d1495b", vote: "#2a9d78",
  wait: "#b9c2cb", commit: "#8e5bb5", begin: "#5ec4d6", walk: "#7a8fa6", plan: "#5a6b7d", barrier: "#6d4c41",
  find: "#5ec4d6", match: "#7a8fa6", read: "#e8a33d", exchange: "#8e5bb5", scatter: "#2a9d78", verify: "#d1495b",
  copy: "#3b82d6",
};
function theme() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}
function stageColour(stage) {
  return stage === "pause" ? theme()("ink") : STAGE_COLOURS[stage] || "#888888";
}

// What the reader looks at; who changes it calls page.js to draw again.
const chosen = { grid: grids[0], stage: null, group: null, over: "last", rank: null, timeline: null };
