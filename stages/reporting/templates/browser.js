(function () {
  "use strict";
  var root = document.getElementById("browser");
  var data = JSON.parse(document.getElementById("episode-data").textContent);
  var form = root.querySelector("form"), list = root.querySelector(".list"), tip = root.querySelector(".tip");
  var content = root.querySelector(".content"), facts = root.querySelector(".facts"), key = root.querySelector(".key");
  var OWNERS = [["prompt", "--base"], ["policy", "--sft"], ["environment", "--domain1"], ["external", "--domain3"]];
  var MARKS = page.MARKS, element = page.element, format = page.format;
  var view = "chat", shown = [], current = null, tokens = [], marked = -1;

  function spread(runs) {
    var values = [];
    (runs || []).forEach(function (run) { for (var i = 0; i < run[1]; i++) values.push(run[0]); });
    return values;
  }

  ["domain", "source", "outcome", "pick"].forEach(function (name) {
    var values = [];
    data.episodes.forEach(function (episode) { if (values.indexOf(episode[name]) < 0) values.push(episode[name]); });
    values.forEach(function (value) { form.elements[name].appendChild(new Option(value, value)); });
  });

  function filter() {
    shown = data.episodes.filter(function (episode) {
      return ["domain", "source", "outcome", "pick"].every(function (name) {
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
      item.appendChild(document.createTextNode(" " + episode.domain + ", " + episode.source + ", " + episode.turns.length + (episode.turns.length === 1 ? " turn" : " turns")));
      item.appendChild(element("span", "task", episode.task));
      item.addEventListener("click", function () { select(index); });
      list.appendChild(item);
    });
    select(shown.indexOf(current) >= 0 ? shown.indexOf(current) : 0);
  }

  function select(index) {
    current = shown[index] || null;
    Array.prototype.forEach.call(list.children, function (item, place) { item.setAttribute("aria-selected", String(place === index)); });
    if (list.children[index]) list.setAttribute("aria-activedescendant", "episode-" + index);
    else list.removeAttribute("aria-activedescendant");
    draw();
  }

  function showFacts() {
    facts.textContent = "";
    var rows = [["outcome", current.outcome], ["return", format(current.reward, 2)], ["turns", current.turns.length], ["tokens", current.ids.length],
      ["stop reason", current.stop], ["selected as", current.pick], ["policy", current.policy], ["episode", current.id]];
    Object.keys(current.terms).sort().forEach(function (name) { rows.push([name, format(current.terms[name], 2)]); });
    rows.forEach(function (row, place) {
      if (place) facts.appendChild(document.createTextNode("  ·  "));
      facts.appendChild(document.createTextNode(row[0] + " "));
      facts.appendChild(element("b", "", String(row[1])));
    });
  }

  function showChat() {
    var turn = 0;
    current.messages.forEach(function (message) {
      var box = element("div", "message " + (message[0] === "assistant" ? "assistant" : "other"));
      var title = { assistant: "policy", user: "environment", system: "system" }[message[0]] || message[0];
      if (message[0] === "assistant") {
        var facts = current.turns[turn++];
        if (facts) title += ", turn " + turn + (facts[0] ? "" : ", invalid action") + (facts[1] ? ", reward " + format(facts[1], 2) : "");
      }
      box.appendChild(element("b", "", title));
      box.appendChild(document.createTextNode(message[1]));
      content.appendChild(box);
    });
  }

  function swatch(tint, part, label) {
    var item = element("span"), colour = element("i");
    colour.style.background = "color-mix(in srgb, var(" + tint + ") " + part + "%, transparent)";
    item.appendChild(colour);
    item.appendChild(document.createTextNode(label));
    key.appendChild(item);
  }

  function showKey(limit) {
    if (view === "owner") OWNERS.forEach(function (owner, place) { if (current.owner.indexOf(place) >= 0) swatch(owner[1], 40, owner[0]); });
    if (view === "logprob") { swatch("--domain0", 8, "probability near 1"); swatch("--domain0", 45, "10 %"); swatch("--domain0", 90, "1 % or less"); }
    if (view === "advantage") { swatch("--sft", 70, "made more likely (up to +" + format(limit, 2) + ")"); swatch("--domain0", 70, "made less likely (down to −" + format(limit, 2) + ")"); }
  }

  function showTokens() {
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
      if (view === "owner") { span.style.setProperty("--tint", "var(" + OWNERS[owner][1] + ")"); span.style.setProperty("--part", "32%"); }
      if (view === "logprob" && owner === 1 && token.logprob !== null) {
        span.style.setProperty("--tint", "var(--domain0)");
        span.style.setProperty("--part", (8 + 82 * Math.min(1, -token.logprob / 4.6)).toFixed(0) + "%");
      }
      if (view === "advantage" && owner === 1 && token.advantage) {
        span.style.setProperty("--tint", token.advantage > 0 ? "var(--sft)" : "var(--domain0)");
        span.style.setProperty("--part", (10 + 65 * Math.abs(token.advantage) / limit).toFixed(0) + "%");
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
  }

  function explain(span) {
    if (!span) { tip.hidden = true; return; }
    var token = tokens[Number(span.dataset.token)];
    var lines = [JSON.stringify(data.vocabulary[token.id]) + "  (id " + token.id + ")", token.owner + (token.turn >= 0 ? ", turn " + (token.turn + 1) : "")];
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
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  content.addEventListener("mouseover", point);
  content.addEventListener("click", point);
  content.addEventListener("mouseleave", function () { tip.hidden = true; });
  content.addEventListener("keydown", function (event) {
    var move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") tip.hidden = true;
    if (!move || view === "chat" || !content.querySelector("[data-token]")) return;
    event.preventDefault();
    mark(marked + move);
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
  root.hidden = false;
  filter();
})();
