// Captures by size: how long each graph took, and what its pool grew by, largest first.

function captureRows(rank) {
  const groups = new Map();
  for (const each of rank.marks.captures) {
    if (!groups.has(each[0])) groups.set(each[0], []);
    groups.get(each[0]).push(each);
  }
  return [...groups.entries()].slice(-6).map(([visit, rows]) => ({ visit: rank.visits[visit], rows }));
}

function drawCaptures(groups, width) {
  const narrow = width < 640;
  const columns = narrow ? 1 : 2;
  const gap = 28;
  const each = (width - gap * (columns - 1)) / columns;
  const block = 104;
  const height = Math.ceil((groups.length * 2) / columns) * block;
  const drawing = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "drawing" });
  const longest = Math.max(1, ...groups.flatMap((group) => group.rows.map((row) => row[3])));
  const largest = Math.max(1, ...groups.flatMap((group) => group.rows.map((row) => Math.max(0, row[4] + row[5]))));
  groups.forEach((group, index) => {
    const isTrial = group.visit?.state === "capture_throwaway";
    [
      ["time", (row) => row[3], longest, took],
      ["memory", (row) => Math.max(0, row[4] + row[5]), largest, bytes],
    ].forEach(([what, valueOf, most, words], column) => {
      const place = index * 2 + column;
      const x = (place % columns) * (each + gap);
      const y = Math.floor(place / columns) * block;
      const sum = group.visit ? group.visit.graphs[column + 1] : 0;
      const left = group.visit ? group.visit.graphs[0] - group.rows.length : 0;
      drawing.append(s("text", { x, y: y + 12, class: "name" }, cut(`${group.visit ? visitName(group.visit) : ""}: ${what}, ${words(sum)} together, at most ${words(Math.max(...group.rows.map(valueOf)))}${left > 0 ? `; ${left} not drawn` : ""}`, each)));
      drawing.append(s("line", { x1: x, x2: x + each, y1: y + 80, y2: y + 80, class: "axis" }));
      const wide = Math.min(46, each / group.rows.length);
      group.rows.forEach((row, at) => {
        const tall = (56 * valueOf(row)) / most;
        drawing.append(
          s("rect", { x: x + at * wide, y: y + 80 - tall, width: Math.max(1, wide - Math.min(4, wide / 4)), height: tall, class: isTrial ? "capture trial" : "capture" }, s("title", {}, `size ${row[1]}: ${words(valueOf(row))}`)),
        );
        const every = Math.ceil(28 / wide);
        if (at % every === 0) drawing.append(s("text", { x: x + at * wide, y: y + 93, class: "tick" }, String(row[1])));
      });
    });
  });
  return drawing;
}

function capturesFigure(rank) {
  const groups = captureRows(rank);
  if (groups.length === 0) return null;
  const drawing = picture(`Captured graphs of ${rank.label} by size: time and memory of each`, (width) => drawCaptures(groups, width));
  return [h("h3", {}, "Captures by size"), drawing];
}
