// The tabs, the address, and the view of episodes one by one.
(function () {
  "use strict";
  const panel = document.getElementById("view-episodes"), form = panel.querySelector("form"), count = panel.querySelector(".count");
  const list = viewer.listBox(panel.querySelector(".list"), row, choose);
  const episode = viewer.episodeView(panel.querySelector(".episode"), function (number) { turn = number; write(); });
  let turn = 0, asked = 0, waiting = 0;

  function row(item, entry) {
    item.append(page.element("span", "mark " + entry.outcome, page.MARKS[entry.outcome]), " " + entry.source + (entry.role ? ", " + entry.role : "") + ", " + entry.turns + (entry.turns === 1 ? " turn" : " turns") + (entry.refused ? ", " + entry.refused + " refused" : ""), page.element("span", "task", entry.domain + ": " + entry.task));
  }

  function values() {
    const given = {};
    viewer.filters.FIELDS.forEach(function (name) { given[name] = form.elements[name].value.trim(); });
    return given;
  }

  function write() {
    const given = values(), entry = list.current(), kept = {};
    viewer.filters.FIELDS.forEach(function (name) { if (name !== "term" || given.term_from !== "" || given.term_to !== "") kept[name === "source" && entry ? "by" : name] = given[name]; });
    if (entry) { kept.source = entry.source; kept.episode = entry.id; kept.turn = turn || ""; }
    history.replaceState(null, "", viewer.hash(kept));
  }

  function choose(entry) {
    turn = 0;
    episode.show(entry, 0);
    write();
  }

  // Share of each model's episodes that match, among those of the chosen domain.
  function shares(found, given) {
    const rows = viewer.index.groups.filter(function (group) { return !given.domain || group.domain === given.domain; }).map(function (group) {
      const own = found.filter(function (entry) { return entry.group === group; }).length;
      return [group.domain, group.source, own + " of " + group.entries.length, viewer.share(own, group.entries.length)];
    });
    const box = panel.querySelector(".shares div");
    box.textContent = "";
    box.appendChild(viewer.table(["domain", "played by", "episodes", "share (95 % interval)"], rows, 2));
  }

  function show(found, given, wanted) {
    const all = viewer.filters.order(given.source ? found.filter(function (entry) { return entry.source === given.source; }) : found, given.sort);
    count.textContent = all.length + " of " + viewer.entries.length + " episodes";
    count.dataset.ready = "yes";
    shares(found, given);
    const before = list.current(), entry = list.fill(all, wanted || before);
    if (wanted || entry !== before || !entry) episode.show(entry, turn);
  }

  // Applies the form; `wanted` is the entry to select, if it matches.
  function apply(wanted, keepAddress) {
    const given = values(), mine = ++asked, everyone = Object.assign({}, given, { source: "" });
    delete count.dataset.ready;
    const matching = viewer.entries.filter(function (entry) { return viewer.filters.matches(entry, everyone); });
    const done = function (found) { if (mine === asked) { show(found, given, wanted); if (!keepAddress) write(); } };
    if (!given.text) { done(matching); return; }
    try {
      viewer.filters.search(matching, given.text, function (read, all) { if (mine === asked) count.textContent = "searching: " + read + " of " + all + " files"; }).then(done);
    } catch (error) { count.textContent = "The regular expression is not valid: " + error.message; }
  }

  function follow(hash) {
    form.reset();
    viewer.filters.FIELDS.forEach(function (name) {
      const value = hash.get(name === "source" && hash.has("episode") ? "by" : name);
      if (value !== null) form.elements[name].value = value;
    });
    const id = hash.get("episode"), wanted = id === null ? null : viewer.find(hash.get("source"), id);
    turn = Number(hash.get("turn")) || 0;
    document.getElementById("trouble").hidden = true;
    if (id !== null && !wanted) viewer.trouble(new Error("There is no episode " + id + (hash.get("source") ? " of " + hash.get("source") : "") + " in this run."));
    if (wanted && !viewer.filters.matches(wanted, values())) form.reset();
    apply(wanted, true);
  }

  viewer.views.episodes = { follow: follow, step: list.step, turn: episode.step };

  // What the filters offer, and which tabs there are. Kept choices stay.
  function offer() {
    const FILTERS = { domain: viewer.domains, source: [], role: [], outcome: viewer.index.outcomes, stop: [], pattern: [] };
    viewer.index.groups.forEach(function (group) { FILTERS.source.push(group.source); FILTERS.role.push.apply(FILTERS.role, (group.roles || []).filter(Boolean)); FILTERS.stop.push.apply(FILTERS.stop, group.stops); FILTERS.pattern.push.apply(FILTERS.pattern, Object.keys(group.hits)); });
    FILTERS.pattern.sort(function (a, b) { return viewer.index.order.indexOf(a) - viewer.index.order.indexOf(b); });
    Object.keys(FILTERS).forEach(function (name) {
      const select = form.elements[name], before = select.value;
      while (select.options.length > 1) select.remove(1);
      viewer.option(select, viewer.unique(FILTERS[name]), name === "pattern" ? function (value) { return viewer.index.patterns[value].title; } : null);
      select.value = before;
      if (select.selectedIndex < 0) select.value = "";
    });
    form.elements.role.parentElement.hidden = !FILTERS.role.length;
    viewer.refill(form.elements.term, viewer.unique(["return"].concat(viewer.index.groups.flatMap(function (group) { return Object.keys(group.terms); }))));
    ["compare", "patterns", "paths"].forEach(function (name) { viewer.refill(document.querySelector("#view-" + name + " [name=domain]"), viewer.domains); });
    document.getElementById("total").textContent = viewer.entries.length ? viewer.entries.length.toLocaleString("en") + " episodes of " + viewer.domains.join(" and ") + ", token for token." : "What is training in this checkout.";
    tabs.forEach(function (tab) { tab.hidden = !viewer.views[tab.dataset.tab] || (!viewer.entries.length && tab.dataset.tab !== "live") || (tab.dataset.tab === "live" && !viewer.watched); });
  }
  form.addEventListener("change", function (event) { if (event.target !== form.elements.text) apply(); });
  form.elements.text.addEventListener("input", function () { clearTimeout(waiting); waiting = setTimeout(apply, 200); });
  form.elements.clear.addEventListener("click", function () { form.reset(); apply(); });
  form.addEventListener("submit", function (event) { event.preventDefault(); });

  // Tabs: the address names the view; arrow keys go from tab to tab.
  const tabs = Array.from(document.querySelectorAll("[role=tab]"));
  let open = "";

  function route() {
    const hash = new URLSearchParams(location.hash.slice(1));
    if (location.hash === "#main") return;
    open = viewer.views[hash.get("tab")] ? hash.get("tab") : viewer.index.live && !hash.has("episode") && !hash.has("source") ? "live" : "episodes";
    tabs.forEach(function (tab) {
      const mine = tab.dataset.tab === open;
      tab.setAttribute("aria-selected", String(mine));
      tab.tabIndex = mine ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !mine;
    });
    viewer.views[open].follow(hash);
  }

  tabs.forEach(function (tab) {
    tab.addEventListener("click", function () { location.hash = viewer.hash({ tab: tab.dataset.tab }); });
    tab.addEventListener("keydown", function (event) {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const there = tabs.filter(function (one) { return !one.hidden; }), next = there[(there.indexOf(tab) + move + there.length) % there.length];
      next.focus();
      next.click();
    });
  });

  document.addEventListener("keydown", function (event) {
    const view = viewer.views[open];
    if (event.target.closest("input, select, textarea, [role=tab]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      j: function () { view.step(1); }, k: function () { view.step(-1); },
      n: function () { view.turn(1); }, p: function () { view.turn(-1); },
      ArrowRight: function () { view.turn(1); }, ArrowLeft: function () { view.turn(-1); },
      d: function () { if (view.divergence) view.divergence(); },
      "/": function () { form.elements.text.focus(); }
    }[event.key];
    if (!act || (event.key !== "/" && !view.step)) return;
    event.preventDefault();
    act();
  });
  document.querySelectorAll("form").forEach(function (one) { one.addEventListener("submit", function (event) { event.preventDefault(); }); });
  window.addEventListener("hashchange", route);
  viewer.chosen = list.current;
  // New groups have arrived, or the page is now watched by the server: the list keeps its choice, an address that waited is followed.
  viewer.changed = function () {
    const chosen = list.current();
    offer();
    if (open === "episodes" && viewer.entries.length) { if (chosen && viewer.entries.indexOf(chosen) >= 0) apply(null, true); else route(); }
  };
  offer();
  route();
})();
