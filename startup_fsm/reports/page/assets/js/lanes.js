// Time: a lane of states for each process, and below it captures, hooks and stalls.

const lanes = { isEqual: false };

// Where a moment of a rank stands, from 0 to 1.
function clockOf(rank, from, to) {
  if (!lanes.isEqual) return (t) => (to > from ? (t + rank.offset - from) / (to - from) : 0);
  const known = rank.visits.filter((visit) => visit.from !== null);
  const ends = known.map((visit, at) => visit.to ?? known[at + 1]?.from ?? rank.end ?? visit.from);
  return (t) => {
    for (let at = 0; at < known.length; at += 1) {
      if (t < known[at].from) return at / known.length;
      if (t <= ends[at]) return (at + (t - known[at].from) / Math.max(1, ends[at] - known[at].from)) / known.length;
    }
    return 1;
  };
}

function spanOf(ranks) {
  const begins = ranks.map((rank) => rank.offset);
  const ends = ranks.map((rank) => (rank.end || 0) + rank.offset);
  return [Math.min(...begins), Math.max(1, ...ends)];
}

function stateBars(rank, place, y, thick) {
  const bars = [];
  let last = 0;
  rank.visits.forEach((visit, index) => {
    if (visit.from === null) return;
    const end = visit.to ?? rank.end ?? visit.from;
    const [from, to] = [place(visit.from), place(end)];
    if (!lanes.isEqual && visit.from > last && from - place(last) > 0.5) {
      bars.push(s("rect", { x: place(last), y, width: from - place(last), height: thick, class: "gap" }, s("title", {}, `in no state: ${took(visit.from - last)}`)));
    }
    last = end;
    const width = Math.max(1, to - from);
    const title = `${visitName(visit)}: ${took(end - visit.from)}${visit.ended === "left" ? "" : `, ${visit.ended}`}`;
    bars.push(
      s(
        "g",
        { class: `state-bar ${visit.ended}`, "data-visit": index },
        s("rect", { x: from, y, width, height: thick, class: `part k-${phaseOf(visit.state)}` }, s("title", {}, title)),
        s("text", { x: from + 4, y: y + thick - 6, class: `on-bar t-${phaseOf(visit.state)}` }, cut(visitName(visit), width - 8)),
      ),
    );
    if (visit.ended === "failed") bars.push(s("text", { x: Math.max(from + 1, to - 11), y: y + thick - 5, class: "cross" }, "✕"));
  });
  if (rank.end && rank.end > last && !lanes.isEqual && place(rank.end) - place(last) > 0.5) {
    bars.push(s("rect", { x: place(last), y, width: place(rank.end) - place(last), height: thick, class: "gap" }, s("title", {}, `in no state: ${took(rank.end - last)}`)));
  }
  return bars;
}

function markBars(rank, place, y) {
  const { captures, hooks, stalls } = rank.marks;
  const largest = Math.max(1, ...captures.map((each) => each[1]));
  const marks = [];
  for (const [visit, size, t, lasted] of captures) {
    if (t === null) continue;
    const from = place(Math.max(0, t - lasted));
    const height = 3 + (11 * Math.log2(1 + size)) / Math.log2(1 + largest);
    const isTrial = rank.visits[visit]?.state === "capture_throwaway";
    marks.push(
      s("rect", { x: from, y: y + 15 - height, width: Math.max(1, place(t) - from - 0.5), height, class: isTrial ? "capture trial" : "capture" }, s("title", {}, `graph of size ${size}: ${took(lasted)}`)),
    );
  }
  for (const [hook, moment, , t, lasted, count, policy] of hooks) {
    if (t === null) continue;
    const from = place(Math.max(0, t - lasted));
    const title = `hook ${hook}, ${moment}: ${took(lasted)}${count > 1 ? ` in ${count} runs` : ""}${policy === null ? "" : `, failed (${policy})`}`;
    marks.push(s("rect", { x: from, y: y + 18, width: Math.max(2, place(t) - from), height: 5, class: policy === null ? "hook" : "hook bad" }, s("title", {}, title)));
  }
  for (const [state, number, t, deadline, line] of stalls) {
    const visit = rank.visits.find((each) => each.state === state && each.visit === number);
    if (!visit || visit.from === null) continue;
    const from = place(Math.min(visit.from + deadline, t ?? visit.from + deadline));
    const to = place(visit.to ?? rank.end ?? visit.from);
    marks.push(
      s("rect", { x: from, y: y - 4, width: Math.max(3, to - from), height: 4, class: "stall" }, s("title", {}, `${state} was past its deadline of ${took(deadline)}: ${line}`)),
    );
  }
  return marks;
}

function drawLanes(width) {
  const ranks = report.ranks;
  const narrow = width < 640;
  const left = narrow ? 0 : 96;
  const plot = width - left - 2;
  const [from, to] = spanOf(ranks);
  const top = 8;
  const row = narrow ? 70 : 54;
  const height = top + ranks.length * row + 22;
  const drawing = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "drawing" });
  if (!lanes.isEqual) {
    for (const tick of ticksOf(to - from, narrow ? 3 : 8, 10)) {
      const x = left + (plot * tick) / (to - from);
      drawing.append(s("line", { x1: x, x2: x, y1: top, y2: height - 20, class: "grid" }));
      drawing.append(s("text", { x, y: height - 6, class: "tick", "text-anchor": tick === 0 ? "start" : x > width - 40 ? "end" : "middle" }, took(tick)));
    }
  }
  ranks.forEach((rank, at) => {
    const y = top + at * row + (narrow ? 18 : 6);
    const clock = clockOf(rank, from, to);
    const place = (t) => left + plot * Math.max(0, Math.min(1, clock(t)));
    const group = s("g", { class: at === view.rank ? "lane now" : "lane", "data-rank": at });
    group.append(s("text", { x: narrow ? 0 : left - 10, y: narrow ? y - 5 : y + 15, "text-anchor": narrow ? "start" : "end", class: "name" }, cut(rank.label, narrow ? width : left - 12)));
    group.append(...stateBars(rank, place, y, 22), ...markBars(rank, place, y + 22));
    if (at === view.rank) {
      const frame = frameOf(rank, view.frame);
      if (frame && frame.t !== null) {
        const x = place(frame.t);
        group.append(s("line", { x1: x, x2: x, y1: y - 5, y2: y + 46, class: "cursor" }));
      }
    }
    drawing.append(group);
  });
  return drawing;
}

function timeTable(rank) {
  const inside = rank.visits.reduce((sum, visit) => sum + (visit.from === null ? 0 : (visit.to ?? rank.end) - visit.from), 0);
  const rows = rank.visits.map((visit) => {
    const lasted = visit.from === null ? null : (visit.to ?? rank.end) - visit.from;
    return {
      kind: visit.ended,
      cells: [
        [said(visitName(visit)), visit.ended !== "left" && h("span", { class: "bad" }, ` ${visit.ended}`)],
        took(visit.from),
        took(lasted),
        lasted === null ? "–" : percent(lasted, rank.end),
        took(visit.cpu),
        took(visit.ours),
        visit.hooks[0] === 0 ? "" : `${took(visit.hooks[1])} (${grouped(visit.hooks[0], 0)})`,
        visit.graphs[0] === 0 ? "" : `${grouped(visit.graphs[0], 0)} in ${took(visit.graphs[1])}`,
      ],
    };
  });
  const outside = Math.max(0, (rank.end || 0) - inside);
  rows.push({ kind: "sum", cells: ["in no state", "", took(outside), percent(outside, rank.end), "", "", "", ""] });
  const columns = [["state", "named"], ["began", "number"], ["took", "number"], ["share", "number"], ["cpu", "number"], ["ours", "number"], ["hooks", "number"], ["captures", "number"]];
  return table(`States of ${rank.label} in order`, columns, rows);
}

function timePanel() {
  const known = report.ranks.some((rank) => rank.end);
  if (!known) return panel("time", "Time", "This source has no clock: the order of events is all there is.", h("p", { class: "empty" }, "No times."));
  const drawing = picture("States of each process over time; the table below has the same numbers", drawLanes);
  const rows = h("div", {});
  const show = () => {
    clear(rows, h("h3", {}, "States of ", said(rankNow().label)), timeTable(rankNow()), capturesFigure(rankNow()));
    drawing.redraw();
  };
  watch("rank", show);
  watch("frame", () => drawing.redraw());
  show();
  const choice = h(
    "select",
    {
      id: "time-scale",
      onchange: (event) => {
        lanes.isEqual = event.target.value === "equal";
        drawing.redraw();
      },
    },
    options([["scale", "to scale"], ["equal", "equal widths"]], "scale"),
  );
  const clocks = report.clock.is_aligned
    ? report.clock.hosts === 0 ? "Lanes share the clock of their log." : report.clock.hosts > 1 ? `Lanes are aligned by the wall clocks of ${report.clock.hosts} hosts, which may differ.` : "Lanes are aligned by the wall clock of their host."
    : "Each lane begins with its own journal: how the clocks relate is not known.";
  const key = h(
    "ul",
    { class: "legend" },
    [["capture trial", "graph captured to measure"], ["capture", "graph captured; the taller, the larger"], ["hook", "hook"], ["stall", "past its deadline"], ["gap", "in no state"]].map(([kind, text]) =>
      h("li", {}, s("svg", { width: 14, height: 14, "aria-hidden": "true" }, s("rect", { y: kind === "hook" || kind === "stall" ? 4 : 0, width: 14, height: kind === "hook" || kind === "stall" ? 6 : 14, class: kind })), text),
    ),
  );
  return panel("time", "Time", report.ranks.length > 1 ? clocks : null, h("div", { class: "controls" }, field("Scale", choice)), drawing, key, rows);
}
