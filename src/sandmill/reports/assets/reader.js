// The episode reader: filters, the list, and one episode turn by turn.
const OUTCOMES = { passed: ["passed", "good"], failed: ["not passed", ""], failure: ["failure", "bad"] };
const reader = { filters: {}, shown: [], open: null, list: null, detail: null, count: null };

function select(name, label, choices) {
  const box = el("select", { id: `filter-${name}` }, choices.map(([value, text]) => el("option", { value }, text)));
  box.addEventListener("change", filterEpisodes);
  reader.filters[name] = box;
  return el("label", { for: `filter-${name}` }, label, box);
}

function episodes() {
  const body = at("episodes-body");
  if (!data.episodes.length) { body.append(el("p", { class: "muted" }, "No episode has been kept yet.")); return; }
  const unique = (values) => [...new Set(values)];
  const search = el("input", { id: "filter-text", type: "search", placeholder: "words in task or turns", size: 24 });
  search.addEventListener("input", filterEpisodes);
  reader.filters.text = search;
  reader.count = el("span", { class: "muted small", id: "episode-count" });
  body.append(el("div", { class: "filters" },
    select("kind", "from", [["", "everywhere"], ...unique(data.episodes.map((one) => one.kind)).map((kind) => [kind, kind])]),
    select("step", "step", [["", "all"], ...unique(data.episodes.map((one) => one.step)).sort((a, b) => a - b).map((step) => [step, step])]),
    select("outcome", "outcome", [["", "all"], ...Object.entries(OUTCOMES).map(([key, words]) => [key, words[0]]), ["limited", "hit a limit"]]),
    el("label", { for: "filter-text" }, "search", search), reader.count));
  reader.list = el("div", { class: "card list", role: "listbox", tabindex: "0", "aria-label": "episodes" });
  reader.detail = el("article", { class: "card", id: "episode" });
  reader.list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const place = reader.shown.indexOf(reader.open) + move;
    if (place >= 0 && place < reader.shown.length) openEpisode(reader.shown[place]);
  });
  body.append(el("div", { class: "reader" }, reader.list, reader.detail));
  if (data.episode_total > data.episodes.length) body.append(el("p", { class: "muted small" }, `${whole(data.episodes.length)} of ${whole(data.episode_total)} episodes are on this page, every kind of outcome of every drawn step among them; all are in trajectories.jsonl.`));
  filterEpisodes();
}

function matches(one) {
  const wants = reader.filters, words = wants.text.value.trim().toLowerCase();
  if (wants.kind.value && one.kind !== wants.kind.value) return false;
  if (wants.step.value && String(one.step) !== wants.step.value) return false;
  if (wants.outcome.value === "limited" ? !one.limit : wants.outcome.value && one.outcome !== wants.outcome.value) return false;
  return !words || one.task.toLowerCase().includes(words) || one.text.some((part) => part[1].toLowerCase().includes(words));
}

function filterEpisodes() {
  reader.shown = data.episodes.filter(matches);
  reader.count.textContent = `${whole(reader.shown.length)} shown`;
  reader.list.replaceChildren(...reader.shown.map((one) => {
    const item = el("button", { class: "item", role: "option", type: "button" }, el("span", { class: "task" }, one.title), outcomeChip(one), el("span", { class: "meta" }, `${one.kind} · step ${one.step} · ${one.turns.length} turns · reward ${num(one.reward)}`));
    item.addEventListener("click", () => openEpisode(one));
    item.episode = one;
    return item;
  }));
  if (!reader.shown.includes(reader.open)) openEpisode(reader.shown[0] || null);
  else markOpen();
}

function outcomeChip(one) {
  const [words, kind] = OUTCOMES[one.outcome];
  return el("span", { class: `chip ${kind}` }, words);
}

function markOpen() {
  for (const item of reader.list.children) item.setAttribute("aria-selected", String(item.episode === reader.open));
}

function openStep(step) {
  const box = reader.filters.step;
  if (!box) return;
  const steps = [...box.options].map((option) => Number(option.value)).filter((value) => value > 0);
  box.value = String(steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0]));
  filterEpisodes();
  at("episodes").scrollIntoView();
}

function openEpisode(one) {
  reader.open = one;
  markOpen();
  if (!one) { reader.detail.replaceChildren(el("p", { class: "muted" }, "No episode fits these filters.")); return; }
  const facts = [`step ${one.step}`, one.kind, `group ${one.group}, attempt ${one.index}`, `reward ${num(one.reward)}`, known(one.advantage) ? `advantage ${num(one.advantage)}` : null, `${one.sampled} tokens sampled, ${one.given} given`, known(one.cost) ? one.cost : null];
  const head = el("div", {}, el("h3", {}, one.task, "  ", outcomeChip(one), " ", one.limit ? el("span", { class: "chip warn" }, `limit: ${one.limit}`) : null), el("div", { class: "facts" }, facts.filter(known).map((fact) => el("span", {}, fact))));
  const parts = Object.entries(one.parts).map(([name, value]) => `${name} ${num(value)}`).join(", ");
  const spent = data.episode_parts.map((_, stage) => one.spans.filter((span) => span[0] === stage).reduce((sum, span) => sum + span[2] - span[1], 0));
  reader.detail.replaceChildren(head, shareBar(data.episode_parts, spent, ""), ...turnBlocks(one),
    el("p", { class: "small muted" }, one.outcome === "failure" ? `Infrastructure failure: ${one.failure}. No reward exists; it is in no rate and was never trained on.` : `Graded: reward ${num(one.reward)}${parts ? ` (${parts})` : ""}${known(one.answer) ? `, answer ${JSON.stringify(one.answer)}` : ", no answer"}.`));
}

function turnBlocks(one) {
  let replies = 0;
  let commands = 0;
  return one.text.map(([role, text]) => {
    if (role !== "model") {
      const turn = one.turns[replies], code = role === "tool" ? one.exits[commands++] : undefined;
      const exit = code === undefined ? null : el("span", { class: code === 0 ? "chip" : "chip bad" }, code === null ? "timed out" : `exit ${code}`);
      return block("given", role, text, turn ? `given, ${turn.context.length} tokens` : "given", exit, turn ? tokenChips(turn, true) : null);
    }
    const turn = one.turns[replies++];
    if (!turn) return block("sampled", role, text, "sampled", null, null);
    const mean = turn.logprobs.length ? turn.logprobs.reduce((sum, value) => sum + value, 0) / turn.logprobs.length : null;
    const words = `sampled, ${turn.ids.length} tokens · mean log-probability ${num(mean)} · policy ${turn.versions} · ended by ${turn.stop}`;
    return block("sampled", role, text, words, null, tokenChips(turn, false));
  });
}

function block(kind, role, text, words, exit, tokens) {
  const box = el("div", { class: `turn ${kind}` });
  const who = el("div", { class: "who" }, el("b", {}, role), words, exit);
  box.append(who, el("pre", {}, text === "" ? "(nothing)" : text));
  if (tokens) {
    let chips = null;
    const toggle = el("button", { class: "plain", type: "button" }, "tokens");
    toggle.addEventListener("click", () => {
      if (chips) { chips.remove(); chips = null; return; }
      chips = tokens();
      box.append(chips);
    });
    who.append(toggle);
  }
  return box;
}

function tokenChips(turn, given) {
  const piece = (id) => (known(data.vocabulary[id]) ? data.vocabulary[id] : String(id));
  return () => el("div", { class: "tokens" }, given
    ? turn.context.map((id) => el("span", { class: "tok", title: `id ${id}, given: mask 0` }, piece(id)))
    : turn.ids.map((id, place) => el("span", { class: `tok own ${turn.logprobs[place] < -2.3 ? "p1" : turn.logprobs[place] < -0.7 ? "p2" : ""}`, title: `id ${id}, sampled: mask 1, log-probability ${num(turn.logprobs[place], 3)}, probability ${pct(Math.exp(turn.logprobs[place]), 1)}` }, piece(id))));
}

header();
results();
learning();
halves();
time();
cost();
episodes();
configuration();
