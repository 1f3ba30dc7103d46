(function () {
  "use strict";
  var root = document.getElementById("tree-viewer"), trees = JSON.parse(document.getElementById("tree-data").textContent);
  var outline = root.querySelector(".outline"), panel = root.querySelector(".node"), pick = root.querySelector("select");
  var element = page.element, format = page.format;
  var tree, children, open, current, rows, role, onPath;

  root.querySelector("[data-left]").textContent = page.LEFT;
  trees.forEach(function (one, place) {
    pick.appendChild(new Option(one.domain + ": " + one.task + ", " + one.nodes.length + " nodes, " + one.pairs.length + (one.pairs.length === 1 ? " pair" : " pairs") + " (" + one.pick + ")", place));
  });

  function load(place) {
    tree = trees[place];
    children = tree.nodes.map(function () { return []; });
    tree.nodes.forEach(function (node, number) { if (number) children[node.parent].push(number); });
    children.forEach(function (below) { below.sort(function (a, b) { return tree.nodes[b].N - tree.nodes[a].N || a - b; }); });
    role = {};
    tree.pairs.forEach(function (pair) { role[pair[0]] = (role[pair[0]] || 0) | 1; role[pair[1]] = (role[pair[1]] || 0) | 2; });
    onPath = {};
    tree.path.forEach(function (number) { onPath[number] = true; });
    root.querySelector(".summary").textContent = tree.summary;
    root.querySelector(".hides").hidden = !tree.nodes.some(function (node) { return node.hides !== undefined; });
    root.querySelectorAll("[data-word]").forEach(function (place) { place.textContent = tree.words[place.dataset.word]; });
    current = 0;
    unfold("path");
  }

  function above(number) {
    for (var at = tree.nodes[number].parent; at >= 0; at = tree.nodes[at].parent) open[at] = true;
  }

  function unfold(what) {
    open = {};
    if (what === "all") tree.nodes.forEach(function (node, number) { open[number] = true; });
    if (what === "path") tree.path.forEach(above);
    if (what === "pairs") tree.pairs.forEach(function (pair) { above(pair[0]); above(pair[1]); });
    open[0] = true;
    if (what === "pairs" && tree.pairs.length && !role[current]) current = tree.pairs[0][0];
    draw();
  }

  function row(number, level, place, count) {
    var node = tree.nodes[number], made = element("div", "row" + (onPath[number] ? " way" : "") + (node.N ? "" : " unvisited"));
    var many = children[number].length;
    made.id = "tree-node-" + number;
    made.dataset.node = number;
    made.setAttribute("role", "treeitem");
    made.setAttribute("aria-level", level + 1);
    made.setAttribute("aria-posinset", place + 1);
    made.setAttribute("aria-setsize", count);
    made.setAttribute("aria-selected", String(number === current));
    if (many) made.setAttribute("aria-expanded", String(Boolean(open[number])));
    var name = element("span", "name");
    name.style.paddingLeft = level * 1.1 + "rem";
    name.appendChild(element("span", "fold", many ? (open[number] ? "▾" : "▸") : ""));
    if (node.end) name.appendChild(element("span", "mark " + node.end, page.MARKS[node.end]));
    if (node.hides !== undefined) name.appendChild(element("span", "mark", "◌"));
    if (role[number] & 1) name.appendChild(element("span", "win", "▲"));
    if (role[number] & 2) name.appendChild(element("span", "lose", "▼"));
    name.appendChild(element("span", "action", number ? node.action || "(empty)" : "start"));
    if (many && !open[number]) name.appendChild(element("span", "more", " +" + many));
    made.appendChild(name);
    var bar = element("span", "q"), fill = element("span");
    var share = node.Q === undefined ? 0 : (node.Q - tree.range[0]) / (tree.range[1] - tree.range[0]);
    fill.style.width = 100 * Math.max(0, Math.min(1, share)) + "%";
    bar.appendChild(fill);
    made.appendChild(bar);
    made.appendChild(element("span", "number", node.Q === undefined ? "–" : format(node.Q, 2)));
    made.appendChild(element("span", "number", String(node.N)));
    made.appendChild(element("span", "number", node.prior === undefined ? (number ? "–" : "") : format(100 * node.prior, 0) + " %"));
    return made;
  }

  function draw() {
    outline.textContent = "";
    rows = [];
    var head = element("div", "head");
    ["action", "", "Q", "N", "P"].forEach(function (title) { head.appendChild(element("span", title.length === 1 ? "number" : "", title)); });
    outline.appendChild(head);
    (function add(siblings, level) {
      siblings.forEach(function (number, place) {
        outline.appendChild(row(number, level, place, siblings.length));
        rows.push(number);
        if (open[number]) add(children[number], level + 1);
      });
    })([0], 0);
    outline.setAttribute("aria-activedescendant", "tree-node-" + current);
    show();
  }

  function select(number, reveal) {
    current = number;
    if (reveal) above(number);
    draw();
    document.getElementById("tree-node-" + number).scrollIntoView({ block: "nearest", behavior: "instant" });
  }

  function toggle(number) {
    if (!children[number].length) return;
    open[number] = !open[number];
    draw();
  }

  function fact(list, name, value) {
    if (value === undefined || value === null) return;
    list.appendChild(element("dt", "", name));
    list.appendChild(element("dd", "", value));
  }

  function link(number, text) {
    var button = element("button", "jump", text);
    button.type = "button";
    button.addEventListener("click", function () { select(number, true); });
    return button;
  }

  function pathTo(number) {
    var steps = [];
    for (; number > 0; number = tree.nodes[number].parent) steps.unshift(number);
    return steps;
  }

  function show() {
    var node = tree.nodes[current], facts = element("dl"), steps = pathTo(current), left = {};
    panel.textContent = "";
    steps.forEach(function (step, place) { if (tree.nodes[step].hides !== undefined) left[tree.nodes[step].hides] = place + 1; });
    panel.appendChild(element("h4", "", current ? node.action || "(empty)" : "Start of the task"));
    if (steps.length > 1) {
      var way = element("p", "crumbs", "after ");
      steps.slice(0, -1).forEach(function (step, place) {
        if (place) way.appendChild(document.createTextNode(" → "));
        way.appendChild(link(step, tree.nodes[step].action));
        if (left[step]) way.append(" (observation ", page.left(left[step]), ")");
      });
      panel.appendChild(way);
    }
    if (node.end) panel.appendChild(element("p", "ending " + node.end, { success: "✓ success", failure: "✗ failure", truncated: "… truncated by a limit" }[node.end]));
    fact(facts, "visits N", String(node.N));
    if (node.Q !== undefined) fact(facts, "value Q", format(node.Q, 3) + " (" + tree.words.scale + ")");
    if (node.q !== undefined) fact(facts, "label q", format(node.q, 3) + (node.advantage === undefined ? "" : ", " + (node.advantage < 0 ? "−" : "+") + Math.abs(node.advantage).toFixed(3) + " vs. the previous state"));
    if (node.rollouts) fact(facts, "policy rollouts", node.right + " of " + node.rollouts + " succeed" + (node.error ? " (standard error " + format(node.error, 2) + ")" : ""));
    if (node.logprob !== undefined) fact(facts, "prior P", (node.prior === undefined ? "only action tried" : format(100 * node.prior, 0) + " % of " + children[node.parent].length + " tried") + "; log-probability " + format(node.logprob, 2) + " per token");
    if (node.model !== undefined) fact(facts, "value model", format(node.model, 3));
    if (node.process !== undefined) fact(facts, "process value", format(node.process, 3));
    if (node.away !== undefined) fact(facts, "nearest success", node.away === 1 ? "1 action away" : node.away + " actions away");
    if (node.reward !== undefined) fact(facts, "reward", format(node.reward, 2));
    panel.appendChild(facts);
    if (node.answer) {
      panel.appendChild(element("h5", "", current ? "Observation" : "Prompt"));
      panel.appendChild(element("p", "answer", node.answer));
      tree.nodes.forEach(function (other, number) {
        if (other.hides !== current) return;
        var line = element("p", "pair");
        line.append(page.left(pathTo(number).length), " in the branch of ", link(number, other.action || "(empty)"));
        panel.appendChild(line);
      });
    }
    var mine = tree.pairs.filter(function (pair) { return pair[0] === current || pair[1] === current; });
    if (mine.length) panel.appendChild(element("h5", "", "Pairs"));
    mine.forEach(function (pair) {
      var won = pair[0] === current, other = won ? pair[1] : pair[0], line = element("p", "pair");
      line.appendChild(element("span", won ? "win" : "lose", won ? "▲ preferred to " : "▼ rejected for "));
      line.appendChild(link(other, tree.nodes[other].action || "(empty)"));
      line.appendChild(document.createTextNode(", q " + format(node.q, 2) + " vs. " + format(tree.nodes[other].q, 2) + ", margin " + format(pair[2], 2) + ", weight " + format(pair[3], 2)));
      panel.appendChild(line);
    });
  }

  outline.addEventListener("click", function (event) {
    var hit = event.target.closest(".row");
    if (!hit) return;
    var number = Number(hit.dataset.node);
    if (event.target.closest(".fold, .more")) { current = number; toggle(number); } else select(number);
  });
  outline.addEventListener("dblclick", function (event) {
    var hit = event.target.closest(".row");
    if (hit && !event.target.closest(".fold, .more")) toggle(Number(hit.dataset.node));
  });
  outline.addEventListener("keydown", function (event) {
    var at = rows.indexOf(current), many = children[current].length, to;
    if (event.key === "ArrowDown") to = rows[at + 1];
    else if (event.key === "ArrowUp") to = rows[at - 1];
    else if (event.key === "Home") to = rows[0];
    else if (event.key === "End") to = rows[rows.length - 1];
    else if (event.key === "ArrowRight") { if (many && !open[current]) { event.preventDefault(); toggle(current); return; } to = many ? children[current][0] : undefined; }
    else if (event.key === "ArrowLeft") { if (many && open[current]) { event.preventDefault(); toggle(current); return; } to = current ? tree.nodes[current].parent : undefined; }
    else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(current); return; }
    else return;
    event.preventDefault();
    if (to !== undefined) select(to);
  });
  pick.addEventListener("change", function () { load(Number(pick.value)); });
  root.querySelector("form").addEventListener("submit", function (event) { event.preventDefault(); });
  Array.prototype.forEach.call(root.querySelectorAll("[data-unfold]"), function (button) {
    button.addEventListener("click", function () { unfold(button.dataset.unfold); });
  });
  root.hidden = false;
  load(0);
})();
