// Numbers for people. Units are those of the Python side: binary bytes, three digits of time.

const UNITS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function grouped(value, digits) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, name] of UNITS) {
    if (Math.abs(value) >= unit) return `${grouped(value / unit, 2)} ${name}`.replace("-", "−");
  }
  return `${value} B`.replace("-", "−");
}

function signedBytes(value) {
  return value > 0 ? `+${bytes(value)}` : bytes(value);
}

function took(micro) {
  if (micro === null || micro === undefined) return "–";
  const size = Math.abs(micro);
  const [unit, name] = size >= 1e6 ? [1e6, "s"] : size >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const shown = micro / unit;
  const whole = String(Math.trunc(Math.abs(shown))).length;
  return `${grouped(shown, unit === 1 ? 0 : Math.max(0, 3 - whole))} ${name}`;
}

function percent(part, whole) {
  return whole > 0 ? `${grouped((100 * part) / whole, 1)}%` : "–";
}

function plural(count, one, many) {
  return `${grouped(count, 0)} ${count === 1 ? one : many || `${one}s`}`;
}

// Round numbers between which a scale is easy to read; base 2 for bytes.
function ticksOf(largest, wanted, base) {
  if (!(largest > 0)) return [];
  const rough = largest / wanted;
  const power = base === 2 ? 2 ** Math.floor(Math.log2(rough)) : 10 ** Math.floor(Math.log10(rough));
  const step = (base === 2 ? [1, 2] : [1, 2, 5, 10]).map((by) => by * power).find((each) => each >= rough) || power;
  const found = [];
  for (let at = 0; at <= largest * 1.0001 && found.length < 50; at += step) found.push(at);
  return found;
}
