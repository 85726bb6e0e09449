// What if: the budget formula, and no other arithmetic. The steps come from the same table as in Python.

const OPERATIONS = {
  floor_product: ([one, two]) => Math.floor(one * two),
  product: ([one, two]) => one * two,
  difference: ([first, ...others]) => others.reduce((rest, each) => rest - each, first),
  floor_quotient: ([one, two]) => (one - (((one % two) + two) % two)) / two,
  ceiling_quotient: ([one, two]) => -((-one - (((-one % two) + two) % two)) / two),
  at_least: ([one, two]) => (one >= two ? 1 : 0),
  unless: ([condition, value]) => (condition ? 0 : value),
};
const CHOOSING = {
  first: (values) => values[0],
  least: (values) => Math.min(...values),
  greatest: (values) => Math.max(...values),
};

function evaluate(inputs) {
  const known = { ...inputs };
  for (const [name, operation, operands] of report.formula) {
    const values = operands.map((each) => (typeof each === "string" ? known[each] : each));
    const given = values.filter((each) => each !== null && each !== undefined);
    if (operation in CHOOSING) known[name] = given.length > 0 ? CHOOSING[operation](given) : null;
    else known[name] = given.length < values.length ? null : OPERATIONS[operation](values) + 0;
  }
  return known;
}

function whatIfPanel() {
  const title = "What if";
  const note = "The budget again with other settings. Only the formula of the budget is computed here; what was measured stays as it was.";
  const known = report.ranks.filter((rank) => rank.what_if);
  if (known.length === 0) {
    return panel("what-if", title, note, h("p", { class: "empty" }, "This start came to no budget, or its log does not print the terms of one: there is nothing to compute with."));
  }
  const lead = (report.ranks[report.decides].what_if ? report.ranks[report.decides] : known[0]).what_if;
  const recorded = lead.inputs;
  const share = recorded.utilization ?? (recorded.explicit !== null ? recorded.explicit / recorded.total : 0.9);
  const range = h("input", { type: "range", id: "wi-share-range", min: 0.01, max: 1, step: 0.005, value: share, "aria-label": `${lead.setting}, as a slider` });
  const number = h("input", { type: "number", id: "wi-share", min: 0.001, max: 1, step: 0.001, value: Math.round(share * 1e6) / 1e6 });
  const longest = h("input", { type: "number", id: "wi-longest", min: 1, step: 1, value: recorded.longest ?? "", disabled: recorded.longest === null });
  const graphs = h("select", { id: "wi-graphs" }, lead.choices.map((choice, at) => h("option", { value: at }, `${choice.label}: ${bytes(choice.bytes)}`)));
  const place = h("div", { id: "wi-result", role: "status" });

  const choiceOf = (rank) => rank.what_if.choices[Number(graphs.value)] || rank.what_if.choices[0];
  const inputsFor = (rank) => {
    const own = rank.what_if;
    const asked = Number(number.value);
    const changed = { ...own.inputs, graphs: choiceOf(rank).bytes };
    if (asked > 0 && asked <= 1 && asked !== Math.round(share * 1e6) / 1e6) Object.assign(changed, { utilization: asked, explicit: null });
    if (own.inputs.longest !== null && Number(longest.value) > 0) changed.longest = Math.floor(Number(longest.value));
    return changed;
  };
  const show = () => {
    const results = known.map((rank) => ({ rank, then: evaluate(rank.what_if.inputs), now: evaluate(inputsFor(rank)) }));
    const least = results.reduce((one, two) => (two.now.blocks < one.now.blocks ? two : one));
    const { then, now } = least;
    const fits = now.fits === 1;
    const amount = (side) => (lead.unit === "bytes" ? bytes(side.kv) : `${grouped(lead.unit === "tokens" ? side.tokens : side.blocks, 0)} ${lead.unit}`);
    const outcome = h(
      "p",
      { class: `outcome small ${fits ? "ready" : "oom"}` },
      fits ? `Fits: ${bytes(now.kv)} of KV cache, ${amount(now)}.` : `Does not fit: ${bytes(now.missing)} are missing${now.longest ? " for one longest request" : ""}.`,
      now.pinned !== null && now.kv > now.available ? ` The KV cache is pinned ${bytes(now.kv - now.available)} above what is available.` : "",
    );
    const choice = choiceOf(least.rank);
    const warning = choice.need > choice.bytes
      ? h("p", { class: "warning" }, h("span", { "aria-hidden": "true" }, "▲ "), `The graphs take ${bytes(choice.need)}, and ${bytes(choice.bytes)} would be reserved for them: what is missing is taken from what should stay free.`)
      : null;
    const beside = fits && warning === null && report.verdict.outcome === "oom"
      ? h("p", { class: "small" }, "By the budget it fits. What this start died of is not in the budget: see the verdict.")
      : null;
    const charged = (name) => (side) => (side[name] === null ? null : -side[name]);
    const rows = [
      ["requested", (side) => side.requested], ["not free", (side) => side.not_free], [lead.charged, charged("used_by_us")], ["graphs", charged("graphs")],
      ["headroom", charged("headroom")], ["margin", charged("margin")], ["shortfall", charged("shortfall")], ["already mapped", charged("not_mapped")],
    ]
      .filter(([, of]) => of(then) !== 0 || of(now) !== 0)
      .map(([name, of]) => [name, bytes(of(then)), bytes(of(now)), of(now) === of(then) ? "" : signedBytes(of(now) - of(then))]);
    for (const [name, of] of [["available", (side) => side.available], ["KV cache", (side) => side.kv], ["one longest request", (side) => side.needed]]) {
      rows.push({ kind: "sum", cells: [name, bytes(of(then)), bytes(of(now)), of(now) === of(then) ? "" : signedBytes(of(now) - of(then))] });
    }
    rows.push({ kind: "sum", cells: ["holds", amount(then), amount(now), ""] });
    const each = known.length < 2 ? null : [
      h("h3", {}, "Rank by rank"),
      table("Blocks of each rank", [["rank", ""], ["blocks then", "number"], ["blocks now", "number"], ["", ""]], results.map((one) => ({ kind: one === least ? "here" : null, cells: [said(one.rank.label), grouped(one.then.blocks, 0), grouped(one.now.blocks, 0), one === least ? "decides: the smallest" : ""] }))),
    ];
    place.dataset.blocks = String(now.blocks);
    place.dataset.missing = String(now.missing);
    clear(place, outcome, warning, beside, table(known.length > 1 ? `The budget of ${least.rank.label}, which decides` : "The budget, as it was and as it would be", [["term", ""], ["as it was", "number"], ["what if", "number"], ["change", "number"]], rows), each);
  };
  range.addEventListener("input", () => {
    number.value = range.value;
    show();
  });
  number.addEventListener("input", () => {
    range.value = number.value;
    show();
  });
  for (const control of [longest, graphs]) control.addEventListener("input", show);
  const back = button("as it was", () => {
    number.value = Math.round(share * 1e6) / 1e6;
    range.value = share;
    longest.value = recorded.longest ?? "";
    graphs.value = "0";
    show();
  });
  show();
  return panel(
    "what-if",
    title,
    note,
    lead.is_exact ? null : h("p", { class: "note" }, "The formula does not give the recorded budget again to the byte: a log prints rounded terms, and another version may have computed it."),
    lead.assumed.length > 0 && h("p", { class: "note" }, said(`Taken for granted: ${lead.assumed.join("; ")}.`)),
    h(
      "div",
      { class: "controls" },
      field(said(lead.setting), number, h("span", { class: "pair" }, range, number)),
      field(`Longest request, ${lead.unit}`, longest),
      field("Reserved for graphs", graphs),
      back,
    ),
    place,
  );
}
