// The plan, and the way through it. Where things stand was computed in Python; here they get lines.

const NODE = { width: 168, height: 28, row: 46 };

function graphPlaces(width) {
  const states = report.graph.states;
  const columns = Math.max(...states.map((state) => state.column), 0) + 1;
  const leftward = report.graph.edges.filter((edge) => laneSide(edge) === "left").length;
  const margin = Math.min(26 + 19 * leftward, width < 640 ? 64 : 150);
  const wide = Math.min(NODE.width, columns === 2 ? (width - margin - 60) / 2.35 : width - margin - 90);
  const gap = columns === 2 ? Math.max(34, Math.min(150, width - margin - wide * 2 - 60)) : 0;
  const places = new Map();
  for (const state of states) places.set(state.name, { ...state, x: margin + state.column * (wide + gap), y: 14 + state.row * NODE.row, wide });
  const rows = Math.max(...states.map((state) => state.row), 0) + 1;
  return { places, height: 14 + rows * NODE.row + 6 };
}

function stateAt(name) {
  return report.graph.states.find((state) => state.name === name);
}

// Lines that are no short step run beside their column: back and ahead on the left, in the second column on the right.
function laneSide(edge) {
  const [from, to] = [stateAt(edge.source), stateAt(edge.target)];
  if (!from || !to || from.column !== to.column) return "across";
  if (to.row - from.row > 0 && to.row - from.row <= 1) return "step";
  return from.column === 0 ? "left" : "right";
}

function edgeLine(edge, places, lane) {
  const [from, to] = [places.get(edge.source), places.get(edge.target)];
  const side = laneSide(edge);
  const half = NODE.height / 2;
  if (side === "step") {
    const x = from.x + from.wide / 2;
    return { d: `M${x},${from.y + NODE.height} L${x},${to.y - 1}`, x: x + 6, y: (from.y + NODE.height + to.y) / 2 + 3.5, anchor: "start" };
  }
  if (side === "across") {
    const rightward = to.x > from.x;
    const x1 = rightward ? from.x + from.wide : from.x;
    const x2 = rightward ? to.x - 1 : to.x + to.wide + 1;
    const [y1, y2] = [from.y + half + (rightward ? 5 : -5), to.y + half + (rightward ? -5 : 5)];
    const middle = (x1 + x2) / 2;
    return { d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`, x: middle, y: (y1 + y2) / 2 - 4, anchor: "middle" };
  }
  const out = side === "left" ? -1 : 1;
  const x = side === "left" ? from.x : from.x + from.wide;
  const reach = x + out * (14 + lane * 19);
  const [y1, y2] = [from.y + half + 5, to.y + half - 5];
  return {
    d: `M${x},${y1} L${reach},${y1} L${reach},${y2} L${x + out},${y2}`,
    x: reach + out * 4, y: (y1 + y2) / 2, anchor: "middle", turn: side === "left" ? -90 : 90,
  };
}

// Lines beside a column must not lie on each other: the shortest runs closest.
function lanesOf(edges) {
  const taken = { left: [], right: [] };
  const lane = new Map();
  const length = (edge) => Math.abs(stateAt(edge.target).row - stateAt(edge.source).row);
  const beside = edges.filter((edge) => ["left", "right"].includes(laneSide(edge))).sort((one, two) => length(one) - length(two));
  for (const edge of beside) {
    const [from, to] = [stateAt(edge.source).row, stateAt(edge.target).row].sort((one, two) => one - two);
    const rows = taken[laneSide(edge)];
    let at = 0;
    while (rows[at]?.some(([a, b]) => from < b + 0.1 && to > a - 0.1)) at += 1;
    (rows[at] = rows[at] || []).push([from, to]);
    lane.set(edge, at);
  }
  return lane;
}

function drawGraph(width) {
  const graph = report.graph;
  if (graph.states.length === 0) return h("p", { class: "empty" }, "No state was entered, and the journal holds no plan.");
  const rank = rankNow();
  const { places, height } = graphPlaces(width);
  const lane = lanesOf(graph.edges);
  const taken = new Map();
  for (const [source, edge, target] of rank.steps) {
    const key = JSON.stringify([source, target]);
    taken.set(key, (taken.get(key) || 0) + 1);
    if (edge) taken.set(JSON.stringify([source, target, edge]), (taken.get(JSON.stringify([source, target, edge])) || 0) + 1);
  }
  const drawing = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "drawing plan" });
  drawing.append(
    s(
      "defs",
      {},
      ["arrow", "arrow-taken", "arrow-bad"].map((id) =>
        s("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse", markerUnits: "userSpaceOnUse" }, s("path", { d: "M0,0.5 L8,4 L0,7.5 z", class: id })),
      ),
    ),
  );
  const ordered = [...graph.edges].sort((one, two) => countOf(taken, one) - countOf(taken, two));
  const labels = s("g", {});
  for (const edge of ordered) {
    const count = countOf(taken, edge);
    const bad = edge.policy === "recover" || edge.policy === "fail" || edge.policy === "unknown";
    const line = edgeLine(edge, places, lane.get(edge) || 0);
    const kind = `edge ${count > 0 ? "taken" : "open"} ${bad ? "bad" : ""}`;
    const bound = edge.bound === null ? "" : `, at most ${edge.bound}`;
    drawing.append(s("path", { d: line.d, class: kind, "marker-end": `url(#${count > 0 ? (bad ? "arrow-bad" : "arrow-taken") : "arrow"})` }, s("title", {}, `${edge.source} → ${edge.target}: ${edge.name || "step"}${bound}; taken ${count}×`)));
    if (edge.name !== "advance" || count > 1) {
      const text = `${edge.name === "advance" ? "" : edge.name}${count > 1 ? ` ×${count}` : ""}`.trim();
      const turn = line.turn ? { transform: `rotate(${line.turn} ${line.x} ${line.y})` } : {};
      labels.append(s("text", { x: line.x, y: line.y, "text-anchor": line.anchor, class: `edge-name ${count > 0 ? "taken" : ""}`, ...turn }, cut(text, 130)));
    }
  }
  for (const place of places.values()) {
    const visits = rank.visits.filter((visit) => visit.state === place.name);
    const reached = place.is_end ? rank.steps.some((step) => step[2] === place.name) : visits.length > 0;
    const failed = visits.length > 0 && visits[visits.length - 1].ended !== "left";
    drawing.append(
      s(
        "g",
        { class: `node ${reached ? "reached" : ""} ${failed ? "failed" : ""} ${place.is_end ? `end ${place.name === "ready" ? "good" : "bad"}` : ""}`, "data-state": place.name },
        s("rect", { x: place.x, y: place.y, width: place.wide, height: NODE.height, rx: place.is_end ? 14 : 2 }, s("title", {}, place.summary || place.name)),
        s("text", { x: place.x + place.wide / 2, y: place.y + 18.5, "text-anchor": "middle" }, cut(place.name, place.wide - (visits.length > 1 ? 30 : 10)), visits.length > 1 && s("tspan", { class: "times" }, ` ×${visits.length}`), failed && " ✕"),
      ),
    );
  }
  drawing.append(labels);
  markNode(drawing);
  return drawing;
}

function countOf(taken, edge) {
  const named = taken.get(JSON.stringify([edge.source, edge.target, edge.name]));
  if (named !== undefined) return named;
  const alone = report.graph.edges.filter((each) => each.source === edge.source && each.target === edge.target).length === 1;
  return alone ? taken.get(JSON.stringify([edge.source, edge.target])) || 0 : 0;
}

function markNode(drawing) {
  const frame = frameOf(rankNow(), view.frame);
  for (const node of drawing.querySelectorAll("[data-state]")) node.classList.toggle("now", frame !== null && node.dataset.state === frame.visit.state);
}

function wayList(rank) {
  const ends = { left: "", begin: "", failed: " after it failed", open: " while it was open" };
  const rows = rank.steps.map(([source, edge, target, after], at) => {
    const visit = rank.visits[at];
    const how = source === null ? "the start" : `${edge && edge !== "advance" ? `by ${edge} ` : ""}from ${source}${ends[after] || ""}`;
    return h("li", { class: visit && visit.ended !== "left" ? "failed" : null }, h("strong", {}, said(target)), " ", h("span", { class: "small" }, said(how), visit && visit.from !== null && visit.to !== null && `, ${took(visit.to - visit.from)}`), visit && visit.ended === "failed" && h("span", { class: "bad" }, ` ✕ ${visit.category || ""}`));
  });
  return h("ol", { class: "way" }, rows);
}

function graphPanel() {
  const drawing = picture("The plan as a graph, with the way that was taken; the list beside it says the same", drawGraph);
  const way = h("div", {});
  const graph = report.graph;
  const show = () => {
    const rank = rankNow();
    clear(
      way,
      h("h3", {}, "The way of ", said(rank.label)),
      wayList(rank),
      rank.visits_left > 0 && h("p", { class: "small" }, `${rank.visits_left} visits are not in this page.`),
      rank.violations.length > 0 && [h("h3", {}, "What the plan does not allow"), h("ul", {}, rank.violations.map(([seq, message]) => h("li", {}, seqButton(seq), " ", said(message))))],
    );
    drawing.redraw();
  };
  watch("rank", show);
  watch("frame", () => markNode(drawing));
  show();
  const note = graph.trouble || (graph.is_free ? "Any state may follow any: the states that were seen, in the order in which they came." : "Heavy lines were taken, thin ones were open. Edges that are switched off, and those to failed that were not taken, are left out.");
  return panel("plan", graph.plan ? `Plan ${graph.plan}` : "Plan", note, h("div", { class: graph.states.some((state) => state.column > 0) ? "two plan-wide" : "two plan-narrow" }, drawing, way));
}
