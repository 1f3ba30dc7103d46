// A list box of many rows: the first ones are drawn, the others when the reader comes near them.
viewer.listBox = function (list, draw, chosen) {
  "use strict";
  const PART = 150;
  let items = [], current = -1;

  function grow(upTo) {
    while (list.children.length < Math.min(items.length, upTo)) {
      const place = list.children.length, row = page.element("li");
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", "false");
      row.setAttribute("aria-posinset", place + 1);
      row.setAttribute("aria-setsize", items.length);
      row.id = list.dataset.name + "-" + place;
      draw(row, items[place]);
      list.appendChild(row);
    }
  }

  function mark(place) {
    if (list.children[current]) list.children[current].setAttribute("aria-selected", "false");
    current = place;
    if (place < 0) { list.removeAttribute("aria-activedescendant"); return; }
    grow(place + PART);
    list.children[place].setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", list.children[place].id);
    const row = list.children[place];
    // The list scrolls, never the page.
    if (row.offsetTop < list.scrollTop) list.scrollTop = row.offsetTop;
    else if (row.offsetTop + row.offsetHeight > list.scrollTop + list.clientHeight) list.scrollTop = row.offsetTop + row.offsetHeight - list.clientHeight;
  }

  function select(place) {
    if (place < 0 || place >= items.length) return;
    mark(place);
    chosen(items[place]);
  }

  list.addEventListener("scroll", function () { if (list.scrollTop + 2 * list.clientHeight > list.scrollHeight) grow(list.children.length + PART); });
  list.addEventListener("click", function (event) {
    const row = event.target.closest("li");
    if (row) select(Array.prototype.indexOf.call(list.children, row));
  });
  list.addEventListener("keydown", function (event) {
    const place = { ArrowDown: current + 1, ArrowUp: current - 1, PageDown: Math.min(current + 10, items.length - 1), PageUp: Math.max(current - 10, 0), Home: 0, End: items.length - 1 }[event.key];
    if (place === undefined) return;
    event.preventDefault();
    select(place);
  });

  return {
    // Shows `given`, with `item` or else the first selected; returns what is selected, or null.
    fill: function (given, item) {
      items = given;
      current = -1;
      list.textContent = "";
      list.scrollTop = 0;
      grow(PART);
      const place = item ? items.indexOf(item) : -1;
      mark(place >= 0 ? place : items.length ? 0 : -1);
      return items[current] || null;
    },
    step: function (move) { select(current + move); },
    current: function () { return items[current] || null; }
  };
};
