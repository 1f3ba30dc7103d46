(function () {
  "use strict";
  var root = document.getElementById("browser");
  var data = JSON.parse(document.getElementById("episode-data").textContent);
  var form = root.querySelector("form"), list = root.querySelector(".list"), tip = root.querySelector(".tip");
  var content = root.querySelector(".content"), facts = root.querySelector(".facts"), key = root.querySelector(".key");
  var OWNERS = [["prompt", "--base"], ["policy", "--sft"], ["environment", "--domain1"], ["external", "--domain3"], ["forced", "--domain2"], ["evidence", "--merged"], ["guidance", "--domain0"]];
  var MARKS = page.MARKS, element = page.element, format = page.format;
  var FILTERS = ["domain", "source", "outcome", "stop", "count", "refusals", "pick"];
  var view = "chat", shown = [], current = null, tokens = [], marked = -1, turn = 0;
  var missing = root.querySelector(".missing");

  function spread(runs) {
    var values = [];
    (runs || []).forEach(function (run) { for (var i = 0; i < run[1]; i++) values.push(run[0]); });
    return values;
  }

  data.episodes.forEach(function (episode) {
    episode.count = String(episode.turns.length);
    episode.refusals = episode.turns.some(function (facts) { return !facts[0]; }) ? "with" : "without";
    episode.text = [episode.id, episode.task].concat(episode.messages.map(function (message) { return message[1]; })).join("\n").toLowerCase();
  });

  FILTERS.forEach(function (name) {
    var values = [];
    data.episodes.forEach(function (episode) { if (values.indexOf(episode[name]) < 0) values.push(episode[name]); });
    if (name === "count") values.sort(function (one, other) { return one - other; });
    values.forEach(function (value) { form.elements[name].appendChild(new Option(value, value)); });
  });

  function filter() {
    var text = form.elements.text.value.trim().toLowerCase();
    shown = data.episodes.filter(function (episode) {
      return episode.text.indexOf(text) >= 0 && FILTERS.every(function (name) {
        var wanted = form.elements[name].value;
        return !wanted || episode[name] === wanted;
      });
    });
    root.querySelector(".count").textContent = shown.length + (shown.length === 1 ? " episode" : " episodes");
    list.textContent = "";
    shown.forEach(function (episode, index) {
      var item = element("li");
      item.setAttribute("role", "option");
      item.id = "episode-" + index;
      item.appendChild(element("span", "mark " + episode.outcome, MARKS[episode.outcome]));
      item.appendChild(document.createTextNode(" " + episode.domain + ", " + episode.source + (episode.role ? ", " + episode.role : "") + ", " + episode.turns.length + (episode.turns.length === 1 ? " turn" : " turns")));
      item.appendChild(element("span", "task", episode.task));
      item.addEventListener("click", function () { select(index); });
      list.appendChild(item);
    });
    show(shown.indexOf(current) >= 0 ? shown.indexOf(current) : 0);
  }

  function show(index) {
    var kept = current && shown[index] === current;
    current = shown[index] || null;
    missing.hidden = true;
    Array.prototype.forEach.call(list.children, function (item, place) { item.setAttribute("aria-selected", String(place === index)); });
    if (list.children[index]) list.setAttribute("aria-activedescendant", "episode-" + index);
    else list.removeAttribute("aria-activedescendant");
    if (kept) return;
    turn = 0;
    draw();
  }

  function select(index) {
    show(index);
    if (current) history.replaceState(null, "", address(turn));
  }

  // A link names the episode by its id and the turn by its number from 1: it outlives other filters, orders and samples.
  function address(number) {
    return "#episode=" + encodeURIComponent(current.id) + (number ? "&turn=" + number : "");
  }

  function link(text, number) {
    var made = element("a", "", text);
    made.href = address(number);
    return made;
  }

  function follow() {
    var wanted = new URLSearchParams(location.hash.slice(1)), id = wanted.get("episode");
    if (id === null) return;
    var found = data.episodes.filter(function (episode) { return episode.id === id; })[0];
    root.scrollIntoView({ block: "nearest", behavior: "instant" });
    missing.hidden = !!found;
    if (!found) { missing.textContent = "Episode " + id + " of this link is not on this page, which holds selected episodes only."; return; }
    if (shown.indexOf(found) < 0) { form.reset(); filter(); }
    show(shown.indexOf(found));
    list.children[shown.indexOf(found)].scrollIntoView({ block: "nearest", behavior: "instant" });
    turn = Number(wanted.get("turn")) || 0;
    draw();
  }

  // Marks a turn of the current episode, in any view.
  function goTo(number) {
    turn = Math.max(1, Math.min(current.turns.length, number));
    history.replaceState(null, "", address(turn));
    if (view !== "chat") { mark(tokens.findIndex(function (token) { return token.owner === "policy" && token.turn === turn - 1; })); return; }
    Array.prototype.forEach.call(content.querySelectorAll("[data-turn]"), function (box) {
      var here = box.dataset.turn === String(turn);
      box.classList.toggle("marked", here);
      if (here) box.scrollIntoView({ block: "nearest", behavior: "instant" });
    });
  }

  function showFacts() {
    facts.textContent = "";
    var rows = [["outcome", current.outcome], ["return", format(current.reward, 2)], ["turns", current.turns.length], ["tokens", current.ids.length],
      ["stop reason", current.stop], ["selected as", current.pick], ["policy", current.policy]];
    if (current.role) rows.push(["role", current.role]);
    if (current.play) rows.push(["play", current.play]);
    Object.keys(current.terms).sort().forEach(function (name) { rows.push([name, format(current.terms[name], 2)]); });
    rows.forEach(function (row, place) {
      if (place) facts.appendChild(document.createTextNode("  ·  "));
      facts.appendChild(document.createTextNode(row[0] + " "));
      facts.appendChild(element("b", "", String(row[1])));
    });
    facts.appendChild(document.createTextNode("  ·  episode "));
    facts.appendChild(link(current.id, 0));
  }

  // What judges said of the episode: its score, and the other's where two were compared.
  function showJudgments() {
    (current.judgments || []).forEach(function (one) {
      var box = element("div", "message other judgment");
      var scores = one.scores.map(function (score) { return format(score, 2); });
      var said = one.status !== "ok" ? one.status : one.kind === "pairwise" ? scores[0] + " against " + scores[1] : scores.join(", ");
      box.appendChild(element("b", "", "judge (" + one.judge + "): " + said));
      var lines = [];
      if (one.kind === "pairwise") lines.push("shown " + (one.first ? "first" : "second") + "; the other: " + one.other);
      if (one.reason) lines.push(one.reason);
      if (one.cost) lines.push("cost " + one.cost);
      box.appendChild(document.createTextNode(lines.join("\n")));
      content.appendChild(box);
    });
  }

  function showChat() {
    var count = 0, left = {};
    (current.hidden || []).forEach(function (hidden) { left[hidden[0] + 1] = hidden[1] + 1; });
    showKey();
    current.messages.forEach(function (message) {
      var box = element("div", "message " + (message[0] === "assistant" ? "assistant" : "other"));
      var policy = "policy" + (current.role ? " (" + current.role + ")" : "");
      var title = { assistant: policy, user: "environment", system: "system" }[message[0]] || message[0];
      var heading = element("b", "", title), facts = message[0] === "assistant" && current.turns[count++];
      if (facts) {
        box.dataset.turn = count;
        heading.appendChild(document.createTextNode(", "));
        heading.appendChild(link("turn " + count, count));
        heading.appendChild(document.createTextNode((facts[0] ? "" : ", invalid action") + (facts[1] ? ", reward " + format(facts[1], 2) : "")));
      }
      if (message[0] !== "assistant" && left[count]) {
        box.classList.add("left");
        heading.appendChild(document.createTextNode(", "));
        heading.appendChild(page.left(left[count]));
      }
      box.appendChild(heading);
      box.appendChild(document.createTextNode(message[1]));
      content.appendChild(box);
    });
    showJudgments();
  }

  function swatch(tint, part, label) {
    var item = element("span"), colour = element("i");
    colour.style.background = "color-mix(in srgb, var(" + tint + ") " + part + "%, transparent)";
    item.appendChild(colour);
    item.appendChild(document.createTextNode(label));
    key.appendChild(item);
  }

  function showKey(limit) {
    if ((current.hidden || []).some(function (hidden) { return view === "chat" || hidden.length > 2; })) key.appendChild(element("span", "", page.LEFT));
    if (view === "owner") OWNERS.forEach(function (owner, place) { if (current.owner.indexOf(place) >= 0) swatch(owner[1], 40, owner[0]); });
    if (view === "logprob") { swatch("--domain0", 8, "probability near 1"); swatch("--domain0", 31, "10 %"); swatch("--domain0", 54, "1 % or less"); }
    if (view === "advantage") { swatch("--sft", 50, "made more likely (up to +" + format(limit, 2) + ")"); swatch("--domain0", 50, "made less likely (down to −" + format(limit, 2) + ")"); }
  }

  function showTokens() {
    var left = {};
    (current.hidden || []).forEach(function (hidden) { for (var i = hidden[2]; i < hidden[3]; i++) left[i] = hidden; });
    var turns = spread(current.turn), advantages = spread(current.advantage), box = element("div", "tokens"), place = 0;
    var limit = advantages.reduce(function (most, value) { return Math.max(most, Math.abs(value || 0)); }, 1e-9);
    tokens = [];
    showKey(limit);
    current.ids.forEach(function (id, index) {
      var owner = Number(current.owner[index]), token = { id: id, owner: OWNERS[owner][0], turn: turns[index] };
      var span = element("span", owner === 1 ? "" : "other", data.vocabulary[id]);
      if (owner === 1) {
        token.logprob = current.logprob[place];
        if (current.advantage) token.advantage = advantages[place];
        place++;
      }
      if (left[index]) {
        token.left = left[index][1] + 1;
        span.classList.add("left");
        if (left[index][2] === index) box.appendChild(page.left(token.left));
      }
      if (view === "owner") { span.style.setProperty("--tint", "var(" + OWNERS[owner][1] + ")"); span.style.setProperty("--part", "32%"); }
      if (view === "logprob" && owner === 1 && token.logprob !== null) {
        span.style.setProperty("--tint", "var(--domain0)");
        span.style.setProperty("--part", (8 + 46 * Math.min(1, -token.logprob / 4.6)).toFixed(0) + "%");
      }
      if (view === "advantage" && owner === 1 && token.advantage) {
        span.style.setProperty("--tint", token.advantage > 0 ? "var(--sft)" : "var(--domain0)");
        span.style.setProperty("--part", (10 + 40 * Math.abs(token.advantage) / limit).toFixed(0) + "%");
      }
      span.dataset.token = tokens.length;
      tokens.push(token);
      box.appendChild(span);
      if (owner === 1 && current.owner[index + 1] !== "1") box.appendChild(element("br"));
    });
    content.appendChild(box);
  }

  function draw() {
    content.textContent = key.textContent = facts.textContent = "";
    tip.hidden = true;
    marked = -1;
    var trained = current && current.advantage;
    Array.prototype.forEach.call(root.querySelectorAll("[data-view]"), function (button) {
      button.disabled = button.dataset.view === "advantage" && !trained;
      button.title = button.disabled ? "Only RL episodes have advantages" : "";
      button.setAttribute("aria-pressed", String(button.dataset.view === view));
    });
    if (!current) { content.appendChild(element("p", "note", "No episode matches the filters.")); return; }
    showFacts();
    if (view === "advantage" && !trained) {
      content.appendChild(element("p", "note", "No advantages: this episode was not used for training. Choose another view or an rl source."));
    } else if (view === "chat") { showChat(); } else { showTokens(); }
    if (turn && content.querySelector("[data-turn], [data-token]")) goTo(turn);
  }

  function explain(span) {
    if (!span) { tip.hidden = true; return; }
    var token = tokens[Number(span.dataset.token)];
    var lines = [JSON.stringify(data.vocabulary[token.id]) + "  (id " + token.id + ")", token.owner + (token.turn >= 0 ? ", turn " + (token.turn + 1) : "")];
    if (token.left) lines.push("left the context after turn " + token.left);
    if (token.logprob !== undefined) lines.push("log-probability " + format(token.logprob, 3) + (token.logprob === null ? "" : "  (" + (100 * Math.exp(token.logprob)).toFixed(1) + " %)"));
    if (token.advantage !== undefined) lines.push("advantage " + format(token.advantage, 3));
    tip.textContent = lines.join("\n");
    tip.hidden = false;
    var box = span.getBoundingClientRect(), size = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(box.left, window.innerWidth - size.width - 8)) + "px";
    tip.style.top = (box.top - size.height - 6 > 0 ? box.top - size.height - 6 : box.bottom + 6) + "px";
  }

  function point(event) { explain(event.target.closest ? event.target.closest("[data-token]") : null); }

  function mark(place) {
    var spans = content.querySelectorAll("[data-token]");
    if (spans[marked]) spans[marked].classList.remove("marked");
    marked = Math.max(0, Math.min(spans.length - 1, place));
    spans[marked].classList.add("marked");
    spans[marked].scrollIntoView({ block: "nearest", behavior: "instant" });
    explain(spans[marked]);
  }

  form.addEventListener("change", filter);
  form.elements.text.addEventListener("input", filter);
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  content.addEventListener("mouseover", point);
  content.addEventListener("click", point);
  content.addEventListener("mouseleave", function () { tip.hidden = true; });
  content.addEventListener("keydown", function (event) {
    var move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") tip.hidden = true;
    if (!move || !content.querySelector("[data-turn], [data-token]")) return;
    event.preventDefault();
    if (view === "chat" || event.shiftKey) goTo(turn + move);
    else mark(marked + move);
  });
  content.addEventListener("blur", function () { tip.hidden = true; });
  list.addEventListener("keydown", function (event) {
    var at = shown.indexOf(current), last = shown.length - 1;
    var place = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (place === undefined || last < 0) return;
    event.preventDefault();
    if (place < 0 || place > last) return;
    select(place);
    list.children[place].scrollIntoView({ block: "nearest", behavior: "instant" });
  });
  Array.prototype.forEach.call(root.querySelectorAll("[data-view]"), function (button) {
    button.addEventListener("click", function () { view = button.dataset.view; draw(); });
  });
  window.addEventListener("hashchange", follow);
  root.hidden = false;
  filter();
  follow();
})();
