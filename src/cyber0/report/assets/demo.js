"use strict";
// The page of `cyber0 demo`: shows the session's state, which it polls, and sends what the reader changes.
(() => {
  const { el, css, colour, dash, whole, percent, sample, section, nearest, followTheme } = cyber0Page;
  const fixed = JSON.parse(document.getElementById("data").textContent);
  const POLL_MS = 350, RETRY_MS = 2000;
  const clients = Array.from({ length: fixed.clients }, (_, place) => place);
  const spaced = (name) => name.replaceAll("_", " ");
  let state = fixed.state, lost = false, chart = null, charted = "";

  // ---- talking to the server ----

  async function send(path, body) {
    try {
      const answer = await fetch(path, { method: "POST", body: JSON.stringify(body),
        headers: { "Content-Type": "application/json", [fixed.token_header]: fixed.token } });
      const found = answer.status === 403 ? { error: "This page is of an earlier demo; load it again." } : await answer.json();
      complain(found.error ?? "");
      if (found.error) fill(); // the controls go back to what is in force
      else take(found);
    } catch { lose(); }
  }
  async function poll() {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const found = await answer.json();
      if (found.id !== state.id) { location.reload(); return; } // the demo was started again at the same port
      take(found);
    } catch { lose(); }
    setTimeout(poll, lost ? RETRY_MS : POLL_MS);
  }
  function take(found) {
    lost = false;
    if (found.version < state.version) return; // answered before the reader's last change
    const settled = found.version === state.version;
    state = found;
    if (!settled) fill();
    draw();
  }
  function lose() {
    lost = true;
    status();
  }
  const complain = (text) => {
    const box = document.getElementById("refused");
    box.textContent = text;
    box.hidden = !text;
  };

  // ---- what is there from the start ----

  function introduction() {
    const bytes = (count) => `${whole(4 * count)} bytes`;
    return [el("h1", {}, "Who lies, and does the rule notice?"),
      el("p", { class: "sentence" }, `${fixed.clients} clients train one model (${fixed.source}). In each round a client measures how its loss changes along `
        + `${fixed.k} random directions, which all derive from one seed, and sends these ${fixed.k} numbers: ${bytes(fixed.k)}, where the model's `
        + `${whole(fixed.dimension)} weights would take ${bytes(fixed.dimension)}. A Byzantine client sends something else.`),
      el("p", { class: "sentence" }, `The federator does not know who lies. For each direction it has ${fixed.clients} numbers and decides on one by a rule. `
        + "Trimming drops the b largest and the b smallest and averages the rest, so that no lie beyond the honest range counts. Everyone moves the model by what was decided.")];
  }

  function choice(id, label, options, apply) {
    const select = el("select", { id, onchange: (event) => send("settings", { [id]: apply(event.target.value) }) },
      ...options.map(([value, text]) => el("option", { value }, text)));
    return el("label", { class: "control", for: id }, el("span", {}, label), select, el("small", { id: `${id}-text` }));
  }
  function controls() {
    const names = (entries) => entries.map(({ name }) => [name, spaced(name)]);
    const counts = Array.from({ length: fixed.most_tolerated + 1 }, (_, b) => [b, `b = ${b}`]);
    return section("controls", "Change something", "A change starts a run from the same first weights. Who lies is chosen in the table of clients.",
      el("div", { class: "controls" },
        choice("attack", "What Byzantine clients send", names(fixed.attacks), String),
        choice("rule", "The federator's rule", names(fixed.rules), String),
        choice("tolerated", "How many of them it guards against", counts, Number)),
      el("p", { class: "note", id: "refused", role: "alert", hidden: "" }),
      el("div", { class: "legend" },
        el("button", { type: "button", class: "quiet", id: "pause", onclick: () => send("control", { action: state.paused ? "resume" : "pause" }) }, "Pause"),
        el("button", { type: "button", class: "quiet", id: "clear", onclick: () => send("control", { action: "clear" }) }, "Forget all runs and start again")));
  }

  function toggle(client, lies) {
    const others = state.settings.byzantine.filter((one) => one !== client);
    send("settings", { byzantine: lies ? [...others, client] : others });
  }
  function people() {
    const row = (client) => el("tr", { id: `client-${client}` },
      el("td", { class: "text" }, el("label", { class: "who" }, el("input", { type: "checkbox", id: `lies-${client}`,
        onchange: (event) => toggle(client, event.target.checked) }), `client ${client}`)),
      el("td", { class: "sent" }, el("div", { class: "strip" }, el("s"), el("u"), el("i"))),
      el("td", { class: "wide" }, el("div", { class: "bar" }, el("b", {}, "0 %"), el("div", {}, el("i")))));
    const head = (text) => el("th", { scope: "col" }, text);
    return section("suspects", "The clients", "Tick a client to make it Byzantine. Sent: its number along the first direction of this round; hollow if the rule left it out, "
      + "a triangle if it lies far outside; the line is what was decided.",
      el("table", { id: "people" }, el("thead", {}, el("tr", {}, head("Byzantine"), head("sent"), head("trimmed so far"))), el("tbody", {}, ...clients.map(row))),
      el("p", { class: "hint", id: "trimming" }));
  }
  function curves() {
    return section("curves", "Test accuracy over rounds", "One line for each configuration. Click one to return to it: its run continues where it stopped.",
      el("div", { class: "plot", id: "plot" }), el("div", { class: "legend", id: "legend", role: "group", "aria-label": "configurations" }));
  }
  function card(id, label) {
    return el("div", { class: "card" }, el("p", { class: "label" }, label), el("p", { class: "value", id }), el("p", { class: "detail", id: `${id}-detail` }));
  }

  // ---- what changes ----

  const write = (id, text) => { const node = document.getElementById(id); if (node.textContent !== text) node.textContent = text; };

  function fill() { // the controls, as the server has them
    const { settings } = state, about = (entries, name) => entries.find((entry) => entry.name === name)?.text ?? "";
    for (const id of ["attack", "rule", "tolerated"]) document.getElementById(id).value = settings[id];
    write("attack-text", about(fixed.attacks, settings.attack));
    write("rule-text", about(fixed.rules, settings.rule));
    const count = settings.byzantine.length;
    write("tolerated-text", count > settings.tolerated ? `${count} clients lie: more than the rule guards against.` : "");
    for (const client of clients) document.getElementById(`lies-${client}`).checked = settings.byzantine.includes(client);
  }

  function drawClients(chosen, byzantine) {
    const { last, sent, trimmed } = chosen;
    // Three quarters of the numbers fit in with room to spare, so that a huge lie does not squeeze the others together.
    const sizes = (last?.scalars ?? []).filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
    const scale = 1.3 * Math.max(1e-9, sizes[Math.ceil(0.75 * sizes.length) - 1] ?? 0, Math.min(sizes.at(-1) ?? 0, Math.abs(last?.decided ?? 0)));
    const at = (value) => `${50 + 46 * Math.max(-1, Math.min(1, value / scale))}%`;
    for (const client of clients) {
      const row = document.getElementById(`client-${client}`), share = sent[client] ? trimmed[client] / sent[client] : 0;
      row.className = byzantine.includes(client) ? "byzantine" : "";
      row.querySelector(".bar b").textContent = percent(share);
      row.querySelector(".bar i").style.width = `${100 * share}%`;
      row.querySelector(".bar").title = `client ${client}: ${whole(trimmed[client])} of its ${whole(sent[client])} numbers were trimmed`;
      const strip = row.querySelector(".strip"), dot = strip.querySelector("i"), value = last?.scalars[client];
      strip.classList.toggle("empty", !last);
      if (!last) continue;
      strip.querySelector("u").hidden = last.decided === null;
      if (last.decided !== null) strip.querySelector("u").style.left = at(last.decided);
      const far = value === null || Math.abs(value) > scale;
      dot.className = `${last.excluded[client] ? "out" : ""} ${!far ? "" : value === null || value > 0 ? "right" : "left"}`;
      dot.style.left = at(value ?? scale);
      strip.title = value === null ? "not a finite number: refused" : `sent ${value.toPrecision(4)}${last.excluded[client] ? ", left out" : ""}`;
    }
    write("trimming", trimmed.some(Boolean) ? `Trimmed so far, of ${whole(Math.max(...sent))} numbers each. Byzantine clients are striped.`
      : chosen.round ? "This rule trims no numbers so far." : "");
  }

  function drawFigures(chosen) {
    write("accuracy", `${(100 * chosen.accuracy).toFixed(1)} %`);
    write("accuracy-detail", `of the test set, after ${whole(chosen.evaluated)} rounds`);
    write("round", `${whole(chosen.round)} of ${whole(fixed.rounds)}`);
    write("round-detail", chosen.error || (chosen.abandoned ? `${whole(chosen.abandoned)} of them without a decision` : ""));
    write("digest", chosen.digest.slice(0, 16));
    write("digest-detail", "the same for everyone who holds the model");
  }

  function drawCurves(trials, chosen) {
    const box = document.getElementById("plot"), numbers = trials.map((trial) => trial.number).join();
    const lines = uPlot.join(trials.map((trial) => [trial.rounds, trial.accuracy]));
    if (numbers !== charted) {
      charted = numbers;
      chart?.destroy();
      const axis = { stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1, size: 5 }, font: "12px system-ui, sans-serif" };
      chart = new uPlot({
        width: Math.max(120, box.clientWidth), height: 300, padding: [10, 16, 0, 0], legend: { show: false },
        scales: { x: { time: false, range: [0, fixed.rounds] }, y: { range: [0, 1] } },
        axes: [{ ...axis, space: 64, size: 34 }, { ...axis, size: 58, values: (_, values) => values.map((v) => `${Math.round(100 * v)} %`) }],
        series: [{}, ...trials.map(({ number }) => ({ stroke: () => colour(number), width: 2, dash: dash(number), spanGaps: true, points: { show: false } }))],
        cursor: { drag: { x: false, y: false }, dataIdx: nearest },
      }, lines, box);
    } else chart.setData(lines);
    const chip = (trial) => el("button", { type: "button", class: "chip", "aria-current": String(trial.number === chosen.number), onclick: () => send("settings", trial.settings) },
      sample(trial.number), el("span", {}, `${trial.name}: `, el("b", {}, `${(100 * trial.accuracy.at(-1)).toFixed(1)} %`)));
    const legend = document.getElementById("legend"), held = document.activeElement?.closest?.("#legend .chip");
    const place = held ? [...legend.children].indexOf(held) : -1; // the keyboard stays where it is
    legend.replaceChildren(...trials.map(chip));
    if (place >= 0) legend.children[place]?.focus();
  }

  function status() {
    const box = document.getElementById("state"), { chosen, paused } = state;
    const running = !lost && !paused && !chosen.ended;
    box.className = running ? "live" : "";
    box.textContent = lost ? "the demo has ended; start it again with: cyber0 demo" : paused ? "paused"
      : chosen.ended ? "this run is over: change something" : "demo: training on this machine";
  }

  function draw() {
    const trial = state.trials.find(({ number }) => number === state.chosen.number) ?? state.trials.at(-1);
    drawClients(state.chosen, trial.settings.byzantine);
    drawFigures(state.chosen);
    drawCurves(state.trials, state.chosen);
    write("pause", state.paused ? "Continue" : "Pause");
    document.getElementById("pause").disabled = state.chosen.ended && !state.paused;
    status();
  }

  document.getElementById("page").replaceChildren(...introduction(),
    el("div", { class: "cards" }, card("accuracy", "test accuracy"), card("round", "round"), card("digest", "digest of the model")),
    controls(), el("div", { class: "pair" }, people(), curves()));
  document.getElementById("foot").replaceChildren("Real training, on this machine alone; nothing is recorded or sent. Charts: uPlot (MIT).");
  fill();
  followTheme(() => chart?.redraw(false));
  draw();
  new ResizeObserver(() => {
    const width = Math.max(120, document.getElementById("plot").clientWidth);
    if (width !== chart.width) chart.setSize({ width, height: chart.height });
  }).observe(document.getElementById("page"));
  setTimeout(poll, POLL_MS);
})();
