// One episode: as a conversation, token by token, and as its environment draws it.
viewer.episodeView = function (article, moved) {
  "use strict";
  const element = page.element, format = page.format;
  const COLOURS = { prompt: "--base", policy: "--sft", environment: "--domain1", external: "--domain3", forced: "--domain2", evidence: "--merged", guidance: "--domain0" };
  const views = element("div", "views"), facts = element("div", "facts"), found = element("p", "found"), key = element("p", "key");
  const content = element("div", "content"), tip = document.querySelector(".tip"), buttons = {};
  let view = "chat", shown = null, turn = 0, spans = [], marked = -1;
  views.setAttribute("role", "group");
  views.setAttribute("aria-label", "View");
  content.tabIndex = 0;
  content.setAttribute("role", "region");
  content.setAttribute("aria-label", "The episode");
  [["chat", "conversation"], ["drawn", ""], ["owner", "tokens by owner"], ["logprob", "by log-probability"], ["advantage", "by advantage"], ["credit", "by step credit"]].forEach(function (one) {
    const button = buttons[one[0]] = element("button", "", one[1]);
    button.type = "button";
    button.dataset.view = one[0];
    button.addEventListener("click", function () { view = one[0]; draw(); });
    views.appendChild(button);
  });
  article.append(views, facts, found, key, content);

  function link(text, number) {
    return viewer.link(text, { source: shown.entry.source, episode: shown.entry.id, turn: number || "" });
  }

  function showFacts() {
    const entry = shown.entry, terms = entry.group.terms, rows = [["outcome", entry.outcome], ["return", format(entry.reward, 2)], ["turns", entry.turns],
      ["refused", entry.refused], ["tokens", entry.tokens], ["stop reason", entry.stop], ["played by", entry.source]];
    Object.keys(terms).forEach(function (name) { if (terms[name][entry.place] !== null) rows.push([name, format(terms[name][entry.place], 2)]); });
    if (entry.role) rows.push(["role", entry.role]);
    facts.textContent = "";
    rows.forEach(function (row) { facts.append(row[0] + " ", element("b", "", String(row[1])), "  ·  "); });
    if (entry.play) company(entry);
    facts.append("episode ", link(entry.id, 0), "  ·  ", viewer.link("side by side", beside(entry)), "  ·  ", viewer.link("paths of the task", { tab: "paths", domain: entry.domain, task: entry.task }));
    if (viewer.trace) viewer.trace(entry).then(function (address) {
      if (!address || !shown || shown.entry !== entry) return;
      const made = element("a", "trace", "trace in MLflow");
      made.href = address;
      facts.append("  ·  ", made);
    });
    found.textContent = "";
    Object.keys(entry.group.hits).forEach(function (name) {
      const turns = entry.group.hits[name][entry.place];
      if (!turns) return;
      found.append(element("b", "", viewer.index.patterns[name].title), ": turn ");
      turns.forEach(function (number, place) { found.append(place ? ", " : "", link(String(number), number)); });
      found.append("  ");
    });
  }

  // Links to the episodes of the others in the same play.
  function company(entry) {
    facts.append("play with ");
    entry.group.entries.filter(function (other) { return other.play === entry.play && other !== entry; }).forEach(function (other, place) {
      facts.append(place ? ", " : "", viewer.link(other.role, { source: other.source, episode: other.id }));
    });
    facts.append("  ·  ");
  }

  function beside(entry) {
    const others = viewer.index.groups.filter(function (group) { return group.domain === entry.domain && group !== entry.group && group.byPair[entry.pair]; });
    return { tab: "compare", domain: entry.domain, a: others.length ? others[others.length - 1].source : "", b: entry.source, task: entry.task, attempt: entry.attempt };
  }

  function showChat() {
    let count = 0;
    shown.messages.forEach(function (message) {
      const own = message.role === "assistant", box = element("div", "message " + (own ? "assistant" : "other"));
      const policy = "policy" + (shown.entry.role ? " (" + shown.entry.role + ")" : "");
      const heading = element("b", "", { assistant: policy, user: "environment", system: "system" }[message.role] || message.role);
      const step = own && shown.turns[count++];
      if (step) {
        box.dataset.turn = count;
        const said = viewer.numbers(step);
        heading.append(", ", link("turn " + count, count), said ? ", " + said : "");
      }
      const seen = count && !own && shown.turns[count - 1];
      if (seen && seen.left) { box.classList.add("left"); heading.append(", ", page.left(seen.left)); }
      box.append(heading, message.text);
      content.appendChild(box);
    });
  }

  function showDrawn() {
    const renderer = viewer.renderers[shown.entry.domain];
    shown.turns.forEach(function (step, place) {
      const box = element("div", "drawn"), heading = element("b"), picture = element("div", "picture");
      box.dataset.turn = place + 1;
      heading.append(link("turn " + (place + 1), place + 1), ": " + step.action + (step.accepted ? "" : " (refused)"));
      if (step.left) heading.append(" ", page.left(step.left));
      box.append(heading, picture);
      content.appendChild(box);
      picture.append(renderer.draw(shown, place, element));
    });
  }

  function swatch(tint, part, label) {
    const item = element("span"), colour = element("i");
    colour.style.background = "color-mix(in srgb, var(" + tint + ") " + part + "%, transparent)";
    item.append(colour, label);
    key.appendChild(item);
  }

  function showKey(limit) {
    if ((view === "chat" ? shown.turns : shown.tokens).some(function (one) { return one.left; })) key.append(element("span", "", page.LEFT));
    if (view === "owner") Object.keys(COLOURS).forEach(function (owner) { if (shown.tokens.some(function (token) { return token.owner === owner; })) swatch(COLOURS[owner], 40, owner); });
    if (view === "logprob") { swatch("--domain0", 8, "probability near 1"); swatch("--domain0", 31, "10 %"); swatch("--domain0", 54, "1 % or less"); }
    if (view === "advantage") { swatch("--sft", 50, "made more likely (up to +" + format(limit, 2) + ")"); swatch("--domain0", 50, "made less likely (down to −" + format(limit, 2) + ")"); }
    if (view === "credit") { swatch("--sft", 50, "gained (up to +" + format(limit, 2) + ")"); swatch("--domain0", 50, "lost (down to −" + format(limit, 2) + ")"); key.append(shown.turns.some(function (step) { return step.given; }) ? "Credit as RL gave it." : "Credit by learnt values: reward + value after the turn − value before it."); }
  }

  function showTokens(vocabulary) {
    const limit = viewer.largest(shown, view), box = element("div", "tokens");
    showKey(limit);
    shown.tokens.forEach(function (token, place) {
      const span = element("span", token.owner === "policy" ? "" : "other", vocabulary[token.id]);
      if (token.left && (!place || shown.tokens[place - 1].left !== token.left || shown.tokens[place - 1].turn !== token.turn)) box.appendChild(page.left(token.left));
      if (token.left) span.classList.add("left");
      if (view === "owner") viewer.tint(span, COLOURS[token.owner], 32);
      else viewer.tintBy(span, token, view, limit);
      span.dataset.token = place;
      box.appendChild(span);
      const next = shown.tokens[place + 1];
      if (token.owner === "policy" && (!next || next.owner !== "policy")) box.appendChild(element("br"));
    });
    content.appendChild(box);
    spans = box.querySelectorAll("[data-token]");
  }

  function explain(span) {
    if (!span) { tip.hidden = true; return; }
    viewer.words().then(function (vocabulary) {
      const token = shown.tokens[Number(span.dataset.token)], lines = [JSON.stringify(vocabulary[token.id]) + "  (id " + token.id + ")"];
      lines.push(token.owner + (token.turn >= 0 ? ", turn " + (token.turn + 1) : ""));
      if (token.left) lines.push("left the context after turn " + token.left);
      if (token.logprob !== undefined) lines.push("log-probability " + format(token.logprob, 3) + ", probability " + format(Math.exp(token.logprob), 3));
      if (token.advantage !== undefined) lines.push("advantage " + format(token.advantage, 3));
      if (token.credit !== undefined) lines.push("step credit " + format(token.credit, 3));
      tip.textContent = lines.join("\n");
      tip.hidden = false;
      const box = span.getBoundingClientRect(), size = tip.getBoundingClientRect();
      tip.style.left = Math.max(4, Math.min(box.left, window.innerWidth - size.width - 8)) + "px";
      tip.style.top = (box.top - size.height - 6 > 0 ? box.top - size.height - 6 : box.bottom + 6) + "px";
    });
  }

  function mark(place) {
    if (!spans.length) return;
    if (spans[marked]) spans[marked].classList.remove("marked");
    marked = Math.max(0, Math.min(spans.length - 1, place));
    spans[marked].classList.add("marked");
    spans[marked].scrollIntoView({ block: "nearest", behavior: "instant" });
    explain(spans[marked]);
  }

  function goTo(number) {
    if (!shown || !shown.turns.length) return;
    turn = Math.max(1, Math.min(shown.turns.length, number));
    if (view === "chat" || view === "drawn") {
      content.querySelectorAll("[data-turn]").forEach(function (box) {
        const here = box.dataset.turn === String(turn);
        box.classList.toggle("marked", here);
        if (here) box.scrollIntoView({ block: "nearest", behavior: "instant" });
      });
    } else {
      mark(shown.tokens.findIndex(function (token) { return token.owner === "policy" && token.turn === turn - 1; }));
    }
    moved(turn);
  }

  function draw() {
    content.textContent = key.textContent = facts.textContent = found.textContent = "";
    tip.hidden = true;
    marked = -1;
    spans = [];
    views.hidden = !shown;
    if (!shown) { content.appendChild(element("p", "note", "No episode matches the filters.")); return; }
    const renderer = viewer.renderers[shown.entry.domain];
    buttons.drawn.hidden = !renderer;
    buttons.drawn.textContent = renderer ? renderer.name : "";
    buttons.advantage.disabled = !shown.trained;
    buttons.advantage.title = shown.trained ? "" : "Only episodes of RL's steps have advantages";
    buttons.credit.disabled = !shown.credited;
    buttons.credit.title = shown.credited ? "" : "No step credit and no learnt values of these states";
    if ((view === "drawn" && !renderer) || (view === "advantage" && !shown.trained) || (view === "credit" && !shown.credited)) view = "chat";
    Object.keys(buttons).forEach(function (name) { buttons[name].setAttribute("aria-pressed", String(name === view)); });
    showFacts();
    const now = shown;
    if (view === "chat") { showKey(); showChat(); finish(); }
    else if (view === "drawn") { showDrawn(); finish(); }
    else viewer.words().then(function (vocabulary) { if (shown === now) { showTokens(vocabulary); finish(); } });
  }

  function finish() {
    content.dataset.ready = shown.entry.id;
    if (turn) goTo(turn);
  }

  content.addEventListener("mouseover", function (event) { explain(event.target.closest("[data-token]")); });
  content.addEventListener("click", function (event) { explain(event.target.closest("[data-token]")); });
  content.addEventListener("mouseleave", function () { tip.hidden = true; });
  content.addEventListener("blur", function () { tip.hidden = true; });
  content.addEventListener("keydown", function (event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") tip.hidden = true;
    if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    if (spans.length && !event.shiftKey) mark(marked + move); else goTo(turn + move);
  });

  return {
    step: function (move) { goTo(turn + move); },
    // Shows an entry of the index, or none; `number` is the turn to mark, from 1, or 0.
    show: function (entry, number) {
      turn = number || 0;
      delete content.dataset.ready;
      if (!entry) { shown = null; draw(); return; }
      viewer.load(entry.group).then(function (data) { shown = viewer.episode(entry, data); draw(); });
    }
  };
};

// Colours a token by its log-probability, advantage or step credit; `limit` is the episode's largest one.
viewer.tint = function (span, colour, part) {
  span.style.setProperty("--tint", "var(" + colour + ")");
  span.style.setProperty("--part", part.toFixed(0) + "%");
};
viewer.tintBy = function (span, token, what, limit) {
  if (what === "logprob" && token.logprob !== undefined) viewer.tint(span, "--domain0", 8 + 46 * Math.min(1, -token.logprob / 4.6));
  if ((what === "advantage" || what === "credit") && token[what]) viewer.tint(span, token[what] > 0 ? "--sft" : "--domain0", 10 + 40 * Math.abs(token[what]) / limit);
};
viewer.largest = function (shown, what) {
  return shown.tokens.reduce(function (most, token) { return Math.max(most, Math.abs(token[what] || 0)); }, 1e-9);
};
