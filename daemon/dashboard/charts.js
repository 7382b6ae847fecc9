// The charts: from the history and the tree to what the charting library draws.

import { SPANS } from "./history.js";
import * as texts from "./texts.js";

const CONFIG = { displayModeBar: false, responsive: true, showTips: false };
const PRESSURE_LEVELS = ["unknown", "normal", "warn", "critical"];
const SECONDS_OF_STEP = { second: 1, minute: 60 };
// Deeper levels are a click away.
const TREE_LEVELS = 14;
// Told apart also by those who see colours differently; more reasons than these are rare together.
const MISS_COLOURS = ["#cc6677", "#aa4499", "#ddcc77", "#882255", "#999933", "#88ccee", "#44aa99", "#117733"];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// The library's dates have no zone: it gets the wall clock's.
function wallClock(unixSeconds) {
  const offset = new Date(unixSeconds * 1000).getTimezoneOffset() * 60;
  return new Date((unixSeconds - offset) * 1000).toISOString().slice(0, 23).replace("T", " ");
}

function layout(table, span, more) {
  const now = table.times.at(-1) ?? Date.now() / 1000;
  const seconds = span.rows * SECONDS_OF_STEP[span.step];
  const axis = { gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, fixedrange: true };
  return {
    margin: { l: 62, r: 8, t: 6, b: 24 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), size: 11, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { font: { size: 12 }, align: "left", namelength: -1 }, hovermode: "x unified",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 }, traceorder: "normal" },
    showlegend: true,
    ...more,
    xaxis: { ...axis, type: "date", range: [wallClock(now - seconds), wallClock(now)], nticks: 5,
      tickformat: seconds > 600 ? "%H:%M" : "%H:%M:%S", hoverformat: "%H:%M:%S" },
    yaxis: { ...axis, rangemode: "tozero", ...more.yaxis },
    ...(more.yaxis2 && { yaxis2: { ...axis, ...more.yaxis2 } }),
  };
}

function byteAxis(most) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(most, 1) / 4));
  const ticks = [0, 1, 2, 3, 4].map((count) => count * step).filter((tick) => tick <= most * 1.08);
  return { range: [0, Math.max(most, 1) * 1.08], tickvals: ticks, ticktext: ticks.map(texts.bytes) };
}

const DECADES = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10, 100];

// Whole decades: within one alone an axis would have no tick.
function secondsAxis(traces) {
  const known = traces.flatMap(({ y }) => y).filter((value) => value > 0).map(Math.log10);
  const range = known.length ? [Math.floor(Math.min(...known)), Math.ceil(Math.max(...known))] : [-3, 0];
  if (range[0] === range[1]) range[1] += 1;
  return { type: "log", rangemode: "normal", range, tickvals: DECADES, ticktext: DECADES.map(texts.duration) };
}

function line(name, x, y, color, text, more = {}) {
  const shown = y.map((value) => (value === null ? "" : text(value)));
  return {
    type: "scatter", mode: "lines", name, x, y, text: shown,
    hovertemplate: `${name} %{text}<extra></extra>`, line: { color, width: 1.8 }, ...more,
  };
}

function filled(color) {
  return { fill: "tozeroy", fillcolor: `${color}38` };
}

function newest(values) {
  return Math.max(0, ...values.filter((value) => value !== null));
}

export function drawHistory(tables, spanName) {
  const span = SPANS[spanName];
  const table = tables[span.step];
  const ends = table.ends(span);
  const x = ends.slice(1).map((end) => wallClock(table.times[end]));
  const draw = (id, traces, more) => Plotly.react(id, traces, layout(table, span, more), CONFIG);
  for (const [id, capName] of [["ram", "ram_target_bytes"], ["ssd", "ssd_bytes_cap"]]) {
    const used = table.values(`${id}_bytes`, ends);
    const cap = table.values(capName, ends);
    draw(id, [
      line("held", x, used, colour(id), texts.bytes, filled(colour(id))),
      line(id === "ram" ? "limit now" : "limit", x, cap, colour("muted"), texts.bytes,
        { line: { color: colour("muted"), width: 1.2, dash: "dash" } }),
    ], { yaxis: byteAxis(newest([...used, ...cap])) });
  }
  draw("tokens", [
    line("asked for", x, table.rates(["tokens_requested"], ends), colour("muted"), texts.number),
    line("saved", x, table.rates(["tokens_reused"], ends), colour("both"), texts.number, filled(colour("both"))),
  ], {});
  draw("takes", takes(table, ends, x), { barmode: "stack", bargap: 0.1 });
  const latency = [
    ["take p50", "take_p50_seconds", "first", "dot"], ["take p99", "take_p99_seconds", "first", "solid"],
    ["commit p50", "commit_p50_seconds", "second", "dot"], ["commit p99", "commit_p99_seconds", "second", "solid"],
  ].map(([name, column, shade, dash]) => line(name, x, table.largest(column, ends), colour(shade),
    texts.duration, { mode: "lines+markers", marker: { size: 4 }, line: { color: colour(shade), width: 1.5, dash } }));
  draw("latency", latency, { yaxis: secondsAxis(latency) });
  const written = table.rates(["written_bytes"], ends);
  const bytes = byteAxis(newest(written));
  draw("writer", [
    line("written/s", x, written, colour("ssd"), texts.bytes, filled(colour("ssd"))),
    line("pressure", x, table.largest("pressure_level", ends), colour("alarm"),
      (level) => PRESSURE_LEVELS[Math.round(level)] ?? "",
      { yaxis: "y2", line: { color: colour("alarm"), width: 1.5, shape: "hv" } }),
  ], {
    yaxis: { ...bytes, domain: [0, 0.66] },
    yaxis2: { domain: [0.74, 1], range: [-0.3, 3.3], tickvals: [1, 3], ticktext: ["normal", "critical"] },
  });
  return newest(table.rates(["written_bytes"], ends.slice(-6)).slice(-1));
}

function takes(table, ends, x) {
  const misses = table.misses();
  const missed = table.rates(misses, ends);
  const fromSsd = table.rates(["ssd_hits"], ends);
  const fromRam = table.rates(["takes"], ends)
    .map((all, at) => (all === null ? null : Math.max(0, all - missed[at] - fromSsd[at])));
  const bars = (name, y, color) => ({
    type: "bar", name, x, y, marker: { color, line: { width: 0 } },
    hovertemplate: `${name} %{y:.3~g}/s<extra></extra>`,
  });
  const seen = misses.map((name) => [name, table.rates([name], ends)]).filter(([, y]) => newest(y) > 0);
  return [
    bars("RAM", fromRam, colour("ram")),
    bars("SSD", fromSsd, colour("ssd")),
    ...seen.map(([name, y]) => bars(name.slice("misses_".length).replaceAll("_", "-"), y,
      MISS_COLOURS[misses.indexOf(name) % MISS_COLOURS.length])),
  ];
}

const TIERS = { ram: "RAM", both: "RAM and SSD", ssd: "SSD", leaving: "leaving" };

export function drawTree(nodes, width) {
  // A box of its own above the namespaces: the library wants one root.
    const trace = {
    type: "icicle", branchvalues: "remainder", sort: false, maxdepth: TREE_LEVELS,
    ids: ["all", ...nodes.map((_, number) => `${number}`)],
    parents: ["", ...nodes.map((node) => (node.parent < 0 ? "all" : `${node.parent}`))],
    labels: ["all namespaces", ...nodes.map((node) => texts.escaped(node.name))],
    values: [0, ...nodes.map((node) => node[width])],
    hovertext: ["", ...nodes.map(hoverText)], hoverinfo: "text",
    marker: {
      colors: [colour("trunk"), ...nodes.map((node) => colour(node.tier || "trunk"))],
      line: { color: colour("card"), width: 1 },
    },
    tiling: { orientation: "v", pad: 1 }, root: { color: colour("trunk") },
    // The library fades leaves, and its own choice of text is hard to read on these colours.
    leaf: { opacity: 1 },
    textfont: { size: 14, color: [colour("text"), ...nodes.map((node) => colour(node.tier ? "on-tier" : "text"))] },
    texttemplate: "%{label}", pathbar: { visible: true, thickness: 20 },
  };
  return Plotly.react("tree", [trace], {
    margin: { l: 0, r: 0, t: 4, b: 0 }, paper_bgcolor: "rgba(0,0,0,0)", uirevision: "tree",
    // A label that does not fit is left out: the library would shrink it until nobody can read it.
    uniformtext: { minsize: 12, mode: "hide" },
    font: { color: colour("text"), size: 11, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { align: "left", font: { size: 12 } },
  }, CONFIG);
}

function hoverText(node) {
  const name = `<b>${texts.escaped(node.name)}</b>`;
  if (node.kind === "namespace") return `${name}<br>namespace`;
  return [
    `${name}${node.kind === "segment" ? ` (${texts.counted(node.tokens, "token")})` : ""}`,
    `${texts.bytes(node.nbytes)}, ${TIERS[node.tier]}`,
    node.sharing > 1 ? `shared by ${texts.whole(node.sharing)} branches` : "one branch",
    node.sessions.length ? `used by ${node.sessions.map(texts.escaped).join(", ")}` : "",
    node.holders ? `in use now by ${texts.whole(node.holders)}` : "",
    node.idle_seconds === null
      ? "not used since the start"
      : `last used ${texts.age(node.idle_seconds)} ago, ${texts.counted(node.uses, "hit")}`,
  ].filter(Boolean).join("<br>");
}
