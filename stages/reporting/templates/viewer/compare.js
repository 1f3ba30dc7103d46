// Two sources side by side: the same attempts at the same tasks, turn by turn, sorted by what changed.
viewer.views.compare = (function () {
  "use strict";
  const element = page.element, format = page.format, panel = document.getElementById("view-compare"), form = panel.querySelector("form");
  const article = panel.querySelector(".episode"), count = panel.querySelector(".count"), verdict = panel.querySelector(".verdict");
  const CHANGES = { lost: "solved by the left alone", won: "solved by the right alone", both: "solved by both", neither: "solved by neither" };
  const list = viewer.listBox(panel.querySelector(".list"), row, function (pair) { turn = 0; show(pair); write(); });
  let turn = 0, rows = [], divergence = 0;

  function change(a, b) {
    if (a.outcome === "success") return b.outcome === "success" ? "both" : "lost";
    return b.outcome === "success" ? "won" : "neither";
  }

  function row(item, pair) {
    item.append(element("span", "mark " + pair.a.outcome, page.MARKS[pair.a.outcome]), "→ ", element("span", "mark " + pair.b.outcome, page.MARKS[pair.b.outcome]), " " + pair.change + ", " + pair.a.turns + " and " + pair.b.turns + " turns", element("span", "task", pair.a.task + (pair.a.role ? ", " + pair.a.role : "") + ", attempt " + pair.a.attempt));
  }

  function group(name) {
    const domain = form.elements.domain.value, source = form.elements[name].value;
    return viewer.index.groups.find(function (one) { return one.domain === domain && one.source === source; });
  }

  function common(a, b) {
    return a.entries.filter(function (entry) { return b.byPair[entry.pair]; }).map(function (entry) {
      const other = b.byPair[entry.pair];
      return { a: entry, b: other, change: change(entry, other) };
    });
  }

  function write() {
    const pair = list.current(), kept = { tab: "compare", domain: form.elements.domain.value, a: form.elements.a.value, b: form.elements.b.value, change: form.elements.change.value, tint: form.elements.tint.value };
    if (pair) { kept.task = pair.a.task; kept.attempt = pair.a.attempt; kept.turn = turn || ""; }
    history.replaceState(null, "", viewer.hash(kept));
  }

  // The paired test of the evaluation, right minus left.
  function test(a, b) {
    const found = viewer.index.comparisons.find(function (one) { return one.domain === a.domain && ((one.a === b.source && one.b === a.source) || (one.a === a.source && one.b === b.source)); });
    if (!found) return "";
    const sign = found.a === b.source ? 1 : -1, ends = [sign * found.low, sign * found.high].sort(function (x, y) { return x - y; });
    const points = function (share) { return (share < 0 ? "−" : "+") + Math.abs(100 * share).toFixed(1); };
    return b.source + " minus " + a.source + ", paired by task: " + points(sign * found.difference) + " points (interval " + points(ends[0]) + " to " + points(ends[1]) + ", p = " + found.p.toFixed(3) + (found.verdict === "undecided" ? "; not significant)." : ").");
  }

  function apply(wanted) {
    const a = group("a"), b = group("b"), all = a && b ? common(a, b) : [], of = {};
    Object.keys(CHANGES).forEach(function (name) { of[name] = all.filter(function (pair) { return pair.change === name; }); });
    const pairs = Object.keys(CHANGES).filter(function (name) { return !form.elements.change.value || form.elements.change.value === name; }).flatMap(function (name) { return of[name]; });
    const tasks = viewer.unique(all.map(function (pair) { return pair.a.task; })).length;
    count.textContent = all.length ? Object.keys(CHANGES).map(function (name) { return of[name].length + " " + CHANGES[name]; }).join(", ") + ": " + all.length + " attempts at " + tasks + " tasks" : "These two have no task in common; choose two models of the evaluation, or two sources of training tasks.";
    verdict.textContent = a && b ? test(a, b) : "";
    const before = list.current();
    show(list.fill(pairs, wanted ? pairs.find(wanted) : before && pairs.find(function (pair) { return pair.a.pair === before.a.pair; })));
  }

  // Turns are equal if action and result are; what follows the first unequal turn need not be comparable.
  function firstDivergence(a, b) {
    const longest = Math.max(a.turns.length, b.turns.length);
    for (let place = 0; place < longest; place++) {
      const left = a.turns[place], right = b.turns[place];
      if (!left || !right) return { turn: place + 1, why: (left ? "the right" : "the left") + " has ended" };
      if (left.action !== right.action) return { turn: place + 1, why: "other actions" };
      if (left.observation !== right.observation) return { turn: place + 1, why: "the same action with another result" };
    }
    return null;
  }

  function action(step, shown, vocabulary) {
    const box = element("p", "action"), what = form.elements.tint.value;
    if (!vocabulary || !step.tokens.length) { box.textContent = step.action || "(empty)"; return box; }
    const limit = viewer.largest(shown, what);
    box.classList.add("tokens");
    step.tokens.forEach(function (token) {
      const span = element("span", "", vocabulary[token.id]);
      viewer.tintBy(span, token, what, limit);
      span.title = "log-probability " + format(token.logprob, 3) + (token.advantage === undefined ? "" : ", advantage " + format(token.advantage, 3)) + (token.credit === undefined ? "" : ", step credit " + format(token.credit, 3));
      box.appendChild(span);
    });
    return box;
  }

  // One side of a turn. `other`: the other episode, in which the same step may come at another turn.
  function cell(shown, place, other, side, vocabulary) {
    const step = shown.turns[place], box = element("div", "cell " + side);
    if (!step) { box.classList.add("ended"); box.appendChild(element("p", "fine", place === shown.turns.length ? "ended: " + shown.entry.outcome + ", " + shown.entry.stop : "")); return box; }
    const heading = element("p", "fine");
    heading.append(viewer.link(shown.entry.source + ", turn " + (place + 1), { source: shown.entry.source, episode: shown.entry.id, turn: place + 1 }));
    const facts = viewer.numbers(step), twin = other.turns.findIndex(function (one) { return one.state === step.state && one.action === step.action; });
    heading.append(facts ? ", " + facts : "", twin >= 0 && twin !== place ? ", the same step as the other's turn " + (twin + 1) : "");
    const answer = element("p", "answer", step.observation);
    box.append(heading, action(step, shown, vocabulary));
    if (step.left) { answer.classList.add("left"); box.append(page.left(step.left)); }
    box.append(answer);
    return box;
  }

  function heading(shown) {
    const box = element("div", "cell");
    box.append(element("b", "", shown.entry.source), " ", element("span", "mark " + shown.entry.outcome, page.MARKS[shown.entry.outcome]), " " + shown.entry.outcome + ", return " + format(shown.entry.reward, 2) + ", " + shown.entry.turns + " turns");
    return box;
  }

  function draw(a, b, vocabulary) {
    const grid = element("div", "turns"), apart = firstDivergence(a, b);
    article.textContent = "";
    rows = [];
    divergence = apart ? apart.turn : 0;
    article.append(element("p", "prompt", a.messages.length ? a.messages[0].text : ""), element("p", "fine", apart ? "First divergence: turn " + apart.turn + ", " + apart.why + "." : "The same in every turn."));
    const top = element("div", "row head");
    top.append(heading(a), heading(b));
    grid.appendChild(top);
    for (let place = 0; place < Math.max(a.turns.length, b.turns.length); place++) {
      const line = element("div", "row");
      line.dataset.turn = place + 1;
      if (apart && place + 1 === apart.turn) { line.classList.add("apart"); grid.appendChild(element("p", "divergence", "▼ first divergence")); }
      line.append(cell(a, place, b, "left", vocabulary), cell(b, place, a, "right", vocabulary));
      rows.push(line);
      grid.appendChild(line);
    }
    article.appendChild(grid);
    article.dataset.ready = a.entry.pair;
    if (turn) goTo(turn);
  }

  function show(pair) {
    delete article.dataset.ready;
    if (!pair) { article.textContent = ""; rows = []; return; }
    Promise.all([viewer.load(pair.a.group), viewer.load(pair.b.group), form.elements.tint.value ? viewer.words() : null]).then(function (loaded) {
      if (list.current() === pair) draw(viewer.episode(pair.a, loaded[0]), viewer.episode(pair.b, loaded[1]), loaded[2]);
    });
  }

  function goTo(number) {
    if (!rows.length) return;
    turn = Math.max(1, Math.min(rows.length, number));
    rows.forEach(function (line, place) { line.classList.toggle("marked", place + 1 === turn); });
    rows[turn - 1].scrollIntoView({ block: "nearest", behavior: "instant" });
    write();
  }

  // Sources of a domain; by default the models before and after RL.
  function sources(domain, a, b) {
    const names = viewer.index.groups.filter(function (one) { return one.domain === domain; }).map(function (one) { return one.source; });
    const has = function (name, other) { return names.indexOf(name) >= 0 ? name : other; };
    ["a", "b"].forEach(function (name) { viewer.refill(form.elements[name], names); });
    form.elements.a.value = has(a, has("sft", names[0]));
    form.elements.b.value = has(b, has("rl@" + domain, names[names.length - 1]));
  }

  function follow(hash) {
    const domain = viewer.domains.indexOf(hash.get("domain")) >= 0 ? hash.get("domain") : form.elements.domain.value;
    form.elements.domain.value = domain;
    sources(domain, hash.get("a") || form.elements.a.value, hash.get("b") || form.elements.b.value);
    form.elements.change.value = CHANGES[hash.get("change")] ? hash.get("change") : "";
    form.elements.tint.value = hash.get("tint") || "";
    turn = Number(hash.get("turn")) || 0;
    const task = hash.get("task");
    apply(task === null ? null : function (pair) { return pair.a.task === task && (!hash.get("attempt") || String(pair.a.attempt) === hash.get("attempt")); });
  }

  viewer.option(form.elements.domain, viewer.domains);
  viewer.option(form.elements.change, Object.keys(CHANGES), function (name) { return name + ": " + CHANGES[name]; });
  form.addEventListener("change", function (event) {
    turn = 0;
    if (event.target === form.elements.domain) sources(form.elements.domain.value, form.elements.a.value, "");
    apply();
    write();
  });
  form.elements.swap.addEventListener("click", function () {
    const a = form.elements.a.value;
    form.elements.a.value = form.elements.b.value;
    form.elements.b.value = a;
    apply();
    write();
  });

  return { follow: follow, step: list.step, turn: function (move) { goTo(turn + move); }, divergence: function () { if (divergence) goTo(divergence); } };
})();
