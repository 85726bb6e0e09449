// The answer first: what came of the start, why, and what would help.

const GLYPHS = { error: "✕", warning: "▲", note: "●", held: "✓" };

function severityMark(severity) {
  return h("span", { class: `mark ${severity}` }, h("span", { "aria-hidden": "true" }, `${GLYPHS[severity] || "●"} `), severity);
}

function seqButton(seq, label) {
  return button(label || `seq ${seq}`, () => goTo(seq), { class: "link", title: "Show this moment in the time travel" });
}

function goTo(seq) {
  chooseFrame(frameBefore(rankNow(), seq));
  document.getElementById("travel").scrollIntoView({ block: "start" });
  document.getElementById("slider")?.focus({ preventScroll: true });
}

function findingItem(finding) {
  const where = [finding.state && `in ${finding.state}`, finding.part && `part ${finding.part}`, finding.rank].filter(Boolean);
  const [observed, expected, tolerance] = finding.measured;
  const measured = [
    observed !== null && `observed ${observed}`,
    expected !== null && `expected ${expected}`,
    tolerance !== null && `${tolerance} allowed`,
  ].filter(Boolean);
  return h(
    "li",
    { class: "finding" },
    h("p", { class: "what" }, severityMark(finding.severity), " ", said(finding.code, "code"), " ", said(where.join(", "), "where")),
    h("p", {}, said(finding.message)),
    measured.length > 0 && !finding.code.endsWith("stalled") && h("p", { class: "small" }, said(`${measured.join(", ")} (${finding.scope})`)),
    finding.seqs.length > 0 && h("p", { class: "small" }, "seen at ", finding.seqs.map((seq) => [seqButton(seq), " "])),
    finding.lines.length > 0 &&
      h("ul", { class: "lines" }, finding.lines.map(([line, text]) => h("li", {}, said(line ? `line ${line}: ${text}` : text, "code")))),
  );
}

function adviceItem(advice) {
  if (!advice.is_move) return h("li", {}, said(advice.because));
  const more = [
    advice.interval && `from ${advice.interval[0]} to ${advice.interval[1]} would do`,
    advice.leftover !== null && `${bytes(advice.leftover)} would be left over`,
  ].filter(Boolean);
  return h(
    "li",
    {},
    h("p", { class: "do" }, said(advice.do)),
    h("p", { class: "small" }, said(`because ${advice.because}`), more.length > 0 && `; ${more.join("; ")}`),
    advice.flags.map((flag) => h("p", {}, h("code", { class: "flag" }, flag))),
  );
}

function factsOf(about) {
  const began = about.began === null ? null : new Date(about.began).toISOString().replace("T", " ").slice(0, 19);
  const end = Math.max(...report.ranks.map((rank) => (rank.end || 0) + rank.offset));
  const rows = [
    ["engine", [about.engine, about.engine_version].filter(Boolean).join(" ") || null],
    ["device", about.device],
    ["plan", about.plan && (about.mode === "default" ? about.plan : `${about.plan}, mode ${about.mode}`)],
    ["processes", about.processes > 1 ? String(about.processes) : null],
    ["took", end > 0 ? took(end) : null],
    ["began", began && `${began} UTC`],
    ["run", about.run && `${about.run}, attempt ${about.attempt}`],
    ["read from", `${about.source} ${about.origin || ""}`],
  ].filter(([, value]) => value);
  return h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, said(value)))));
}

function pairsTable(caption, rows) {
  return rows.length === 0
    ? null
    : h("details", {}, h("summary", {}, `${caption} (${rows.length})`), table(caption, [["name", ""], ["value", ""]], rows.map(([name, value]) => [said(name), said(value)]), "pairs"));
}

function verdictPanel() {
  const verdict = report.verdict;
  const about = report.about;
  const bad = verdict.findings.filter((each) => each.severity !== "note");
  const shown = bad.slice(0, 4);
  const rest = verdict.findings.filter((each) => !shown.includes(each));
  const why = h(
    "div",
    {},
    h("h3", {}, verdict.outcome === "ready" ? "What was found" : "Why, the earliest cause first"),
    shown.length > 0
      ? h("ol", { class: "findings" }, shown.map(findingItem))
      : h("p", {}, verdict.findings.length > 0 ? "Nothing but notes." : "Nothing: every check that was asked held."),
    rest.length > 0 && h("details", {}, h("summary", {}, plural(rest.length, "more finding")), h("ol", { class: "findings" }, rest.map(findingItem))),
    verdict.findings_left > 0 && h("p", { class: "small" }, `${verdict.findings_left} more are not in this page.`),
  );
  const help = h(
    "div",
    {},
    h("h3", {}, "What would help"),
    verdict.advice.length > 0
      ? h("ol", { class: "advice" }, verdict.advice.map(adviceItem))
      : h("p", {}, verdict.outcome === "ready" ? "Nothing needs to change." : "The numbers of this start point to no setting."),
    verdict.missing !== null && verdict.missing > 0 && h("p", {}, h("strong", {}, bytes(verdict.missing)), " are missing."),
  );
  const figures = verdict.figures.map(([name, value, inferred]) => [name, inferred ? `${value}, inferred` : value]);
  return h(
    "section",
    { id: "verdict", "aria-labelledby": "verdict-title", class: "panel" },
    h("h2", { class: "unseen" }, "Verdict"),
    h("p", { id: "verdict-title", class: `outcome ${verdict.outcome}` }, said(verdict.line)),
    verdict.because && h("p", { class: "lead" }, said(verdict.because)),
    factsOf(about),
    h("div", { class: "two" }, why, help),
    h(
      "div",
      { class: "folds" },
      pairsTable("Figures", figures),
      pairsTable("Settings", about.settings),
      pairsTable("Versions", about.versions),
      pairsTable("Environment", about.environment),
      (verdict.unseen.length > 0 || verdict.problems.length > 0) &&
        h(
          "details",
          { open: verdict.problems.length > 0 },
          h("summary", {}, `Not seen (${verdict.unseen.length + verdict.problems.length})`),
          h("ul", {}, [...verdict.problems, ...verdict.unseen].map((each) => h("li", {}, said(each)))),
        ),
      report.starts.length > 1 &&
        h(
          "details",
          { open: true },
          h("summary", {}, `All starts that were read (${report.starts.length})`),
          h("ol", {}, report.starts.map((each) => h("li", { class: each.shown ? "here" : null }, said(`${each.run}, attempt ${each.attempt}: ${each.line}${each.shown ? " — this page" : ""}`)))),
        ),
    ),
  );
}
