// One line for each rank over time. uPlot keeps this fast for thousands of stops and many ranks.
function linePlot(place) {
  let plot = null;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const series = report.ranks.map((rank) => {
    const points = rank.frames.map((frame) => [frame[1], readingOf(rank, frame[5])]).filter(([t, reading]) => t !== null && reading !== null);
    return [points.map(([t]) => (t + rank.offset) / 1e6), points.map(([, reading]) => reading.own)];
  });
  const sorted = series.map(([xs, ys]) => {
    const order = xs.map((_, at) => at).sort((one, two) => xs[one] - xs[two]);
    return [order.map((at) => xs[at]), order.map((at) => ys[at])];
  });
  if (sorted.every(([xs]) => xs.length < 2)) return null;
  const draw = () => {
    plot?.destroy();
    const width = place.clientWidth;
    if (width === 0) return;
    const rank = rankNow();
    const line = (at) => ({
      label: report.ranks[at].label,
      stroke: colour(at === view.rank ? "--k-weights" : "--faint"),
      width: at === view.rank ? 2 : 1,
      paths: uPlot.paths.stepped({ align: 1 }),
      points: { show: false },
      spanGaps: true,
    });
    const order = report.ranks.map((_, at) => at).sort((one, two) => (one === view.rank) - (two === view.rank));
    const data = uPlot.join(order.map((at) => sorted[at]));
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 }, font: "11px system-ui, sans-serif" };
    const flat = (u, value, name, dash) => {
      const y = u.valToPos(value, "y", true);
      u.ctx.save();
      u.ctx.strokeStyle = colour(name);
      u.ctx.setLineDash(dash);
      u.ctx.lineWidth = devicePixelRatio * 1.25;
      u.ctx.beginPath();
      u.ctx.moveTo(u.bbox.left, y);
      u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
      u.ctx.stroke();
      u.ctx.restore();
    };
    const total = rank.memory.find((row) => row[0])?.[0];
    const highest = Math.max(rank.request || 0, total || 0, ...sorted.flatMap(([, ys]) => ys));
    plot = new uPlot(
      {
        width,
        height: 180,
        legend: { show: false },
        cursor: { drag: { x: true, y: false }, points: { show: false } },
        scales: { x: { time: false }, y: { range: [0, highest * 1.04] } },
        axes: [
          { ...axis, values: (_, values) => values.map((value) => took(Math.round(value * 1e6))), size: 30, space: 90 },
          { ...axis, values: (_, values) => values.map((value) => bytes(value)), size: 76, splits: () => ticksOf(highest, 4, 2) },
        ],
        series: [{}, ...order.map(line)],
        hooks: {
          draw: [
            (u) => {
              if (total) flat(u, total, "--soft", []);
              if (rank.request) flat(u, rank.request, "--request", [6, 4].map((each) => each * devicePixelRatio));
              const frame = frameOf(rankNow(), view.frame);
              if (!frame || frame.t === null) return;
              const x = u.valToPos((frame.t + rankNow().offset) / 1e6, "x", true);
              if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
              u.ctx.save();
              u.ctx.strokeStyle = colour("--accent");
              u.ctx.lineWidth = devicePixelRatio * 1.5;
              u.ctx.beginPath();
              u.ctx.moveTo(x, u.bbox.top);
              u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
              u.ctx.stroke();
              u.ctx.restore();
            },
          ],
        },
      },
      data,
      place,
    );
    plot.over.addEventListener("click", () => {
      if (plot.cursor.left < 0) return;
      const t = plot.posToVal(plot.cursor.left, "x") * 1e6 - rankNow().offset;
      let found = 0;
      rankNow().frames.forEach((frame, at) => {
        if (frame[1] !== null && frame[1] <= t) found = at;
      });
      chooseFrame(found);
    });
  };
  new ResizeObserver(draw).observe(place);
  watch("rank", draw);
  watch("frame", () => plot?.redraw(false));
  watchTheme(draw);
  return draw;
}
