// Wordle: the board. Marks have a colour and a sign: ✓ in its place, ~ elsewhere in the word, · not in the word.
viewer.renderer("wordle", (function () {
  "use strict";
  const SIGNS = { here: "✓", "in": "~", not: "·" };

  function rows(episode, last) {
    const found = [];
    for (let turn = 0; turn <= last; turn++) {
      const step = episode.turns[turn], marks = step.observation.split(".")[0].trim().split(/\s+/), letters = step.action.trim().split(/\s+/);
      if (/^solved/.test(step.observation)) found.push(letters.map(function (letter) { return [letter, "here"]; }));
      else if (!step.accepted) found.push(letters.map(function (letter) { return [letter, "illegal"]; }));
      else found.push(letters.map(function (letter, place) { return [letter, marks[2 * place + 1] || "not"]; }));
    }
    return found;
  }

  return {
    name: "board",
    draw: function (episode, turn, element) {
      const board = element("div", "board");
      rows(episode, turn).forEach(function (row) {
        const line = element("div", "line");
        row.forEach(function (tile) {
          const box = element("span", "tile " + tile[1], tile[0]);
          box.append(element("i", "", SIGNS[tile[1]] || "✗"));
          box.title = { here: "in its place", "in": "elsewhere in the word", not: "not in the word", illegal: "no word of the list" }[tile[1]] || "";
          line.append(box);
        });
        board.append(line);
      });
      return board;
    }
  };
})());
