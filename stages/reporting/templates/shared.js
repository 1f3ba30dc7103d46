var page = {
  element: function (tag, name, text) {
    var made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  },
  format: function (value, digits) { return value === null || value === undefined ? "none" : Number(value).toFixed(digits); },
  MARKS: { success: "✓", failure: "✗", truncated: "…" }
};
