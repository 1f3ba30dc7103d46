// Where the episodes of a task go: states as boxes, actions as lines, weighted by visits and value; what either side does alone or
// more often stands out.
viewer.views.paths = (function () {
  "use strict";
  const element = page.element, svg = viewer.svg, panel = document.getElementById("view-paths"), form = panel.querySelector("form");
  const frame = panel.querySelector(".graph"), card = panel.querySelector(".node"), key = panel.querySelector(".key"), text = panel.querySelector(".outline-text div"), verdict = panel.querySelector(".verdict");
  const WIDE = 184, HIGH = 92, BOX = 146, TALL = 68, SHADE = 26, EVERYONE = "everyone", SIDES = ["left", "right"];
  let graph = null, current = null, tasks = [], valued = false;

  function groups(side) {
    const domain = form.elements.domain.value, name = form.elements[side === "left" ? "a" : "b"].value;
    return viewer.index.groups.filter(function (group) { return group.domain === domain && (name === EVERYONE || group.source === name); });
  }

  function of(side, task) {
    return groups(side).flatMap(function (group) { return group.entries.filter(function (entry) { return entry.acts && entry.task === task; }); });
  }

  function solved(entries) { return entries.filter(function (entry) { return entry.outcome === "success"; }).length; }

  // Tasks that both sides play, those whose success differs most first.
  function listTasks(wanted) {
    const found = {};
    SIDES.forEach(function (side) {
      groups(side).forEach(function (group) {
        group.entries.filter(function (entry) { return entry.acts; }).forEach(function (entry) {
          const one = found[entry.task] = found[entry.task] || { left: [], right: [] };
          one[side].push(entry);
        });
      });
    });
    const names = Object.keys(found), both = names.filter(function (name) { return found[name].left.length && found[name].right.length; });
    const gain = function (name) { return found[name].left.length && found[name].right.length ? solved(found[name].right) / found[name].right.length - solved(found[name].left) / found[name].left.length : 0; };
    tasks = (both.length ? both : names).sort(function (x, y) { return Math.abs(gain(y)) - Math.abs(gain(x)) || found[y].left.length + found[y].right.length - found[x].left.length - found[x].right.length || (x < y ? -1 : 1); });
    viewer.refill(form.elements.task, tasks, function (name) {
      return name + ": solved by left " + solved(found[name].left) + " of " + found[name].left.length + ", right " + solved(found[name].right) + " of " + found[name].right.length;
    });
    if (tasks.indexOf(wanted) >= 0) form.elements.task.value = wanted;
  }

  function add(nodes, name, label) {
    if (!nodes[name]) nodes[name] = { name: name, label: label, visits: { left: 0, right: 0 }, through: { left: [], right: [] }, out: {}, depth: Infinity, answer: "", value: undefined };
    return nodes[name];
  }

  // Nodes are states and ends; an edge is an action between two of them, with its visits on each side.
  function build(episodes) {
    const nodes = {};
    let start = null;
    episodes.forEach(function (one) {
      const side = one.side, shown = one.shown, seen = {};
      shown.turns.forEach(function (step, place) {
        const from = add(nodes, step.state, place ? "" : "start"), next = shown.turns[place + 1], end = "end " + shown.entry.outcome;
        if (!place) { start = from; from.label = "start"; from.answer = viewer.said(shown, -1); }
        const to = add(nodes, next ? next.state : end, next ? "" : page.MARKS[shown.entry.outcome] + " " + shown.entry.outcome);
        const name = step.action + "\n" + to.name, edge = from.out[name] = from.out[name] || { from: from, to: to, action: step.action, visits: { left: 0, right: 0 }, credits: [] };
        edge.visits[side]++;
        if (step.credit !== undefined) edge.credits.push(step.credit);
        from.value = step.value;
        to.answer = to.answer || step.observation;
        [from].concat(next ? [] : [to]).forEach(function (node) {
          node.visits[side]++;
          if (!seen[node.name]) { seen[node.name] = true; node.through[side].push(shown.entry); }
        });
      });
    });
    const given = Object.keys(nodes).map(function (name) { return nodes[name].value; }).filter(function (value) { return value !== undefined; });
    return { nodes: nodes, start: start, least: Math.min.apply(null, given), most: Math.max.apply(null, given), valued: given.length > 0, episodes: episodes };
  }

  function edges(node) { return Object.keys(node.out).map(function (name) { return node.out[name]; }).sort(function (x, y) { return total(y) - total(x) || (x.action < y.action ? -1 : 1); }); }

  // The edges of a node with one line for all actions that lead to the same place.
  function ways(node) {
    const to = {};
    edges(node).forEach(function (edge) {
      const way = to[edge.to.name] = to[edge.to.name] || { from: node, to: edge.to, action: [], visits: { left: 0, right: 0 } };
      way.action.push(edge.action);
      SIDES.forEach(function (side) { way.visits[side] += edge.visits[side]; });
    });
    return Object.keys(to).map(function (name) { return to[name]; });
  }

  function total(one) { return one.visits.left + one.visits.right; }

  // Layers by the fewest actions from the start, ends in a layer of their own; within a layer, by the mean place of what leads there.
  function place(built) {
    const layers = [[built.start]], ends = [];
    built.start.depth = 0;
    for (let depth = 0; layers[depth]; depth++) {
      layers[depth].forEach(function (node) {
        edges(node).forEach(function (edge) {
          const to = edge.to;
          to.by = to.by || edge;
          if (/^end /.test(to.name)) { if (ends.indexOf(to) < 0) ends.push(to); return; }
          if (to.depth === Infinity) { to.depth = depth + 1; (layers[depth + 1] = layers[depth + 1] || []).push(to); }
        });
      });
    }
    if (ends.length) { ends.sort(function (x, y) { return x.name < y.name ? 1 : -1; }); ends.forEach(function (node) { node.depth = layers.length; }); layers.push(ends); }
    const most = Math.max.apply(null, layers.map(function (layer) { return layer.length; }));
    layers.forEach(function (layer, depth) {
      layer.forEach(function (node, row) { node.x = depth * WIDE + WIDE / 2; node.y = (row + (most - layer.length) / 2) * HIGH + HIGH / 2 + 18; });
    });
    return { layers: layers, width: layers.length * WIDE, height: most * HIGH + 44 };
  }

  function sideOf(one) { return one.visits.left && one.visits.right ? "both" : one.visits.left ? "left" : "right"; }

  function share(entries) { return entries.length ? solved(entries) / entries.length : null; }

  function percents(node) { return SIDES.map(function (side) { const found = share(node.through[side]); return found === null ? "–" : viewer.percent(found); }); }

  // Who takes it more often, from -1 (the left alone) to 1 (the right alone), by shares of each side's episodes.
  function shift(edge) {
    const rates = SIDES.map(function (side) { return edge.visits[side] / Math.max(1, graph.count[side]); });
    return (rates[1] - rates[0]) / (rates[1] + rates[0]);
  }

  function credit(edge) { return edge.credits.length ? viewer.signed(edge.credits.reduce(function (sum, one) { return sum + one; }, 0) / edge.credits.length, 2) : "–"; }

  function value(node) { return node.value === undefined ? "–" : page.format(node.value, 2); }

  function line(edge) {
    const a = edge.from, b = edge.to, width = 1 + 2.2 * Math.sqrt(total(edge)), made = { "class": "edge " + sideOf(edge), "stroke-width": width.toFixed(1) }, to = shift(edge);
    if (sideOf(edge) === "both") made.style = "stroke: color-mix(in srgb, var(" + (to < 0 ? "--domain0" : "--sft") + ") " + Math.round(100 * Math.abs(to)) + "%, var(--base))";
    if (a === b) made.d = "M" + (a.x - 18) + " " + (a.y - TALL / 2) + "c-12 -22 48 -22 36 0";
    else if (b.depth > a.depth) made.d = "M" + (a.x + BOX / 2) + " " + a.y + "C" + (a.x + WIDE / 2) + " " + a.y + " " + (b.x - WIDE / 2) + " " + b.y + " " + (b.x - BOX / 2) + " " + b.y;
    else made.d = "M" + a.x + " " + (a.y + TALL / 2) + "C" + a.x + " " + (a.y + TALL) + " " + b.x + " " + (b.y + TALL) + " " + b.x + " " + (b.y + TALL / 2);
    const path = svg("path", made);
    path.appendChild(svg("title", {}, edge.action.join(" / ") + ": left " + edge.visits.left + ", right " + edge.visits.right));
    return path;
  }

  function box(node) {
    const group = svg("g", { "class": "state " + sideOf(node), "data-state": node.name });
    group.appendChild(svg("title", {}, node.answer));
    const back = { x: node.x - BOX / 2, y: node.y - TALL / 2, width: BOX, height: TALL, rx: 8, "class": "back" };
    if (node.value !== undefined) back.style = "fill: color-mix(in srgb, var(--domain1) " + Math.round(SHADE * (node.value - graph.least) / Math.max(1e-9, graph.most - graph.least)) + "%, var(--surface))";
    group.appendChild(svg("rect", back));
    // Success of the episodes through here, the left above the right.
    SIDES.forEach(function (side, number) {
      const found = share(node.through[side]), bar = { x: node.x - BOX / 2 + 8, y: node.y + TALL / 2 - 15 + 7 * number, height: 4 };
      if (found === null) return;
      group.appendChild(svg("rect", Object.assign({ width: BOX - 16, "class": "all" }, bar)));
      group.appendChild(svg("rect", Object.assign({ width: (BOX - 16) * found, "class": "solved " + side }, bar)));
    });
    const title = node.label || node.by.action, lines = [title.length > 18 ? title.slice(0, 17) + "…" : title, node.visits.left + " | " + node.visits.right + " visits" + (node.value === undefined ? "" : ", value " + value(node))];
    lines.forEach(function (words, number) { group.appendChild(svg("text", { x: node.x, y: node.y - 15 + 17 * number, "text-anchor": "middle", "class": number ? "inside" : "name" }, words)); });
    return group;
  }

  function drawGraph(placed) {
    const picture = svg("svg", { viewBox: "0 0 " + placed.width + " " + placed.height, width: placed.width, height: placed.height, "class": "paths", role: "img", "aria-label": "Graph of the paths; the table below has the same content" });
    const all = placed.layers.flat();
    all.forEach(function (node) { ways(node).forEach(function (way) { picture.appendChild(line(way)); }); });
    all.forEach(function (node) { picture.appendChild(box(node)); });
    frame.textContent = "";
    frame.appendChild(picture);
  }

  const HEADER = ["action", "leads to", "visits, left", "visits, right", "solved, left", "solved, right", "value there", "step credit"];

  function cells(edge) {
    const to = edge.to === edge.from ? "the same state" : edge.to.label || edge.to.answer;
    return [edge.action || "(empty)", to, String(edge.visits.left), String(edge.visits.right)].concat(percents(edge.to), [value(edge.to), credit(edge)]);
  }

  // What changed, in a sentence for each side and one for the states.
  function compare(built) {
    const told = SIDES.map(function (side, number) {
      const own = built.episodes.filter(function (one) { return one.side === side; }), turns = own.reduce(function (sum, one) { return sum + one.shown.turns.length; }, 0);
      return form.elements[number ? "b" : "a"].value + " (" + side + ") solves " + solved(own.map(function (one) { return one.shown.entry; })) + " of " + own.length + (own.length ? " in " + (turns / own.length).toFixed(1) + " turns on average" : "");
    });
    const states = Object.keys(built.nodes).map(function (name) { return built.nodes[name]; }).filter(function (node) { return !/^end /.test(node.name); });
    const number = function (side) { return states.filter(function (node) { return sideOf(node) === side; }).length; };
    return told.join("; ") + ". " + number("both") + " states are visited by both, " + number("left") + " by the left alone, " + number("right") + " by the right alone.";
  }

  function drawTable(placed) {
    const rows = placed.layers.flat().flatMap(function (node) {
      return edges(node).map(function (edge) { return [node.label || node.by.action].concat(cells(edge)); });
    });
    text.textContent = "";
    text.appendChild(viewer.table(["after"].concat(HEADER), rows, 3));
  }

  function select(node) {
    current = node;
    frame.querySelectorAll(".state").forEach(function (one) { one.classList.toggle("chosen", one.dataset.state === node.name); });
    const found = frame.querySelector(".chosen");
    frame.setAttribute("aria-label", "Graph of paths; chosen: " + (node.label || node.by.action));
    // The frame scrolls, never the page.
    frame.scrollLeft = Math.max(0, Number(node.x) - frame.clientWidth / 2);
    if (found) frame.dataset.chosen = node.name;
    card.textContent = "";
    card.append(element("h4", "", node.label || "After " + node.by.action), element("p", "answer", node.answer));
    if (node.value !== undefined) card.append(element("p", "", "Learnt value: " + value(node)));
    SIDES.forEach(function (side) {
      const entries = node.through[side], part = element("p");
      if (!entries.length) return;
      part.append(element("b", "", side + " "), solved(entries) + " of " + entries.length + " episodes through here succeed: ");
      entries.slice(0, 8).forEach(function (entry, number) { part.append(number ? ", " : "", viewer.link(entry.source + " " + entry.attempt + " " + page.MARKS[entry.outcome], { source: entry.source, episode: entry.id })); });
      card.append(part);
    });
    const next = edges(node).map(cells);
    if (next.length) card.append(viewer.table(HEADER, next, 2));
  }

  function near(move) {
    const layer = graph.layers[current.depth], row = layer.indexOf(current);
    if (move === "ArrowDown" || move === "ArrowUp") return layer[row + (move === "ArrowDown" ? 1 : -1)];
    if (move === "Home") return graph.layers[0][0];
    if (move === "ArrowRight") { const further = edges(current).find(function (edge) { return edge.to.depth > current.depth; }); return further && further.to; }
    return current.by && current.by.from;
  }

  function write() {
    history.replaceState(null, "", viewer.hash({ tab: "paths", domain: form.elements.domain.value, a: form.elements.a.value, b: form.elements.b.value, task: form.elements.task.value }));
  }

  function show() {
    const task = form.elements.task.value, chosen = { left: of("left", task), right: of("right", task) };
    delete frame.dataset.ready;
    const wanted = SIDES.flatMap(function (side) { return chosen[side].map(function (entry) { return { side: side, entry: entry }; }); });
    Promise.all(wanted.map(function (one) { return viewer.load(one.entry.group).then(function (data) { return { side: one.side, shown: viewer.episode(one.entry, data) }; }); })).then(function (episodes) {
      if (form.elements.task.value !== task) return;
      const built = build(episodes);
      frame.textContent = card.textContent = text.textContent = verdict.textContent = "";
      graph = built.start && Object.assign(place(built), { least: built.least, most: built.most, count: { left: chosen.left.length, right: chosen.right.length } });
      valued = built.valued;
      showKey();
      if (!graph) { frame.appendChild(element("p", "note", "No episode of this task has a turn.")); return; }
      verdict.textContent = compare(built);
      drawGraph(graph);
      drawTable(graph);
      select(built.start);
      frame.dataset.ready = task;
    });
  }

  function showKey() {
    key.textContent = "";
    [["left", "only " + form.elements.a.value + " (left)"], ["right", "only " + form.elements.b.value + " (right)"], ["both", "both, tinted towards who goes there more often"]].forEach(function (one) {
      const item = element("span"), picture = svg("svg", { width: 34, height: 10, "class": "paths", "aria-hidden": "true" });
      picture.appendChild(svg("path", { d: "M0 5H34", "class": "edge " + one[0], "stroke-width": 4 }));
      item.append(picture, " " + one[1]);
      key.appendChild(item);
    });
    key.append(element("span", "", "Boxes: the action that leads there, visits of left | right" + (valued ? ", the learnt value (the greener, the higher)" : "") + ", and as bars the share of each side's episodes through it that succeed, the left above the right. Lines grow with visits. Arrow keys go through the graph, j and k through the tasks."));
  }

  function sources(domain, a, b) {
    const own = viewer.index.groups.filter(function (group) { return group.domain === domain; }).map(function (group) { return group.source; }), names = own.concat(EVERYONE);
    const has = function (name, other) { return names.indexOf(name) >= 0 ? name : other; };
    ["a", "b"].forEach(function (name) { viewer.refill(form.elements[name], names); });
    form.elements.a.value = has(a, has("sft", names[0]));
    form.elements.b.value = has(b, has("rl@" + domain, names[names.length - 1]));
  }

  function apply(task) {
    listTasks(task);
    show();
  }

  function follow(hash) {
    const domain = viewer.domains.indexOf(hash.get("domain")) >= 0 ? hash.get("domain") : form.elements.domain.value, task = hash.get("task");
    form.elements.domain.value = domain;
    let a = hash.get("a") || form.elements.a.value, b = hash.get("b") || form.elements.b.value;
    const plays = function (name) { return viewer.index.groups.some(function (group) { return group.domain === domain && group.source === name && group.entries.some(function (entry) { return entry.task === task; }); }); };
    // A task of training is not on the panel: then all who play it, on both sides.
    if (task && !hash.get("a") && (!plays(a || "sft") || !plays(b || "rl@" + domain))) {
      const those = viewer.index.groups.filter(function (group) { return group.domain === domain && plays(group.source); });
      a = those.length ? those[0].source : a;
      b = those.length ? those[those.length - 1].source : b;
    }
    sources(domain, a, b);
    apply(task || form.elements.task.value);
  }

  frame.addEventListener("keydown", function (event) {
    if (!graph || ["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home"].indexOf(event.key) < 0) return;
    event.preventDefault();
    event.stopPropagation();
    const to = near(event.key);
    if (to) select(to);
  });
  frame.addEventListener("click", function (event) {
    const hit = event.target.closest("[data-state]");
    if (hit) select(graph.layers.flat().find(function (node) { return node.name === hit.dataset.state; }));
  });
  viewer.option(form.elements.domain, viewer.domains);
  form.addEventListener("change", function (event) {
    if (event.target === form.elements.domain) sources(form.elements.domain.value, form.elements.a.value, "");
    if (event.target === form.elements.task) show(); else apply(form.elements.task.value);
    write();
  });

  return {
    follow: follow,
    step: function (move) {
      const to = tasks[tasks.indexOf(form.elements.task.value) + move];
      if (to) { form.elements.task.value = to; show(); write(); }
    },
    turn: function (move) { const to = graph && near(move > 0 ? "ArrowRight" : "ArrowLeft"); if (to) select(to); }
  };
})();
