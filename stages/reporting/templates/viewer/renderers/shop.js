// Shop: the page after the action: hits with their prices, or an item with its options, what is picked, and the goal.
viewer.renderer("shop", (function () {
  "use strict";

  function chips(element, name, values, kind) {
    const line = element("p", "chips");
    if (name) line.append(element("b", "", name), " ");
    values.forEach(function (value) { line.append(element("span", "chip " + kind, value), " "); });
    return line;
  }

  return {
    name: "page",
    draw: function (episode, turn, element) {
      const said = viewer.said(episode, turn).replace(/^Use: [^.]*\. /, ""), start = viewer.said(episode, -1);
      const goal = (/want [^]*$/.exec(said) || /want [^]*$/.exec(start) || [""])[0], text = said.replace(/ ?want [^]*$/, "");
      const box = element("div", "shop"), hits = text.replace(/\.$/, "").split("; ");
      box.append(element("p", "goal", goal));
      if (hits.length > 1 || /^\S+ .*\d$/.test(hits[0])) {
        const list = element("ul");
        hits.forEach(function (hit) {
          const parts = /^(.*?) (\d+(?:\.\d+)?)$/.exec(hit), line = element("li", "", parts ? parts[1] + " " : hit);
          if (parts) line.append(element("b", "", parts[2]));
          list.append(line);
        });
        if (text) box.append(list);
        return box;
      }
      text.split(/\.\s*/).filter(Boolean).forEach(function (part, place) {
        const words = part.split(" ");
        if (!place) box.append(element("p", "item", part));
        else if (words[0] === "picked") box.append(chips(element, "picked", words.slice(1), "picked"));
        else box.append(chips(element, words[0], words.slice(1), ""));
      });
      return box;
    }
  };
})());
