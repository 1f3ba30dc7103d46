// What is training now: curves and newest episodes, asked for every second or two, and pause, resume and stop. Only where the page
// comes from the server of `make ui` or `make serve`.
viewer.views.live = (function () {
  "use strict";
  const element = page.element, panel = document.getElementById("view-live"), box = panel.querySelector(".stages"), note = panel.querySelector(".count");
  const EVERY = 1500, WIDTH = 250, HEIGHT = 90, FIRST = ["success", "reward_mean", "loss", "kl", "entropy", "grad_norm", "turns", "tokens"];
  const SVG = "http://www.w3.org/2000/svg", drawn = {};
  let keys = "";

  function svg(name, given) {
    const made = document.createElementNS(SVG, name);
    Object.keys(given).forEach(function (key) { made.setAttribute(key, given[key]); });
    return made;
  }

  function short(value) { return Math.abs(value) >= 1000 || (value && Math.abs(value) < 0.001) ? value.toExponential(1) : String(Number(value.toPrecision(3))); }

  function curve(name, steps, values) {
    const points = steps.map(function (step, place) { return [step, values[place]]; }).filter(function (point) { return point[1] !== null && point[0] !== null; });
    if (!points.length) return null;
    const heights = points.map(function (point) { return point[1]; }), low = Math.min.apply(null, heights), high = Math.max.apply(null, heights), last = points[points.length - 1];
    const across = function (step) { return 4 + (WIDTH - 8) * (step - points[0][0]) / Math.max(1, last[0] - points[0][0]); }, up = function (value) { return HEIGHT - 6 - (HEIGHT - 12) * (high > low ? (value - low) / (high - low) : 0.5); };
    const figure = element("figure", "curve"), plot = svg("svg", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, role: "img", "aria-label": name + ": " + short(last[1]) + " at step " + last[0] + ", between " + short(low) + " and " + short(high) });
    plot.append(svg("path", { d: points.map(function (point, place) { return (place ? "L" : "M") + across(point[0]).toFixed(1) + " " + up(point[1]).toFixed(1); }).join(""), "class": "line" }), svg("circle", { cx: across(last[0]), cy: up(last[1]), r: 3.5, "class": "dot" }));
    const words = element("figcaption");
    words.append(element("b", "", name), " " + short(last[1]), element("span", "fine", " " + short(low) + " to " + short(high)));
    figure.append(words, plot);
    return figure;
  }

  function curves(into, history) {
    const names = Object.keys(history).filter(function (name) { return name !== "step"; });
    const first = FIRST.filter(function (name) { return names.indexOf(name) >= 0; }), others = names.filter(function (name) { return first.indexOf(name) < 0; });
    const folded = into.querySelector("details.others") || element("details", "others"), grid = element("div", "curves"), more = element("div", "curves");
    if (!folded.firstChild) folded.append(element("summary", "", "Other curves"), element("div", "inside"));
    first.forEach(function (name) { const made = curve(name, history.step, history[name]); if (made) grid.append(made); });
    if (folded.open) others.forEach(function (name) { const made = curve(name, history.step, history[name]); if (made) more.append(made); });
    folded.lastChild.replaceChildren(more);
    folded.hidden = !others.length;
    into.querySelector(".curves-here").replaceChildren(grid, folded);
  }

  function newest(into, stage) {
    const source = stage.sources[stage.sources.length - 1], group = viewer.index.groups.find(function (one) { return one.file && one.source === source; }), list = into.querySelector(".newest");
    list.hidden = !group;
    if (!group || list.dataset.key === group.key) return;
    list.dataset.key = group.key;
    const rows = element("ol");
    group.entries.slice(0, 12).forEach(function (entry) {
      const row = element("li"), link = viewer.link(entry.task, { source: entry.source, episode: entry.id });
      row.append(element("span", "mark " + entry.outcome, page.MARKS[entry.outcome]), link, " " + entry.turns + (entry.turns === 1 ? " turn" : " turns") + ", return " + page.format(entry.reward, 2));
      rows.append(row);
    });
    list.replaceChildren(element("h3", "", "Newest episodes"), rows, viewer.link("All " + group.entries.length + " that are kept of this step", { source: group.source }));
  }

  function ask(stage, wanted) {
    fetch("/live/request", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ title: stage, wanted: wanted }) }).then(function (answer) { return answer.json(); }).then(function (told) {
      note.textContent = told.error ? told.error : stage + " " + told.told + ".";
      look();
    }).catch(function () { note.textContent = "The server does not answer."; });
  }

  function frame(stage) {
    const made = element("section", "stage"), buttons = element("div", "buttons");
    made.dataset.title = stage.title;
    made.setAttribute("aria-label", stage.title);
    [["pause", "Pause"], ["resume", "Resume"], ["stop", "Stop after this step"]].forEach(function (one) {
      const button = element("button", "", one[1]);
      button.type = "button";
      button.dataset.wanted = one[0];
      button.addEventListener("click", function () { ask(stage.title, one[0]); });
      buttons.append(button);
    });
    const bar = element("progress");
    bar.setAttribute("aria-label", "steps of " + stage.title);
    made.append(element("h2", "", stage.title), element("p", "phase"), bar, buttons, element("ul", "notes"), element("div", "curves-here"), element("div", "newest"));
    return made;
  }

  function draw(stage) {
    const made = drawn[stage.title] = drawn[stage.title] || frame(stage), runs = stage.phase === "running" || stage.phase === "paused";
    made.querySelector(".phase").textContent = stage.phase + ", " + stage.label.replace("_", " ") + ", step " + stage.step + " of " + stage.total;
    made.dataset.phase = stage.phase;
    made.dataset.step = stage.step;
    const bar = made.querySelector("progress");
    bar.max = stage.total;
    bar.value = stage.step;
    made.querySelectorAll("[data-wanted]").forEach(function (button) {
      const fits = runs && (button.dataset.wanted === "stop" || (button.dataset.wanted === "resume") === (stage.phase === "paused"));
      if (!fits && document.activeElement === button) note.tabIndex = -1, note.focus();
      button.disabled = !fits;
    });
    made.querySelector(".notes").replaceChildren.apply(made.querySelector(".notes"), stage.notes.map(function (text) { return element("li", "", text); }));
    if (stage.history.step) curves(made, stage.history);
    newest(made, stage);
    return made;
  }

  // The groups of the newest steps replace earlier ones, except what is being read.
  function take(found) {
    const files = found.groups.map(function (group) { return group.file; }), read = viewer.chosen();
    viewer.index.groups.filter(function (group) { return group.file && files.indexOf(group.file) < 0 && !(read && read.group === group); }).forEach(viewer.drop);
    viewer.index.order = viewer.unique(viewer.index.order.concat(found.order));
    Object.assign(viewer.index.patterns, found.patterns);
    found.groups.forEach(function (group) { if (!viewer.index.groups.some(function (one) { return one.file === group.file; })) viewer.take(group, found.tasks); });
    viewer.domains.splice.apply(viewer.domains, [0, viewer.domains.length].concat(viewer.unique(viewer.index.groups.map(function (group) { return group.domain; }))));
    viewer.changed();
  }

  function show(state) {
    panel.querySelector(".waiting").hidden = state.stages.length > 0;
    const shown = state.stages.map(draw);
    if (shown.length !== box.children.length || shown.some(function (one, place) { return box.children[place] !== one; })) box.replaceChildren.apply(box, shown);
    panel.dataset.ready = "yes";
  }

  function look() {
    return fetch("/live/state.json").then(function (answer) { if (!answer.ok) throw new Error(answer.status); return answer.json(); }).then(function (state) {
      if (!viewer.watched) { viewer.watched = true; viewer.changed(); }
      const now = state.groups.join("\n");
      if (now === keys) { show(state); return null; }
      return fetch("/live/index.json").then(function (answer) { return answer.json(); }).then(function (found) { keys = now; take(found); show(state); });
    });
  }

  // Asks again and again while the page can be seen.
  function watch() {
    if (location.protocol.indexOf("http") !== 0) return;
    const traces = {};
    viewer.trace = function (entry) {
      const wanted = new URLSearchParams({ episode: entry.id, source: entry.source.replace(/, live$/, "") }).toString();
      traces[wanted] = traces[wanted] || fetch("/live/trace.json?" + wanted).then(function (answer) { return answer.ok ? answer.json() : {}; }).then(function (told) { return told.address; }).catch(function () { return null; });
      return traces[wanted];
    };
    const again = function () {
      if (document.hidden) { setTimeout(again, EVERY); return; }
      look().catch(function () { if (viewer.watched) note.textContent = "The server does not answer; trying again."; }).then(function () { setTimeout(again, viewer.watched ? EVERY : 10 * EVERY); });
    };
    again();
  }
  viewer.watch = watch;

  return { follow: function () {} };
})();
