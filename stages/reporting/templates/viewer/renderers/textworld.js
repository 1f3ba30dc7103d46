// TextWorld: the rooms that the agent has seen so far, placed by compass, with what it saw in them and what it holds.
viewer.renderer("textworld", (function () {
  "use strict";
  const MOVES = { north: [0, -1], south: [0, 1], east: [1, 0], west: [-1, 0] };

  function things(text) {
    const found = [];
    text.replace(/there is (?:a|an) (?:(?:closed|open) )?(\w+) here/g, function (_, thing) { found.push(thing); });
    text.replace(/the \w+ (?:holds|contains) ([^.]*)\./g, function (_, list) { list.replace(/\ban? (\w+)/g, function (__, thing) { found.push(thing); }); });
    text.replace(/there is ((?:an? \w+(?:,| and)? ?)+)on the floor/g, function (_, list) { list.replace(/\ban? (\w+)/g, function (__, thing) { found.push(thing); }); });
    return found;
  }

  function free(rooms, x, y) { return !Object.keys(rooms).some(function (name) { return rooms[name].x === x && rooms[name].y === y; }); }

  function walk(episode, last) {
    const rooms = {}, links = [], held = [];
    let here = null;
    for (let turn = -1; turn <= last; turn++) {
      const text = viewer.said(episode, turn), action = turn < 0 ? "" : episode.turns[turn].action.trim(), entered = /you are in the (\w+)\./.exec(text);
      const taken = /^you (?:take|pick up) the (\w+)/.exec(text), left = /^you (?:put|drop|insert|eat) the (\w+)/.exec(text);
      if (taken) held.push(taken[1]);
      if (left && held.indexOf(left[1]) >= 0) held.splice(held.indexOf(left[1]), 1);
      if (!entered) continue;
      const name = entered[1], step = MOVES[action.replace(/^go /, "")];
      if (!rooms[name]) {
        let x = here && step ? rooms[here].x + step[0] : 0, y = here && step ? rooms[here].y + step[1] : 0;
        while (!free(rooms, x, y)) { x += step ? step[0] || 0 : 1; y += step ? step[1] || 0 : 0; }
        rooms[name] = { x: x, y: y, lines: [], seen: true };
      }
      if (here && here !== name && !links.some(function (ends) { return ends.indexOf(here) >= 0 && ends.indexOf(name) >= 0; })) links.push([here, name]);
      rooms[name].lines = things(text);
      here = name;
    }
    return { rooms: rooms, links: links, here: here, held: held };
  }

  return {
    name: "map",
    draw: function (episode, turn, element) {
      const seen = walk(episode, turn), box = element("div");
      if (seen.here) box.append(viewer.map(seen.rooms, seen.links, seen.here, "Map of " + Object.keys(seen.rooms).join(", ") + "; the agent is in " + seen.here));
      box.append(element("p", "fine", (seen.held.length ? "holds " + seen.held.join(", ") + ". " : "") + viewer.said(episode, turn)));
      return box;
    }
  };
})());
