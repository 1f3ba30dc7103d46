// Pictures as SVG: its elements, and a map of rooms.
viewer.svg = function (tag, attributes, text) {
  "use strict";
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.keys(attributes || {}).forEach(function (name) { made.setAttribute(name, attributes[name]); });
  if (text !== undefined) made.textContent = text;
  return made;
};

// A map: rooms {name: {x, y, lines, seen}} on a grid of whole numbers, links [[name, name]], and the room where the agent is.
viewer.map = function (rooms, links, here, label) {
  "use strict";
  const WIDE = 148, HIGH = 62, BOX = 124, TALL = 44, names = Object.keys(rooms), svg = viewer.svg;
  const xs = names.map(function (name) { return rooms[name].x; }), ys = names.map(function (name) { return rooms[name].y; });
  const left = Math.min.apply(null, xs), top = Math.min.apply(null, ys), x = function (room) { return (room.x - left) * WIDE + WIDE / 2; }, y = function (room) { return (room.y - top) * HIGH + HIGH / 2; };
  const width = (Math.max.apply(null, xs) - left + 1) * WIDE, height = (Math.max.apply(null, ys) - top + 1) * HIGH;
  const picture = svg("svg", { viewBox: "0 0 " + width + " " + height, width: width, height: height, "class": "map", role: "img", "aria-label": label });
  links.forEach(function (ends) {
    const a = rooms[ends[0]], b = rooms[ends[1]];
    if (a && b) picture.appendChild(svg("line", { x1: x(a), y1: y(a), x2: x(b), y2: y(b), "class": "way" }));
  });
  names.forEach(function (name) {
    const room = rooms[name], group = svg("g", { "class": "room" + (name === here ? " here" : "") + (room.seen ? "" : " unseen") });
    group.appendChild(svg("title", {}, [name].concat(room.lines).join("\n")));
    group.appendChild(svg("rect", { x: x(room) - BOX / 2, y: y(room) - TALL / 2, width: BOX, height: TALL, rx: 7 }));
    const lines = [(name === here ? "● " : "") + name].concat(room.lines.join(", ") || []);
    lines.forEach(function (line, place) {
      const cut = line.length > 20 ? line.slice(0, 19) + "…" : line;
      group.appendChild(svg("text", { x: x(room), y: y(room) + (lines.length > 1 ? place * 16 - 4 : 4), "text-anchor": "middle", "class": place ? "inside" : "name" }, cut));
    });
    picture.appendChild(group);
  });
  return picture;
};

// The text of the environment after a number of turns: the first message, then observations. Turn -1 is the start.
viewer.said = function (episode, turn) {
  return turn < 0 ? (episode.messages.length ? episode.messages[0].text : "") : episode.turns[turn].observation;
};
