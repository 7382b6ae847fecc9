// Numbers as text for people, as the command line writes them.

export function bytes(count) {
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return `${+size.toPrecision(4)} ${unit}`;
    size /= 1024;
  }
  return `${+size.toPrecision(4)} TiB`;
}

export function number(count) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (count >= size) return `${+(count / (unit === "k" ? 1e3 : size)).toPrecision(3)}${unit}`;
  }
  return whole(count);
}

export function whole(count) {
  return Math.round(count).toLocaleString("en-US");
}

export function counted(count, what) {
  return `${whole(count)} ${what}${count === 1 ? "" : "s"}`;
}

export function percent(part, all) {
  return all ? `${(100 * part / all).toFixed(1)} %` : "–";
}

export function duration(seconds) {
  if (seconds >= 120) return age(seconds);
  if (seconds >= 1) return `${+seconds.toPrecision(3)} s`;
  if (seconds >= 1e-3) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  return `${Math.round(seconds * 1e6)} µs`;
}

export function age(seconds) {
  for (const [unit, size, below] of [["s", 1, 120], ["min", 60, 7200], ["h", 3600, 172800]]) {
    if (seconds < below) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(seconds / 86400)} d`;
}

// The charting library reads a little markup in its texts: names of clients must not be any.
export function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
