// The loop: asks once a second for what is new and draws it. A hidden page asks nothing.

import { drawHistory, drawTree } from "./charts.js";
import { Table } from "./history.js";
import { drawTables, drawTiles } from "./tables.js";
import * as texts from "./texts.js";

const PAUSE_MS = 1000;
const TREE_PAUSE_MS = 3000;

const tables = { second: new Table("second"), minute: new Table("minute") };
const view = { span: "recent", width: "tokens", boot: "", look: null, tree: null, treeDue: 0 };

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", credentials: "omit", redirect: "error" });
  if (!answer.ok) throw new Error(`the dashboard answered ${answer.status}`);
  const said = await answer.json();
  if (said.trouble) throw new Error(said.trouble);
  return said;
}

function show(state, text) {
  const place = document.getElementById("state");
  place.className = state;
  place.textContent = text;
}

async function update() {
  const query = new URLSearchParams({
    boot: view.boot, second: tables.second.last, minute: tables.minute.last,
  });
  const look = await ask(`look?${query}`);
  if (look.boot !== view.boot) Object.values(tables).forEach((table) => table.clear());
  view.boot = look.boot;
  view.look = look;
  for (const [step, table] of Object.entries(tables)) table.append(look.history[step]);
  draw();
  if (performance.now() < view.treeDue) return;
  view.tree = await ask("tree");
  view.treeDue = performance.now() + TREE_PAUSE_MS;
  drawTheTree();
}

function draw() {
  if (!view.look) return;
  const { version, pid, uptime_seconds: uptime } = view.look.daemon;
  document.getElementById("about").textContent = `${version}, process ${pid}, up ${texts.age(uptime)}`;
  const writtenRate = drawHistory(tables, view.span);
  drawTiles(document.getElementById("tiles"), view.look.ram_tier, writtenRate);
  drawTables(view.look);
}

function drawTheTree() {
  if (!view.tree) return;
  const { nodes, shown, count } = view.tree;
  document.getElementById("tree-note").textContent = shown < count
    ? `the ${texts.whole(shown)} pieces used last of ${texts.whole(count)}`
    : texts.counted(count, "piece");
  drawTree(nodes, view.width);
}

function chooser(id, choose) {
  const place = document.getElementById(id);
  place.addEventListener("click", ({ target }) => {
    if (!target.value) return;
    for (const button of place.children) button.setAttribute("aria-pressed", button === target);
    choose(target.value);
  });
}

async function run() {
  if (document.hidden) {
    show("", "paused");
    document.addEventListener("visibilitychange", run, { once: true });
    return;
  }
  try {
    await update();
    show("live", "live");
  } catch (error) {
    show("trouble", `trying again: ${error.message}`);
  }
  setTimeout(run, PAUSE_MS);
}

chooser("span", (span) => { view.span = span; draw(); });
chooser("width", (width) => { view.width = width; drawTheTree(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { draw(); drawTheTree(); });
run();
