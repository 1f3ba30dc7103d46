// How often each pattern occurs, by source; each share leads to its episodes.
viewer.views.patterns = (function () {
  "use strict";
  const element = page.element, panel = document.getElementById("view-patterns"), form = panel.querySelector("form");
  const KINDS = { rollout: "on training tasks, before RL", training: "in a step of RL", panel: "on " + viewer.index.evaluated_on, kept: "on " + viewer.index.evaluated_on + ", kept run" };

  function bar(share, range) {
    const box = element("span", "share"), span = element("i"), dot = element("b");
    span.style.left = 100 * range[0] + "%";
    span.style.width = 100 * (range[1] - range[0]) + "%";
    dot.style.left = 100 * share + "%";
    box.append(span, dot);
    return box;
  }

  function draw() {
    const domain = form.elements.domain.value, groups = viewer.index.groups.filter(function (group) { return group.domain === domain; });
    const names = viewer.index.order.filter(function (name) { return groups.some(function (group) { return group.hits[name]; }); }), box = panel.querySelector(".table");
    box.textContent = "";
    names.forEach(function (name) {
      const pattern = viewer.index.patterns[name], rows = groups.map(function (group) {
        const count = Object.keys(group.hits[name] || {}).length, all = group.entries.length;
        const ends = (viewer.index.intervals[group.key] || {})[name] || [null, null], known = ends[0] !== null;
        const text = viewer.percent(count / all) + (known ? " (" + (100 * ends[0]).toFixed(1) + " to " + (100 * ends[1]).toFixed(1) + ")" : "");
        return [group.source, KINDS[group.kind], bar(count / all, known ? ends : [count / all, count / all]), viewer.link(count + " of " + all, { domain: domain, source: group.source, pattern: name }), text];
      });
      box.append(element("h3", "", pattern.title), element("p", "fine", pattern.about), viewer.table(["played by", "where", "", "episodes", "share (" + 100 * viewer.index.confidence + " % interval)"], rows, 3));
    });
    if (!names.length) box.appendChild(element("p", "note", "No pattern is looked for in this domain."));
  }

  viewer.option(form.elements.domain, viewer.domains);
  form.addEventListener("change", function () { history.replaceState(null, "", viewer.hash({ tab: "patterns", domain: form.elements.domain.value })); draw(); });
  return {
    follow: function (hash) {
      if (viewer.domains.indexOf(hash.get("domain")) >= 0) form.elements.domain.value = hash.get("domain");
      draw();
    }
  };
})();
