// Tiles and tables. Whatever a client chose is text, never markup: textContent alone is set.

import * as texts from "./texts.js";

const PRESSURE_ALARMS = ["warn", "critical"];

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function tile({ name, value, more, used, alarm }) {
  const made = element("div", alarm ? "tile alarm" : "tile");
  made.append(element("div", "name", name), element("div", "value", value));
  if (used !== undefined) {
    const meter = element("meter");
    meter.value = used;
    meter.setAttribute("aria-label", `${name} used`);
    made.append(meter);
  }
  made.append(element("div", "more", more));
  return made;
}

export function drawTiles(place, ram, writtenRate) {
  const { takes, disk, pressure } = ram;
  const missed = Object.values(takes.misses).reduce((sum, count) => sum + count, 0);
  const fromRam = Math.max(0, takes.takes - missed - takes.ssd_hits - ram.takes_waiting);
  const reasons = Object.entries(takes.misses).filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
  place.replaceChildren(...[
    tier("RAM", ram.ram_bytes, ram.ram_bytes_cap, texts.counted(ram.images, "image")),
    tier("SSD", ram.ssd_bytes, ram.ssd_bytes_cap, disk.healthy ? "" : `failing: ${disk.reason}`),
    {
      name: "Tokens saved", value: texts.number(takes.tokens_reused),
      more: `${texts.percent(takes.tokens_reused, takes.tokens_requested)} of ` +
        `${texts.number(takes.tokens_requested)} asked for; ` +
        `${texts.counted(takes.prefills_saved, "prefill")} spared by waiting`,
    },
    {
      name: "Takes that hit", value: texts.percent(fromRam + takes.ssd_hits, takes.takes),
      more: `${texts.whole(takes.takes)}: RAM ${texts.whole(fromRam)}, SSD ` +
        `${texts.whole(takes.ssd_hits)}, missed ${texts.whole(missed)}` +
        reasons.map(([reason, count], at) => `${at ? ", " : ": "}${reason} ${texts.whole(count)}`).join(""),
    },
    {
      name: "Writer", value: `${texts.bytes(writtenRate)}/s`, alarm: ram.ssd_bytes_cap > 0 && !disk.healthy,
      more: `${texts.whole(ram.writes_queued)} queued, ${texts.bytes(disk.written_bytes)} written, ` +
        `${texts.whole(disk.failed)} failed`,
    },
    {
      name: "Memory pressure", value: pressure.level, alarm: PRESSURE_ALARMS.includes(pressure.level),
      more: [
        PRESSURE_ALARMS.includes(pressure.level) ? pressure.reason : "", texts.counted(ram.leases, "lease"), texts.counted(ram.pins, "pin"),
        texts.counted(ram.puts_in_flight, "put"), `${texts.whole(ram.takes_waiting)} waiting`,
      ].filter(Boolean).join(", "),
    },
  ].map(tile));
}

function tier(name, used, cap, more) {
  if (!cap) return { name, value: "off", more };
  const share = `${texts.percent(used, cap)} of ${texts.bytes(cap)}`;
  return { name, value: texts.bytes(used), used: used / cap, more: more ? `${share}, ${more}` : share };
}

// A column is a heading, what a row has there, and whether it is a number.
function drawTable(place, rows, columns, nothing) {
  if (!rows.length) {
    place.replaceChildren(element("p", "empty", nothing));
    return;
  }
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const [name, , isNumber] of columns) head.append(element("th", isNumber ? "number" : "", name));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const [, read, isNumber] of columns) {
      const cell = element("td", isNumber ? "number" : "", read(row));
      cell.title = cell.textContent;
      line.append(cell);
    }
  }
  const { scrollTop, scrollLeft } = place;
  place.replaceChildren(table);
  Object.assign(place, { scrollTop, scrollLeft });
}

export function drawTables(look) {
  const at = (id) => document.getElementById(id);
  const shown = look.clients.length < look.clients_count ? `, ${look.clients.length} shown` : "";
  at("clients-note").textContent = `processes: ${texts.whole(look.clients_count)}${shown}`;
  drawTable(at("clients"), look.clients, [
    ["process", (one) => `${one.pid || "?"} ${one.client}`],
    ["doing", (one) => one.doing || "idle"],
    ["since", (one) => (one.doing_seconds ? texts.duration(one.doing_seconds) : ""), true],
    ["requests", (one) => texts.whole(one.requests), true],
    ["leases", (one) => texts.whole(one.leases), true],
    ["pins", (one) => texts.whole(one.pins), true],
    ["puts", (one) => texts.whole(one.puts), true],
    ["claims", (one) => texts.whole(one.claims), true],
    ["up", (one) => texts.age(one.connected_seconds), true],
  ], "nobody is connected");
  drawTable(at("requests"), look.latency, [
    ["request", (one) => one.request],
    ["number", (one) => texts.whole(one.count), true],
    ["p50", (one) => texts.duration(one.p50), true],
    ["p90", (one) => texts.duration(one.p90), true],
    ["p99", (one) => texts.duration(one.p99), true],
  ], "no requests yet");
  drawTable(at("sessions"), look.sessions, [
    ["conversation", (one) => one.label],
    ["namespace", (one) => one.namespace],
    ["tokens", (one) => texts.whole(one.tokens), true],
    ["used", (one) => `${texts.age(one.idle_seconds)} ago`, true],
  ], "no client names its conversations");
  drawTable(at("claims"), look.claims, [
    ["process", (one) => one.pid || "?"],
    ["namespace", (one) => one.namespace],
    ["tokens", (one) => texts.whole(one.tokens), true],
    ["waiting for it", (one) => texts.whole(one.waiting), true],
  ], "nothing that others could wait for");
}
