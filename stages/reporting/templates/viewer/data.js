// The index, the files that are loaded on demand, and what all views share.
const viewer = (function () {
  "use strict";
  const index = JSON.parse(document.getElementById("index").textContent);
  const OWNERS = ["prompt", "policy", "environment", "external", "forced", "evidence", "guidance"];
  const groups = {}, entries = [], byLink = {}, arrivals = {}, files = {}, renderers = {}, values = {};
  let vocabulary = null;

  // Adds a group to the index; `tasks`: the names that it counts in.
  function take(group, tasks) {
    groups[group.key] = group;
    group.entries = [];
    group.byPair = {};
    const attempts = {};
    group.id.forEach(function (short, place) {
      const task = tasks[group.domain][group.task[place]], whole = function (name) { return name.charAt(0) === "=" ? name.slice(1) : task + name; };
      const id = whole(short), role = group.roles ? group.roles[group.role[place]] : "", play = group.play && group.play[place] ? whole(group.play[place]) : "";
      // Members of a team that do not act have attempts of their own: those of the acting one pair with other sources'.
      const acts = !play || play === id, counted = task + (acts ? "" : "\n" + role), ordinal = attempts[counted] = (attempts[counted] || 0) + 1;
      const entry = {
        group: group, place: place, domain: group.domain, source: group.source, task: task, attempt: ordinal, role: role, play: play, acts: acts,
        id: id, outcome: index.outcomes[group.outcome[place]],
        stop: group.stops[group.stop[place]], turns: group.turns[place], refused: group.refused[place], tokens: group.tokens[place],
        reward: group.reward[place], pair: counted + "#" + ordinal
      };
      group.entries.push(entry);
      group.byPair[entry.pair] = entry;
      entries.push(entry);
      byLink[group.source + "\n" + entry.id] = entry;
    });
  }
  index.groups.forEach(function (group) { take(group, index.tasks); });

  // Removes a group and its episodes.
  function drop(group) {
    delete groups[group.key];
    index.groups.splice(index.groups.indexOf(group), 1);
    group.entries.forEach(function (entry) { entries.splice(entries.indexOf(entry), 1); delete byLink[entry.source + "\n" + entry.id]; });
  }

  function script(name) {
    return new Promise(function (resolve, reject) {
      const tag = document.createElement("script");
      tag.src = name.charAt(0) === "/" ? name : name + ".js";
      tag.onload = resolve;
      tag.onerror = function () { reject(new Error("The file " + name + ".js beside this page can't be read. Copy the whole folder, or run 'dvc checkout reports/episodes'.")); };
      document.head.appendChild(tag);
    });
  }

  // A file once it is here; each is asked for once.
  function file(name, arrived) {
    if (!files[name]) {
      files[name] = script(name).then(arrived).catch(function (error) {
        delete files[name];
        trouble(error);
        return new Promise(function () {});  // what waits for it stays as it is, under the message
      });
    }
    return files[name];
  }

  function trouble(error) {
    const note = document.getElementById("trouble");
    note.textContent = error.message;
    note.hidden = false;
  }

  // What a group's episodes say and do, once it and the learnt values of its domain's states are here.
  function load(group) {
    const own = file(group.file || group.key, function () { return arrivals[group.key]; }), name = (index.values || {})[group.domain];
    return name ? file(name, function () { return null; }).then(function () { return own; }) : own;
  }

  // The texts of tokens; files of running stages bring their own.
  function words() { return index.live ? Promise.resolve(vocabulary) : file("vocabulary", function () { return vocabulary; }); }

  // An episode with its texts in place. `data` is what the entry's group loaded.
  function episode(entry, data) {
    const packed = data.episodes[entry.place], text = function (place) { return data.texts[place]; }, messages = [];
    for (let place = 0; place < packed[0].length; place += 2) messages.push({ role: text(packed[0][place]), text: text(packed[0][place + 1]) });
    const turns = packed[1].map(function (turn) {
      return { action: text(turn[0]), observation: text(turn[1]), state: text(turn[2]), accepted: Boolean(turn[3]), reward: turn[4], cost: turn[5] };
    });
    const advantages = packed[4] && packed[4].flatMap(function (run) { return Array(run[1]).fill(run[0]); });
    const tokens = [];
    let policy = 0;
    packed[2].forEach(function (span) {
      data.spans[span[0]].forEach(function (id) {
        const token = { id: id, owner: OWNERS[span[1]], turn: span[2] };
        if (span[1] === 1) {
          token.logprob = packed[3][policy] / 1000;
          if (advantages) token.advantage = advantages[policy];
          policy++;
        }
        tokens.push(token);
      });
    });
    turns.forEach(function (turn, number) {
      const own = tokens.filter(function (token) { return token.owner === "policy" && token.turn === number; });
      turn.tokens = own;
      turn.logprob = own.reduce(function (sum, token) { return sum + token.logprob; }, 0);
      if (advantages && own.length) turn.advantage = own.reduce(function (sum, token) { return sum + (token.advantage || 0); }, 0) / own.length;
    });
    (packed[7] || []).forEach(function (hidden) {
      turns[hidden[0]].left = hidden[1] + 1;
      tokens.slice(hidden[2], hidden[3] || hidden[2]).forEach(function (token) { token.left = hidden[1] + 1; });
    });
    if (packed[6]) turns.forEach(function (turn, number) { turn.move = packed[6][number] + 1; });
    credit(turns, values[entry.domain] || {}, packed[5]);
    return { entry: entry, messages: messages, turns: turns, tokens: tokens, trained: Boolean(advantages), credited: turns.some(function (turn) { return turn.credit !== undefined; }) };
  }

  // The learnt value before each turn, and its step credit: what RL gave it, or else r + V(next) - V, with 0 after the last turn.
  function credit(turns, known, given) {
    turns.forEach(function (turn) { turn.value = known[turn.state]; });
    turns.forEach(function (turn, number) {
      const next = turns[number + 1], after = next ? next.value : 0;
      if (given) turn.credit = given[number];
      else if (turn.value !== undefined && after !== undefined) turn.credit = turn.reward + after - turn.value;
      turn.given = Boolean(given);
      turn.tokens.forEach(function (token) { token.credit = turn.credit; });
    });
  }

  function signed(value, digits) { return (value < 0 ? "−" : "+") + page.format(Math.abs(value), digits); }

  // A turn's numbers in words.
  function numbers(step) {
    const parts = [];
    if (step.move) parts.push("move " + step.move + " of the play");
    if (!step.accepted) parts.push("refused");
    if (step.reward) parts.push("reward " + page.format(step.reward, 2));
    if (step.tokens.some(function (token) { return token.logprob; })) parts.push("log-probability " + signed(step.logprob, 2) + " (" + signed(step.logprob / step.tokens.length, 2) + " per token)");
    if (step.advantage !== undefined) parts.push("advantage " + signed(step.advantage, 2));
    if (step.value !== undefined) parts.push("learnt value " + page.format(step.value, 2));
    if (step.credit !== undefined) parts.push("step credit " + signed(step.credit, 2));
    return parts.join(", ");
  }

  // 95 % Wilson score interval of a share.
  function wilson(count, all) {
    if (!all) return [0, 1];
    const z = 1.959964, share = count / all, middle = share + z * z / (2 * all), below = 1 + z * z / all;
    const half = z * Math.sqrt(share * (1 - share) / all + z * z / (4 * all * all));
    return [Math.max(0, (middle - half) / below), Math.min(1, (middle + half) / below)];
  }

  function percent(share) { return (100 * share).toFixed(1) + " %"; }

  function share(count, all) {
    const range = wilson(count, all);
    return percent(count / all) + " (" + (100 * range[0]).toFixed(1) + " to " + (100 * range[1]).toFixed(1) + ")";
  }

  function hash(values) {
    const kept = new URLSearchParams();
    Object.keys(values).forEach(function (name) { if (values[name] !== "" && values[name] !== undefined && values[name] !== null) kept.set(name, values[name]); });
    return "#" + kept.toString();
  }

  function option(select, values, label) {
    values.forEach(function (value) { select.appendChild(new Option(label ? label(value) : value, value)); });
  }

  function refill(select, values, label) {
    const before = select.value;
    select.textContent = "";
    option(select, values, label);
    if (values.indexOf(before) >= 0) select.value = before;
  }

  function unique(values) { return Array.from(new Set(values)); }

  function table(header, rows, textColumns) {
    const frame = page.element("div", "scroll"), made = page.element("table"), head = page.element("tr");
    header.forEach(function (title, place) { const cell = page.element("th", place >= textColumns ? "num" : "", title); cell.scope = "col"; head.appendChild(cell); });
    made.appendChild(page.element("thead")).appendChild(head);
    const body = made.appendChild(page.element("tbody"));
    rows.forEach(function (row) {
      const line = body.appendChild(page.element("tr"));
      row.forEach(function (value, place) {
        const cell = line.appendChild(page.element("td", place >= textColumns ? "num" : ""));
        cell.append(value);
      });
    });
    frame.appendChild(made);
    return frame;
  }

  function link(text, values) {
    const made = page.element("a", "", text);
    made.href = hash(values);
    return made;
  }

  return {
    index: index, groups: groups, entries: entries, domains: unique(index.groups.map(function (group) { return group.domain; })),
    take: function (group, tasks) { index.groups.push(group); take(group, tasks); }, drop: drop,
    arrived: function (key, data) { arrivals[key] = data; }, valued: function (domain, given) { values[domain] = given; },
    vocabulary: function (given) { vocabulary = Object.assign(vocabulary || {}, given); }, words: words,
    // An environment's own drawing: `name` of the view, `draw(episode, turn, element)` -> an element for the state after a turn.
    renderer: function (domain, given) { renderers[domain] = given; }, renderers: renderers,
    find: function (source, id) { return byLink[source + "\n" + id] || (source ? undefined : entries.find(function (entry) { return entry.id === id; })); },
    load: load, episode: episode, numbers: numbers, signed: signed, wilson: wilson, share: share, percent: percent, hash: hash, option: option, refill: refill,
    unique: unique, table: table, link: link, trouble: trouble, views: {}
  };
})();
