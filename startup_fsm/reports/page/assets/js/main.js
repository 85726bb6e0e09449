// Puts the panels together, in the order in which a reader asks.

const themed = [];

function watchTheme(action) {
  themed.push(action);
}

function themeButton() {
  const root = document.documentElement;
  const names = ["auto", "light", "dark"];
  const toggle = button("theme: auto", () => {
    const next = names[(names.indexOf(root.dataset.theme || "auto") + 1) % names.length];
    root.dataset.theme = next;
    toggle.textContent = `theme: ${next}`;
    for (const action of themed) action();
  }, { id: "theme", class: "quiet" });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => themed.forEach((action) => action()));
  return toggle;
}

const PANELS = [
  ["verdict", "Verdict", verdictPanel],
  ["memory", "Memory", memoryPanel],
  ["time", "Time", timePanel],
  ["checks", "Checks", checksPanel],
  ["ledger", "Ledger", ledgerPanel],
  ["plan", "Plan", graphPanel],
  ["travel", "Time travel", travelPanel],
  ["what-if", "What if", whatIfPanel],
  ["events", "Events", eventsPanel],
];

function fillNav(nav) {
  nav.append(h("ul", {}, PANELS.map(([id, title]) => h("li", {}, h("a", { href: `#${id}` }, title)))));
  if (report.ranks.length < 2) return;
  const choice = h("select", { id: "rank", onchange: (event) => chooseRank(Number(event.target.value)) }, options(report.ranks.map((rank, at) => [String(at), `${rank.label}: ${rank.outcome}`]), String(view.rank)));
  watch("rank", () => {
    choice.value = String(view.rank);
  });
  nav.append(field("Rank", choice));
}

function footerWords() {
  const counts = Object.entries(report.replaced).map(([kind, count]) => `${count} ${kind}`);
  const redaction = report.redacted
    ? `Paths, host names, user names, process numbers and environment are replaced by stable tokens${counts.length > 0 ? ` (${counts.join(", ")})` : ""}.`
    : "Nothing is replaced: this page names paths, hosts, users and processes of the machine.";
  const left = report.ranks_left > 0 ? ` ${report.ranks_left} more processes were read and are not in this page.` : "";
  return h("p", {}, redaction, left, " It needs no network and loads nothing. Charts: own SVG, and uPlot (MIT) for the line over time.");
}

function keys(event) {
  const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("event-search").focus();
  }
}

function begin() {
  document.title = `${report.verdict.line} – startup-fsm report`;
  view.frame = Math.max(0, rankNow().frames.length - 1);
  document.getElementById("top").append(h("p", { class: "brand" }, "startup-fsm ", h("span", {}, "report")), h("p", { class: "small" }, report.redacted ? "redacted" : "not redacted: do not attach it to a public issue"), themeButton());
  fillNav(document.getElementById("nav"));
  const main = document.getElementById("main");
  main.append(patternStore(), announcer, ...PANELS.map(([, , make]) => make()));
  document.getElementById("footer").append(footerWords());
  document.addEventListener("keydown", keys);
  // Where it is measured how soon the page can be used.
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

begin();
