// Checks as a table that can be narrowed down.

function checkRow([check, state, visit, ranks, severity, code, message, observed, expected, tolerance, scope, seq]) {
  return {
    kind: `severity-${severity}`,
    text: [check, state, ranks, severity, code, message, observed, expected, scope].filter(Boolean).join(" ").toLowerCase(),
    severity,
    state,
    cells: [
      said(clip(check), "code"),
      said(state === null ? null : visit > 1 ? `${clip(state)} (visit ${visit})` : clip(state)),
      said(clip(ranks, 32)),
      severityMark(clip(severity, 16)),
      code === null ? "" : [said(clip(code), "code"), h("span", { class: "small block" }, said(message))],
      ...[observed, expected, tolerance, scope].map((each) => (each === null ? "" : said(clip(each, 48)))),
      seq === null ? "" : seqButton(seq, String(seq)),
    ],
  };
}

const CHECK_COLUMNS = [
  ["check", "named"], ["state", "named"], ["rank", "short"], ["result", "short"], ["finding", "wide"],
  ["observed", "number"], ["expected", "number"], ["tolerance", "number"], ["meter", "short"], ["seq", "number"],
];

function checksPanel() {
  const rows = report.checks.map(checkRow);
  const place = h("div", {});
  const count = h("p", { class: "count", role: "status" });
  const words = h("input", { type: "search", id: "check-filter", placeholder: "words, all of which a row must have", autocomplete: "off", spellcheck: "false" });
  const found = (of) => [...new Set(rows.map(of))].filter(Boolean);
  const result = h("select", { id: "check-result" }, options([["", "every result"], ...found((row) => row.severity).map((each) => [each, each])], ""));
  const state = h("select", { id: "check-state" }, options([["", "every state"], ...found((row) => row.state).map((each) => [each, each])], ""));
  let isWhole = false;
  const more = button("", () => {
    isWhole = true;
    show();
  }, { id: "more-checks" });
  const show = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter(
      (row) =>
        wanted.every((word) => row.text.includes(word)) &&
        (result.value === "" || row.severity === result.value) &&
        (state.value === "" || row.state === state.value),
    );
    count.textContent = `${kept.length} of ${plural(rows.length, "row")}${report.checks_left > 0 ? `; ${report.checks_left} are not in this page` : ""}`;
    // Findings are never folded away; of what held a screenful is enough to begin with.
    const most = isWhole ? kept.length : Math.max(32, kept.filter((row) => row.severity !== "held").length);
    more.hidden = kept.length <= most;
    more.textContent = `Show ${kept.length - most} more`;
    clear(place, kept.length > 0 ? table("Checks", CHECK_COLUMNS, kept.slice(0, most)) : h("p", { class: "empty" }, rows.length > 0 ? "No row has all of that." : "No check was asked: this source has none, or the start came to none."));
  };
  for (const control of [words, result, state]) control.addEventListener("input", show);
  show();
  return panel(
    "checks",
    "Checks",
    "What was judged at the end of each state, findings first. A check that held has no numbers of its own in the journal.",
    h("div", { class: "controls" }, field("Filter", words), field("Result", result), field("State", state), count),
    place,
    more,
  );
}
