// The ledger: every byte of the device has one account, and the accounts add up.

function swatch(kind) {
  return s("svg", { width: 12, height: 12, "aria-hidden": "true", class: "swatch" }, s("rect", { width: 12, height: 12, class: `part k-${kind}` }));
}

function shareBar(part, whole) {
  const width = whole > 0 ? Math.max(0, Math.min(1, part / whole)) * 100 : 0;
  return s("svg", { width: 100, height: 8, "aria-hidden": "true", class: "share" }, s("rect", { width: 100, height: 8, class: "track" }), s("rect", { width, height: 8, class: "filled" }));
}

function ledgerTable(rank) {
  const ledger = rank.ledger;
  if (!ledger) return h("p", { class: "empty" }, "Nothing was read or printed of memory.");
  const used = ledger.rows.reduce((sum, row) => sum + row[2], 0);
  const whole = ledger.total || used;
  const rows = ledger.rows.map(([account, kind, size, source]) => [[swatch(kind), said(account)], bytes(size), percent(size, whole), shareBar(size, whole), said(source)]);
  rows.push({ kind: "sum", cells: ["used", bytes(used), percent(used, whole), shareBar(used, whole), "sum"] });
  if (ledger.total !== null) {
    const free = ledger.free === null ? ledger.total - used : ledger.free;
    rows.push({ kind: "sum", cells: ["free", bytes(free), percent(free, whole), shareBar(free, whole), ledger.free === null ? "total − used" : "device"] });
    rows.push({ kind: "sum", cells: ["device", bytes(ledger.total), "", "", used + free === ledger.total ? "adds up" : ledger.basis === "printed" ? `${bytes(ledger.total - used - free)} are nobody's` : `off by ${bytes(ledger.total - used - free)}`] });
  }
  return table(`Accounts of ${rank.label} at the last reading`, [["account", ""], ["bytes", "number"], ["share", "number"], ["", ""], ["told by", ""]], rows);
}

function edgeTable(rank) {
  const visits = rank.visits.filter((visit) => visit.memory !== null);
  if (visits.length === 0) return null;
  const accounts = rank.accounts
    .map(([name, kind], at) => ({ name, kind, at }))
    .sort((one, two) => report.kinds.indexOf(one.kind) - report.kinds.indexOf(two.kind));
  let before = {};
  const rows = visits.map((visit) => {
    const reading = readingOf(rank, visit.memory);
    const held = Object.fromEntries(reading.parts.map((part) => [part.name, part.bytes]));
    const cells = accounts.map(({ name }) => {
      const now = held[name] || 0;
      const change = now - (before[name] || 0);
      return [h("span", { class: now === 0 ? "zero" : null }, now === 0 ? "0" : bytes(now)), change !== 0 && h("span", { class: "change block" }, signedBytes(change))];
    });
    before = held;
    return { kind: visit.ended, cells: [said(visitName(visit)), ...cells, bytes(reading.own), reading.free === null ? "–" : bytes(reading.free)] };
  });
  const columns = [["state", "named"], ...accounts.map((each) => [each.name, "number"]), ["ours together", "number"], ["free", "number"]];
  return h("details", { open: visits.length <= 24 }, h("summary", {}, "Edge by edge"), table(`Bytes of ${rank.label} by account as each state ended, and the change`, columns, rows, "matrix"));
}

function ranksTable() {
  if (report.ranks.length < 2) return null;
  const rows = report.ranks.map((rank) => {
    const last = rank.visits.map((visit) => readingOf(rank, visit.memory)).filter(Boolean).pop();
    const over = last && rank.request ? last.own - rank.request : null;
    return {
      kind: rank.outcome === "ready" ? "left" : "failed",
      cells: [
        said(rank.label), said(rank.outcome), said(rank.state), last ? bytes(last.own) : "–", last && last.free !== null ? bytes(last.free) : "–",
        over === null ? "–" : over > 0 ? `${bytes(over)} over` : `${bytes(-over)} left`, rank.budget ? grouped(rank.budget.blocks, 0) : "–", said(rank.host),
      ],
    };
  });
  const columns = [["rank", ""], ["outcome", ""], ["last state", ""], ["ours", "number"], ["free", "number"], ["against the request", "number"], ["KV blocks", "number"], ["host", ""]];
  return [h("h3", {}, "All ranks, at their last reading"), table("All ranks, at their last reading", columns, rows)];
}

function budgetTable(rank) {
  if (!rank.budget) return null;
  const { terms, available, kv, blocks, block, missing, times } = rank.budget;
  const rows = terms.map(([term, size, source]) => [said(term), signedBytes(size), said(source)]);
  rows.push({ kind: "sum", cells: ["available", bytes(available), "sum"] });
  rows.push({ kind: "sum", cells: ["KV cache", bytes(kv), `${grouped(blocks, 0)} blocks of ${bytes(block)}`] });
  if (missing > 0) rows.push({ kind: "sum failed", cells: ["missing", bytes(missing), ""] });
  return [
    h("h3", {}, times > 1 ? `The budget of the KV cache, the last of ${times}` : "The budget of the KV cache"),
    table("The budget of the KV cache", [["term", ""], ["bytes", "number"], ["told by", ""]], rows),
  ];
}

function ledgerPanel() {
  const place = h("div", {});
  const show = () => {
    const rank = rankNow();
    clear(
      place,
      h("div", { class: "two" }, h("div", {}, h("h3", {}, said(rank.label), ", at the last reading"), ledgerTable(rank)), h("div", {}, budgetTable(rank))),
      edgeTable(rank),
      ranksTable(),
    );
  };
  watch("rank", show);
  show();
  return panel("ledger", "Ledger", "used = torch reserved, by pool + arena mapped + this process outside both + other processes + unexplained.", place);
}
