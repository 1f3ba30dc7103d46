// Keydoor: the rooms from left to right in the order of their distance; dashed ones are known but were not entered.
viewer.renderer("keydoor", (function () {
  "use strict";

  function room(rooms, name, from) {
    if (!rooms[name]) {
      const x = from ? rooms[from].x + 1 : 0, column = Object.keys(rooms).filter(function (other) { return rooms[other].x === x; }).length;
      rooms[name] = { x: x, y: column, lines: [], seen: false };
    }
    return rooms[name];
  }

  function walk(episode, last) {
    const rooms = {}, links = [];
    let here = null, held = "";
    for (let turn = -1; turn <= last; turn++) {
      const text = viewer.said(episode, turn), at = /you are in (\w+)\./.exec(text);
      if (!at) continue;
      here = at[1];
      const now = room(rooms, here, null), exits = /exits ([^.]*)\./.exec(text), thing = /here is ([^.]*)\./.exec(text), lines = thing ? [thing[1]] : [];
      now.seen = true;
      held = (/you hold ([^.]*)\./.exec(text) || ["", ""])[1];
      const known = exits ? exits[1].split(", ") : [];
      text.replace(/(\w+) needs ([\w ]+)\./g, function (_, name, key) { known.push(name); room(rooms, name, here).lines = ["needs " + key]; });
      text.replace(/([\w ]+) fits (\w+)\./g, function (_, key, name) { known.push(name); room(rooms, name, here).lines = [key.trim() + " fits"]; });
      known.forEach(function (name) { room(rooms, name, here); if (!links.some(function (ends) { return ends[0] === here && ends[1] === name; })) links.push([here, name]); });
      now.lines = lines;
    }
    return { rooms: rooms, links: links, here: here, held: held };
  }

  return {
    name: "map",
    draw: function (episode, turn, element) {
      const seen = walk(episode, turn), box = element("div");
      if (seen.here) box.append(viewer.map(seen.rooms, seen.links, seen.here, "Map; the agent is in " + seen.here));
      box.append(element("p", "fine", (seen.held ? "holds " + seen.held + ". " : "") + viewer.said(episode, turn)));
      return box;
    }
  };
})());
