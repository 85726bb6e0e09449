// All events, searchable. A row is made when it is shown.

const PAGE = innerWidth < 640 ? 60 : 200;
let eventsFrom = () => {};

function eventRows() {
  const rows = [];
  report.ranks.forEach((rank, at) => {
    const { seq, t, kind, visit, text } = rank.events;
    let [lastSeq, lastT] = [0, 0];
    for (let index = 0; index < seq.length; index += 1) {
      lastSeq += seq[index];
      if (t[index] !== null) lastT += t[index];
      rows.push({ rank: at, seq: lastSeq, t: t[index] === null ? null : lastT, kind: report.kinds_of_events[kind[index]], visit: visit[index] < 0 ? null : rank.visits[visit[index]], text: report.texts[text[index]], words: null });
    }
  });
  return rows;
}

function wordsOf(row) {
  if (row.words === null) row.words = `${report.ranks[row.rank].label} seq ${row.seq} ${row.kind} ${row.visit ? visitName(row.visit) : ""} ${row.text}`.toLowerCase();
  return row.words;
}

function eventsPanel() {
  const rows = eventRows();
  const several = report.ranks.length > 1;
  const place = h("div", { class: "events" });
  const count = h("p", { class: "count", role: "status" });
  const words = h("input", { type: "search", id: "event-search", placeholder: "words, all of which a line must have", autocomplete: "off", spellcheck: "false" });
  const kind = h("select", { id: "event-kind" }, options([["", "every kind"], ...[...report.kinds_of_events].sort().map((each) => [each, each])], ""));
  const whose = h("select", { id: "event-rank" }, options([["", "every rank"], ...report.ranks.map((rank, at) => [String(at), rank.label])], ""));
  const more = button("Show more", () => show(true), { id: "more-events" });
  let [from, shown] = [0, 0];
  let kept = rows;
  const line = (row) =>
    h(
      "tr",
      { class: `event ${row.kind}` },
      several && h("td", { "data-label": "rank", class: "short" }, said(clip(report.ranks[row.rank].label, 32))),
      h("th", { scope: "row", class: "number", "data-label": "seq" }, button(String(row.seq), () => {
        if (row.rank !== view.rank) chooseRank(row.rank);
        goTo(row.seq);
      }, { class: "link", "aria-label": `Show seq ${row.seq} in the time travel` })),
      h("td", { class: "number", "data-label": "time" }, took(row.t)),
      h("td", { "data-label": "kind", class: "named" }, said(clip(row.kind), "code")),
      h("td", { "data-label": "state", class: "named" }, row.visit ? said(clip(visitName(row.visit))) : ""),
      h("td", { class: "wide", "data-label": "what" }, row.text === "" ? "" : said(row.text)),
    );
  const body = h("tbody", {});
  const columns = [several && "rank", "seq", "time", "kind", "state", "what"].filter(Boolean);
  const whole = h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" },
    h("table", { class: "stack" }, h("caption", { class: "unseen" }, "Events"), h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col", class: ["seq", "time"].includes(name) ? "number" : null }, name)))), body),
  );
  function show(isMore) {
    if (isMore !== true) {
      const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
      kept = rows.filter(
        (row) =>
          (kind.value === "" || row.kind === kind.value) &&
          (whose.value === "" || row.rank === Number(whose.value)) &&
          row.seq >= from &&
          (wanted.length === 0 || wanted.every((word) => wordsOf(row).includes(word))),
      );
      body.replaceChildren();
      shown = 0;
    }
    body.append(...kept.slice(shown, shown + PAGE).map(line));
    shown = Math.min(kept.length, shown + PAGE);
    const left = report.ranks.reduce((sum, rank) => sum + rank.events.left[0], 0);
    count.textContent = `${grouped(kept.length, 0)} of ${plural(rows.length, "event")}${from > 0 ? `, from seq ${from}` : ""}${left > 0 ? `; ${grouped(left, 0)} from the middle are not in this page` : ""}`;
    more.hidden = shown >= kept.length;
    more.textContent = `Show ${Math.min(PAGE, kept.length - shown)} more of ${grouped(kept.length - shown, 0)}`;
    clear(place, kept.length > 0 ? whole : h("p", { class: "empty" }, "No event has all of that."));
  }
  eventsFrom = (frame) => {
    from = frame ? frame.seq : 0;
    whose.value = several ? String(view.rank) : "";
    words.value = "";
    kind.value = "";
    show();
    document.getElementById("events").scrollIntoView({ block: "start" });
  };
  let waiting = 0;
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(show, 60);
  };
  for (const control of [words, kind, whose]) control.addEventListener("input", soon);
  show();
  const reset = button("all", () => {
    from = 0;
    words.value = "";
    kind.value = "";
    whose.value = "";
    show();
  }, { "aria-label": "Show all events again" });
  return panel("events", "Events", "Everything that the journal says, in its own words. Press / to search.", h("div", { class: "controls" }, field("Search", words), field("Kind", kind), several && field("Rank", whose), reset, count), place, more);
}
