var page = {
  element: function (tag, name, text) {
    var made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  },
  format: function (value, digits) { return value === null || value === undefined ? "none" : Number(value).toFixed(digits); },
  // A label for an observation that the turns after `turn`, from 1, did not see.
  left: function (turn) {
    var made = page.element("span", "left-context", "left the context after turn " + turn);
    made.title = "Turn " + turn + " hid this observation: the turns after it did not see its text, in play or in training. Its message stayed, empty.";
    return made;
  },
  LEFT: "Dashed: text that left the context; the turns after the one that is named did not see it, in play or in training.",
  MARKS: { success: "✓", failure: "✗", truncated: "…" }
};
