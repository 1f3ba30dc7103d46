// Code: the submitted program with the verdict of the tests; what changed since the last submission is marked.
(function () {
  "use strict";

  function program(action) {
    const blocks = action.match(/```[^\n]*\n[^]*?```/g);
    return blocks ? blocks[blocks.length - 1].replace(/^```[^\n]*\n/, "").replace(/```$/, "") : action;
  }

  const renderer = {
    name: "program",
    draw: function (episode, turn, element) {
      const step = episode.turns[turn], before = turn ? program(episode.turns[turn - 1].action).split("\n") : null, box = element("div", "program"), code = element("pre");
      program(step.action).split("\n").forEach(function (line) {
        const changed = before && before.indexOf(line) < 0;
        code.append(element("span", changed ? "changed" : "", (changed ? "+ " : before ? "  " : "") + line + "\n"));
      });
      const passed = /^passed/.test(step.observation);
      box.append(code, element("p", "ending " + (passed ? "success" : "failure"), (passed ? "✓ " : "✗ ") + (step.observation || "no verdict")));
      return box;
    }
  };
  viewer.renderer("code", renderer);
  viewer.renderer("code_folder", renderer);
})();
