// Memory, state by state: one bar each, stacked by account, against what was asked for and what there is.

const ROW = 30;

function hatches() {
  return s(
    "defs",
    {},
    ["kv", "graphs", "other", "unexplained", "gap", "stall"].map((name) =>
      s(
        "pattern",
        { id: `hatch-${name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: name === "other" ? "rotate(-45)" : "rotate(45)" },
        s("rect", { width: 6, height: 6, class: `ground-${name}` }),
        s("rect", { width: 2.5, height: 6, class: `line-${name}` }),
      ),
    ),
  );
}

// The patterns of all drawings, once.
function patternStore() {
  return s("svg", { width: 0, height: 0, "aria-hidden": "true", class: "store" }, hatches());
}

function stack(reading, x, y, height, scale) {
  let from = 0;
  return reading.parts.map((part) => {
    const width = Math.max(0, scale * Math.max(0, part.bytes));
    const bar = s(
      "rect",
      { x: x + from, y, width, height, class: `part k-${part.kind}` },
      s("title", {}, `${part.name}: ${bytes(part.bytes)}`),
    );
    from += width;
    return bar;
  });
}

function legend(parts) {
  const seen = new Map();
  for (const part of parts) if (!seen.has(part.name)) seen.set(part.name, part);
  const ordered = [...seen.values()].sort((one, two) => report.kinds.indexOf(one.kind) - report.kinds.indexOf(two.kind));
  return h(
    "ul",
    { class: "legend" },
    ordered.map((part) =>
      h("li", {}, s("svg", { width: 14, height: 14, "aria-hidden": "true" }, s("rect", { width: 14, height: 14, class: `part k-${part.kind}` })), said(part.name)),
    ),
  );
}

function extentOf(rank) {
  const sizes = rank.visits
    .map((visit) => [readingOf(rank, visit.memory), visit.tried || 0])
    .filter(([reading]) => reading)
    .map(([reading, tried]) => Math.max(reading.total || 0, reading.used + tried));
  const peaks = rank.visits.map((visit) => visit.peak || 0);
  return Math.max(1, rank.request || 0, ...sizes, ...peaks);
}

// Its label stands at the top; below, the line runs through all rows, or through the bars alone.
function limitLine(x, top, pieces, text, kind, width) {
  const atEnd = x > width * 0.6;
  return s(
    "g",
    { class: `limit ${kind}` },
    pieces.map(([from, to]) => s("line", { x1: x, x2: x, y1: from, y2: to })),
    s("text", { x: atEnd ? x - 4 : x + 4, y: top + 9, "text-anchor": atEnd ? "end" : "start" }, text),
  );
}

function drawMemory(width) {
  const rank = rankNow();
  const visits = rank.visits.filter((visit) => visit.memory !== null);
  if (visits.length === 0) return h("p", { class: "empty" }, "Nothing was read or printed of memory.");
  const narrow = width < 640;
  const left = narrow ? 0 : 196;
  const right = narrow ? 4 : 236;
  const row = narrow ? ROW + 16 : ROW;
  const top = 36;
  const plot = width - left - right;
  const largest = extentOf(rank);
  const scale = plot / largest;
  const height = top + visits.length * row + 26;
  const total = visits.map((visit) => readingOf(rank, visit.memory).total).find((each) => each !== null);
  const bottom = top + visits.length * row;
  const drawing = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "drawing" });
  for (const tick of ticksOf(largest, narrow ? 3 : 6, 2)) {
    const x = left + tick * scale;
    drawing.append(s("line", { x1: x, x2: x, y1: top, y2: bottom, class: "grid" }));
    drawing.append(s("text", { x, y: bottom + 16, class: "tick", "text-anchor": tick === 0 ? "start" : x > left + plot - 30 ? "end" : "middle" }, bytes(tick)));
  }
  let before = null;
  visits.forEach((visit, at) => {
    const reading = readingOf(rank, visit.memory);
    const y = top + at * row;
    const bar = narrow ? y + 16 : y + 5;
    const thick = 19;
    const group = s("g", { class: `state-row ${visit.ended}`, "data-visit": rank.visits.indexOf(visit) });
    group.append(s("rect", { x: 0, y, width, height: row, class: "hit", onclick: () => chooseFrame(lastFrameOf(rank, rank.visits.indexOf(visit))) }));
    const name = s("text", { x: narrow ? 0 : left - 10, y: narrow ? y + 11 : bar + 14, "text-anchor": narrow ? "start" : "end", class: "name" });
    name.append(cut(visitName(visit), narrow ? width * 0.55 : left - 30));
    if (visit.ended !== "left") name.append(s("tspan", { class: "bad" }, visit.ended === "failed" ? " ✕" : " …"));
    group.append(name, ...stack(reading, left, bar, thick, scale));
    if (visit.peak !== null && visit.peak > reading.own) {
      const x = left + visit.peak * scale;
      group.append(
        s("line", { x1: left + reading.own * scale, x2: x, y1: bar + thick / 2, y2: bar + thick / 2, class: "whisker" }),
        s("line", { x1: x, x2: x, y1: bar + 3, y2: bar + thick - 3, class: "whisker" }, s("title", {}, `peak: ${bytes(visit.peak)}`)),
      );
    }
    if (visit.tried) {
      group.append(
        s("rect", { x: left + reading.used * scale, y: bar + 1, width: Math.max(2, visit.tried * scale), height: thick - 2, class: "tried" }, s("title", {}, `asked for and not had: ${bytes(visit.tried)}`)),
      );
    }
    const change = before === null ? null : reading.own - before;
    const words = s("text", { x: narrow ? width : left + plot + 10, y: narrow ? y + 11 : bar + 14, "text-anchor": narrow ? "end" : "start", class: "value" }, bytes(reading.own));
    if (change !== null && change !== 0) words.append(s("tspan", { class: "change", dx: 8 }, signedBytes(change)));
    group.append(words);
    drawing.append(group);
    before = reading.own;
  });
  const pieces = (from) => (narrow ? visits.map((_, at) => [top + at * row + 14, top + at * row + 37]) : [[from, bottom]]);
  if (total) drawing.append(limitLine(left + total * scale, 2, pieces(2), `device ${bytes(total)}`, "device", width));
  if (rank.request) drawing.append(limitLine(left + rank.request * scale, 16, pieces(16), `request ${bytes(rank.request)}`, "request", width));
  markRow(drawing);
  return drawing;
}

function lastFrameOf(rank, visit) {
  let found = 0;
  rank.frames.forEach((frame, at) => {
    if (frame[2] === visit) found = at;
  });
  return found;
}

function markRow(drawing) {
  const frame = frameOf(rankNow(), view.frame);
  for (const row of drawing.querySelectorAll("[data-visit]")) {
    row.classList.toggle("now", frame !== null && Number(row.dataset.visit) === frame.at);
  }
}

// What was over or left, in words: the highest that this process stood, against the request.
function balance(rank) {
  const readings = rank.visits.map((visit) => readingOf(rank, visit.memory));
  const last = readings.filter(Boolean).pop();
  if (!last) return null;
  if (last.basis === "printed") {
    const sum = `The log printed ${bytes(last.own)} of accounts`;
    return rank.request ? `${sum}, against a request of ${bytes(rank.request)}.` : `${sum}.`;
  }
  const end = rank.visits[rank.visits.length - 1];
  const highest = Math.max(last.own, end.peak || 0);
  if (!rank.request) return `${bytes(highest)} were ours at the end; nobody said how much was asked for.`;
  const over = highest - rank.request;
  const tried = end.tried ? `; ${bytes(end.tried)} more were asked for at once` : "";
  return over > 0
    ? `At the end ${bytes(highest)} were ours, over the request of ${bytes(rank.request)} by ${bytes(over)}${tried}.`
    : `At the end ${bytes(highest)} were ours; ${bytes(-over)} of the request of ${bytes(rank.request)} were left${tried}.`;
}

function memoryPanel() {
  const drawing = picture("Memory by state, stacked by account; the ledger below has the same numbers as a table", drawMemory);
  const words = h("p", { class: "words" });
  const keys = h("div", {});
  const show = () => {
    const rank = rankNow();
    words.textContent = balance(rank) || "";
    clear(keys, legend(rank.visits.flatMap((visit) => readingOf(rank, visit.memory)?.parts || [])));
    drawing.redraw();
  };
  watch("rank", show);
  watch("frame", () => markRow(drawing));
  show();
  return panel(
    "memory",
    "Memory, state by state",
    "Each bar is the device as the state ended. Right of it: what is charged to this process, and the change since the state before. A whisker is the peak inside the state; a dashed box is what was asked for and not had.",
    words,
    drawing,
    keys,
  );
}
