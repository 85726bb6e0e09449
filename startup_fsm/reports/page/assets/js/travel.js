// Time travel: a slider over frames that were folded in Python. Nothing is folded here.

function travelWords(rank, frame) {
  if (!frame) return "Nothing to move over.";
  const time = frame.t === null ? "" : `${took(frame.t)}, `;
  const what = { enter: "entered", leave: "left", fail: "failed" }[frame.label] || frame.label;
  return `${time}seq ${frame.seq}: ${visitName(frame.visit)}, ${what}`;
}

function drawMoment(width) {
  const rank = rankNow();
  const frame = frameOf(rank, view.frame);
  const reading = frame && readingOf(rank, frame.memory);
  if (!reading) return h("p", { class: "empty" }, "No memory is known at this moment.");
  const largest = Math.max(reading.total || 0, reading.used, rank.request || 0, 1);
  const scale = (width - 2) / largest;
  const drawing = s("svg", { width, height: 78, viewBox: `0 0 ${width} 78`, class: "drawing" });
  drawing.append(...stack(reading, 0, 34, 34, scale));
  if (reading.total) drawing.append(s("rect", { x: 0, y: 34, width: reading.total * scale, height: 34, class: "frame" }));
  if (reading.total) drawing.append(limitLine(reading.total * scale, 2, [[2, 70]], `device ${bytes(reading.total)}`, "device", width));
  if (rank.request) drawing.append(limitLine(rank.request * scale, 16, [[16, 70]], `request ${bytes(rank.request)}`, "request", width));
  return drawing;
}

function momentTable(rank, frame) {
  const reading = frame && readingOf(rank, frame.memory);
  if (!reading) return null;
  const before = view.frame > 0 ? readingOf(rank, frameOf(rank, view.frame - 1).memory) : null;
  const was = Object.fromEntries((before?.parts || []).map((part) => [part.name, part.bytes]));
  const names = new Set(reading.parts.map((part) => part.name));
  const gone = (before?.parts || []).filter((part) => !names.has(part.name)).map((part) => ({ ...part, bytes: 0 }));
  const rows = [...reading.parts, ...gone].map((part) => {
    const change = part.bytes - (was[part.name] || 0);
    return [[swatch(part.kind), said(part.name)], bytes(part.bytes), before && change !== 0 ? signedBytes(change) : ""];
  });
  if (reading.free !== null) rows.push({ kind: "sum", cells: ["free", bytes(reading.free), before && before.free !== null && before.free !== reading.free ? signedBytes(reading.free - before.free) : ""] });
  return table("Accounts at this moment", [["account", ""], ["bytes", "number"], ["since the stop before", "number"]], rows, "pairs");
}

function elsewhere(frame) {
  if (report.ranks.length < 2 || !frame || frame.t === null) return null;
  const now = frame.t + rankNow().offset;
  const rows = report.ranks.map((rank, at) => {
    let last = null;
    rank.frames.forEach((row, index) => {
      if (row[1] !== null && row[1] + rank.offset <= now) last = index;
    });
    const there = last === null ? null : frameOf(rank, last);
    const reading = there && readingOf(rank, there.memory);
    return { kind: at === view.rank ? "here" : null, cells: [said(rank.label), there ? said(visitName(there.visit)) : "not begun", reading ? bytes(reading.own) : "–"] };
  });
  return [h("h3", {}, report.clock.is_aligned ? "All ranks at this moment" : "All ranks, each so long after its own begin"), table("All ranks at this moment", [["rank", ""], ["state", ""], ["ours", "number"]], rows, "pairs")];
}

function travelPanel() {
  const slider = h("input", { type: "range", id: "slider", min: 0, step: 1, "aria-label": "Moment", oninput: (event) => chooseFrame(Number(event.target.value)) });
  const words = h("p", { class: "moment" });
  const basis = h("p", { class: "small" });
  const drawing = picture("Memory at this moment, stacked by account", drawMoment);
  const rows = h("div", {});
  const others = h("div", {});
  const line = h("div", { class: "line-plot", role: "img", "aria-label": "Memory of each rank over time" });
  const show = () => {
    const rank = rankNow();
    const frame = frameOf(rank, view.frame);
    slider.max = Math.max(0, rank.frames.length - 1);
    slider.value = view.frame;
    slider.disabled = rank.frames.length === 0;
    const text = travelWords(rank, frame);
    slider.setAttribute("aria-valuetext", text);
    words.textContent = text;
    const reading = frame && readingOf(rank, frame.memory);
    const open = frame ? rank.pools.filter(([, , opened, released]) => opened <= frame.seq && (released === null || released > frame.seq)).map(([pool, purpose]) => `${pool} ${purpose}`) : [];
    basis.textContent = [
      frame && `stop ${view.frame + 1} of ${rank.frames.length}`,
      reading && BASIS[reading.basis],
      frame && frame.captures > 0 && `${plural(frame.captures, "graph")} captured in this state`,
      open.length > 0 && `open pools: ${open.join(", ")}`,
      rank.frames_left > 0 && `${rank.frames_left} stops are not in this page`,
    ].filter(Boolean).join(" · ");
    clear(rows, momentTable(rank, frame));
    clear(others, elsewhere(frame));
    drawing.redraw();
  };
  const step = (by, edges) => () => {
    const frames = rankNow().frames;
    let at = view.frame + by;
    while (edges && at > 0 && at < frames.length - 1 && frames[at][4] !== 1) at += by;
    chooseFrame(at);
  };
  watch("frame", show);
  const buttons = h(
    "div",
    { class: "steps" },
    button("⇤ edge", step(-1, true), { "aria-label": "To the edge before" }),
    button("‹", step(-1, false), { "aria-label": "One stop back" }),
    button("›", step(1, false), { "aria-label": "One stop ahead" }),
    button("edge ⇥", step(1, true), { "aria-label": "To the next edge" }),
    button("events from here", () => eventsFrom(frameOf(rankNow(), view.frame)), { id: "events-from-here" }),
  );
  const section = panel(
    "travel",
    "Time travel",
    "Arrow keys move the slider from one stop to the next: edges of states, snapshots, captured graphs. The pictures above follow.",
    h("div", { class: "sticky" }, slider, words),
    buttons,
    basis,
    drawing,
    h("div", { class: "two" }, rows, others),
    h("h3", {}, "Memory charged to each rank over time"),
    line,
  );
  if (!linePlot(line)) line.replaceWith(h("p", { class: "empty" }, "No line: fewer than two readings have a time."));
  show();
  return section;
}
