// Filters over all episodes, the text search among them.
viewer.filters = (function () {
  "use strict";
  const FIELDS = ["domain", "source", "role", "outcome", "stop", "pattern", "refused", "turns_from", "turns_to", "term", "term_from", "term_to", "text", "sort"];
  const lowered = {};

  function term(entry, name) {
    if (name === "return") return entry.reward;
    const column = entry.group.terms[name];
    return column ? column[entry.place] : null;
  }

  function within(value, from, to) {
    if (from === "" && to === "") return true;
    return value !== null && value !== undefined && (from === "" || value >= Number(from)) && (to === "" || value <= Number(to));
  }

  // The test that the index alone decides; `values` are the form's.
  function matches(entry, values) {
    return ["domain", "source", "role", "outcome", "stop"].every(function (name) { return !values[name] || entry[name] === values[name]; })
      && (!values.pattern || Boolean((entry.group.hits[values.pattern] || {})[entry.place]))
      && (!values.refused || (values.refused === "0" ? entry.refused === 0 : entry.refused >= Number(values.refused)))
      && within(entry.turns, values.turns_from, values.turns_to) && within(term(entry, values.term), values.term_from, values.term_to);
  }

  // A function of a text: whether it holds the words, or matches /expression/flags. Throws SyntaxError.
  function wanted(text) {
    const given = /^\/(.+)\/([ims]*)$/.exec(text);
    if (given) { const expression = new RegExp(given[1], given[2]); return function (value) { return expression.test(value); }; }
    const words = text.toLowerCase();
    return function (value, low) { return low.indexOf(words) >= 0; };
  }

  // Whether each text of a group's file is wanted; episodes share texts, so each is searched once.
  function textsOf(group, data, test) {
    if (!lowered[group.key]) lowered[group.key] = data.texts.map(function (text) { return text.toLowerCase(); });
    return data.texts.map(function (text, place) { return test(text, lowered[group.key][place]); });
  }

  // Those of `entries` whose id, task or messages hold the text. `told` hears of the files that are read.
  function search(entries, text, told) {
    const test = wanted(text), groups = viewer.unique(entries.map(function (entry) { return entry.group; }));
    let done = 0;
    return Promise.all(groups.map(function (group) {
      return viewer.load(group).then(function (data) { told(++done, groups.length); return [group.key, data, textsOf(group, data, test)]; });
    })).then(function (loaded) {
      const found = {};
      loaded.forEach(function (one) { found[one[0]] = one; });
      return entries.filter(function (entry) {
        const one = found[entry.group.key], messages = one[1].episodes[entry.place][0];
        return messages.some(function (place, number) { return number % 2 && one[2][place]; }) || test(entry.id, entry.id.toLowerCase());
      });
    });
  }

  const ORDERS = {
    turns: function (a, b) { return b.turns - a.turns; },
    refused: function (a, b) { return b.refused - a.refused; },
    reward: function (a, b) { return a.reward - b.reward; },
    tokens: function (a, b) { return b.tokens - a.tokens; }
  };

  return { FIELDS: FIELDS, matches: matches, search: search, order: function (entries, by) { return ORDERS[by] ? entries.slice().sort(ORDERS[by]) : entries; } };
})();
