// What the page is about, what is chosen now, and who wants to know.

const report = JSON.parse(document.getElementById("report").textContent);

const view = { rank: report.decides, frame: 0 };
const watchers = { rank: [], frame: [] };

function rankNow() {
  return report.ranks[view.rank];
}

function watch(what, action) {
  watchers[what].push(action);
}

function chooseRank(at) {
  view.rank = at;
  view.frame = Math.max(0, rankNow().frames.length - 1);
  for (const action of watchers.rank) action();
  for (const action of watchers.frame) action();
}

function chooseFrame(at) {
  const last = rankNow().frames.length - 1;
  view.frame = Math.max(0, Math.min(last, at));
  for (const action of watchers.frame) action();
}

// The last stop at or before an event.
function frameBefore(rank, seq) {
  let found = 0;
  rank.frames.forEach((frame, at) => {
    if (frame[0] <= seq) found = at;
  });
  return found;
}

// A frame is a row of numbers; here it has names.
function frameOf(rank, at) {
  const row = rank.frames[at];
  if (!row) return null;
  const [seq, t, visit, label, isEdge, memory, captures] = row;
  return { seq, t, visit: rank.visits[visit], at: visit, label, isEdge: isEdge === 1, memory, captures };
}

// A reading: total, free, peak, basis, and what each account holds, in the order in which they are stacked.
function readingOf(rank, at) {
  const row = at === null || at === undefined ? null : rank.memory[at];
  if (!row) return null;
  const [total, free, peak, basis, ...held] = row;
  const parts = rank.accounts
    .map(([name, kind], index) => ({ name, kind, bytes: held[index] || 0 }))
    .filter((part) => part.bytes !== 0)
    .sort((one, two) => report.kinds.indexOf(one.kind) - report.kinds.indexOf(two.kind));
  const own = parts.filter((part) => report.own_kinds.includes(part.kind)).reduce((sum, part) => sum + part.bytes, 0);
  const used = parts.reduce((sum, part) => sum + part.bytes, 0);
  return { total, free, peak, basis, parts, own, used };
}

function visitName(visit) {
  return visit.visit > 1 ? `${visit.state} (visit ${visit.visit})` : visit.state;
}

// What a state mostly makes decides its colour; the name always stands beside it.
const PHASES = {
  init_device: "outside",
  load_weights: "weights",
  warmup: "peak",
  profile_activations: "peak",
  bootstrap_kv: "trial_kv",
  capture_throwaway: "trial_graphs",
  recover_allocator: "pool",
  teardown: "pool",
  reserve_kv: "kv",
  size_kv: "kv",
  allocate_kv: "kv",
  commit_kv: "kv",
  capture_graphs: "graphs",
  verify: "verify",
  serving: "verify",
};

function phaseOf(state) {
  return Object.hasOwn(PHASES, state) ? PHASES[state] : "plain";
}

const BASIS = {
  read: "read from the device",
  counted: "the last reading, and what captures added since",
  printed: "as the log printed it, no reading",
};
