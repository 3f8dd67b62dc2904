"use strict";
// Draws a report from the data in the page. Text enters the page by textContent alone, since names may hold anything.
(() => {
  const { el, css, colour, dash, whole, percent, sample, section, nearest, followTheme } = cyber0Page;
  // data.charts: {title, x, y, unit, of_set}; x and y name columns of each run's curve (tasks/metrics.py).
  const ROUND = "round", SENT = "uplink_bytes";
  const idOf = (spec, place) => (/^[a-z_]+$/.test(spec.y) ? `${spec.y}-${spec.x === SENT ? "bytes" : "rounds"}` : `chart-${place}`);
  const charted = () => data.charts.map((spec, place) => ({ ...spec, id: idOf(spec, place) }));
  const column = (curve, name) => curve.columns[name] ?? curve.columns[ROUND].map(() => null);
  let drawn = []; // the charts on the page
  const MOST_SENTENCES = 4;
  const POLL_MS = 1000;

  let data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set(); // runs that a click on the legend has hidden
  const sorted = {}; // table -> {column, down}, kept when a live page is drawn again
  const logarithmic = { sent: true, loss: false };
  let chosen = 0; // the run whose clients, partition and environment are shown
  let onlyChanges = data.runs.length > 1; // for several runs what differs, for one everything
  let charts = [];
  const zoomed = new WeakSet(); // charts that are zoomed in

  // ---- small helpers ----

  function bytes(count, digits = 4) {
    const [unit, size] = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find((u) => count >= u[1]) || ["B", 1];
    return `${Number((count / size).toPrecision(digits))} ${unit}`;
  }
  const shown = { share: (v) => (100 * v).toFixed(2) + " %", loss: (v) => v.toFixed(4), bytes,
    "": (v) => String(Number(v.toPrecision(5))) }; // by the unit of a column
  const onX = (spec) => (spec.x === SENT ? bytes : whole);

  // ---- sortable tables ----

  // columns: {title, hint, kind: "number"|"text", cell(row) -> node or text, key(row) -> what to sort by, class}
  function table(id, columns, rows, rowClass = () => "") {
    const body = el("tbody");
    const heads = columns.map((column, place) => {
      const button = el("button", { type: "button", class: "sort", title: column.hint, onclick: () => sortBy(place) }, column.title);
      return el("th", { scope: "col", class: column.class || column.kind }, button);
    });
    function fill() {
      const order = rows.slice();
      const by = sorted[id];
      if (by && by.column < columns.length) {
        const key = columns[by.column].key;
        order.sort((a, b) => compare(key(a), key(b), by.down));
      }
      heads.forEach((head, place) => {
        const here = by && by.column === place;
        head.setAttribute("aria-sort", here ? (by.down ? "descending" : "ascending") : "none");
      });
      body.replaceChildren(...order.map((row) => el("tr", { class: rowClass(row) }, ...columns.map((column) =>
        el("td", { class: column.class || column.kind }, column.cell(row))))));
    }
    function sortBy(place) {
      const by = sorted[id];
      const first = columns[place].kind === "number"; // the largest number or the first word first
      sorted[id] = { column: place, down: by && by.column === place ? !by.down : first };
      fill();
    }
    fill();
    const scroller = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `table ${id}` },
      el("table", { id }, el("thead", {}, el("tr", {}, ...heads)), body));
    return scroller;
  }
  function compare(a, b, down) {
    const none = (v) => v === null || v === undefined;
    if (none(a) || none(b)) return none(a) - none(b); // unknown values come last either way
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return down ? -order : order;
  }

  // ---- the page ----

  function head() {
    const runs = data.runs;
    const title = runs.length === 1 ? runs[0].name : `${runs.length} runs compared`;
    const parts = [el("h1", {}, title)];
    if (runs.length === 1) parts.push(el("p", { class: "sentence" }, runs[0].sentence));
    else if (runs.length <= MOST_SENTENCES) runs.forEach((run, place) => parts.push(el("p", { class: "sentence short" }, sample(place), ` ${run.name}: ${run.sentence}`)));
    for (const run of runs) {
      const where = runs.length > 1 ? `${run.name}: ` : "";
      run.notes.forEach((note) => parts.push(el("p", { class: "note" }, where + note)));
    }
    if (runs.length === 1) {
      parts.push(el("div", { class: "cards", id: "figures" }, ...runs[0].figures.map((figure) =>
        el("div", { class: "card" }, el("p", { class: "label" }, figure.label), el("p", { class: "value" }, figure.text),
          figure.detail ? el("p", { class: "detail" }, figure.detail) : null))));
    } else parts.push(comparison());
    return el("div", {}, ...parts);
  }

  function comparison() { // one column a label: accuracies on dev and test sets must not be ranked together
    const keys = new Map(data.runs.flatMap((run) => run.figures.map((figure) => [figure.label, figure.key])));
    const alone = (key) => [...keys.values()].filter((other) => other === key).length === 1;
    const of = (run, label) => run.figures.find((figure) => figure.label === label);
    const settings = differing().filter((name) => ![...keys.values()].includes(name)); // rounds is a figure too
    const [first, ...others] = [...keys].map(([label, key]) => ({ title: alone(key) ? key : label, hint: label, kind: "number",
      key: (run) => of(run, label)?.value, cell: (run) => of(run, label)?.text ?? "-" }));
    const columns = [{ title: "run", kind: "text", key: (run) => run.name, cell: (run) => nameOf(run) }, first, // what a phone has room for
      ...settings.map((name) => ({ title: name.split(".").pop(), hint: name, kind: "text", key: (run) => setting(run, name),
        cell: (run) => setting(run, name) ?? "-" })), ...others].filter(Boolean);
    return table("runs", columns, data.runs);
  }
  const setting = (run, name) => run.config.find((item) => item.name === name)?.value;
  function differing() {
    const names = [...new Set(data.runs.flatMap((run) => run.config.map((item) => item.name)))];
    return names.filter((name) => new Set(data.runs.map((run) => setting(run, name))).size > 1);
  }
  function nameOf(run) {
    return el("span", { class: "name", title: run.sentence }, sample(data.runs.indexOf(run)), run.name);
  }
  // ---- curves ----

  const sets = () => new Set(data.runs.map((run) => run.set)); // of the curves: dev, test, train, or null (not known)
  function heading(spec) {
    const [set, ...others] = sets();
    const title = set && spec.of_set && !others.length ? `${set} ${spec.title}` : spec.title;
    return title[0].toUpperCase() + title.slice(1);
  }
  const named = (run) => (sets().size === 1 ? run.name : `${run.name} (${run.set ?? "dev or test"})`);

  function curves() {
    const few = data.runs.some((run) => run.curve.columns[ROUND].length < run.curve.evaluations);
    const none = data.runs.every((run) => !run.curve.evaluations);
    const hint = (none ? "Nothing has been evaluated. A federator has no data: `cyber0 follow` evaluates a served run." :
      "Drag to zoom in, double-click to reset.") +
      (data.runs.length > 1 ? " Click a name to hide or show a run." : "") +
      (few ? " Long curves are drawn by their extremes; metrics.csv has every evaluation." : "");
    const legend = data.runs.length > 1 ? el("div", { class: "legend", id: "legend", role: "group", "aria-label": "runs" },
      ...data.runs.map((run, place) => el("button", { type: "button", class: "chip", "aria-pressed": String(!hidden.has(place)),
        title: run.sentence, onclick: () => toggle(place) }, sample(place), named(run))),
      data.runs.length > 2 ? el("button", { type: "button", class: "quiet", id: "everyone", onclick: everyone }, "all / none") : null) : null;
    const choice = (name, text) => el("label", {}, el("input", { type: "checkbox", id: `log-${name}`, checked: logarithmic[name] ? "" : null,
      onchange: (event) => { logarithmic[name] = event.target.checked; draw(); } }), text);
    drawn = charted();
    return section("curves", "Accuracy and loss", hint, legend,
      el("div", { class: "choices" }, choice("sent", "logarithmic bytes"), choice("loss", "logarithmic loss")),
      el("div", { class: "grid" }, ...drawn.map((chart) => el("figure", { class: "chart" },
        el("figcaption", {}, heading(chart)), el("div", { class: "plot", id: chart.id })))));
  }

  function toggle(place) {
    if (!hidden.delete(place)) hidden.add(place);
    applyHidden();
  }
  function everyone() {
    if (hidden.size) hidden.clear();
    else data.runs.forEach((_, place) => hidden.add(place));
    applyHidden();
  }
  function applyHidden() {
    document.querySelectorAll("#legend .chip").forEach((chip, place) => chip.setAttribute("aria-pressed", String(!hidden.has(place))));
    for (const chart of charts) chart.batch(() => data.runs.forEach((_, place) => chart.setSeries(place + 1, { show: !hidden.has(place) })));
  }

  function points(spec) { // the curves of all runs over one x axis
    const positiveX = spec.x === SENT && logarithmic.sent, positiveY = spec.unit === "loss" && logarithmic.loss;
    return uPlot.join(data.runs.map(({ curve }) => {
      const x = column(curve, spec.x), y = column(curve, spec.y);
      const kept = x.map((_, i) => i).filter((i) => !positiveX || x[i] > 0);
      return [kept.map((i) => x[i]), kept.map((i) => (positiveY && y[i] <= 0 ? null : y[i]))];
    }));
  }

  function rangeOfY(spec) {
    return (chart, low, high) => {
      if (low === null || high === null) return spec.unit === "share" ? [0, 1] : [0.1, 1];
      if (spec.unit === "share" && !zoomed.has(chart)) return [0, 1];
      if (spec.unit === "loss" && logarithmic.loss) return [low / 1.15, high * 1.15];
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      return [low - room, high + room];
    };
  }
  function rangeOfX(spec) {
    return (chart, low, high) => {
      if (low === null || high === null) return spec.x === SENT ? [1e2, 1e4] : [0, 1];
      if (low < high) return [low, high];
      return spec.x === SENT ? [Math.max(1, low / 10), Math.max(10, high * 10)] : [Math.max(0, low - 1), high + 1];
    };
  }

  function options(spec, box) {
    const axis = { stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 },
      ticks: { stroke: () => css("--line"), width: 1, size: 5 }, font: "12px system-ui, sans-serif" };
    const logX = spec.x === SENT && logarithmic.sent, logY = spec.unit === "loss" && logarithmic.loss;
    const onY = spec.unit === "share" ? (v, digits) => `${Number((100 * v).toPrecision(digits))} %` : (v, digits) => String(Number(v.toPrecision(digits)));
    const labels = (write) => (chart, values) => distinct(values, write);
    return {
      width: Math.max(120, box.clientWidth), height: 260, legend: { show: false },
      padding: [10, 28, 0, 0],
      scales: { x: { time: false, distr: logX ? 3 : 1, range: rangeOfX(spec) }, y: { distr: logY ? 3 : 1, range: rangeOfY(spec) } },
      axes: [{ ...axis, values: labels(onX(spec)), space: 64, size: 34, ...(logX ? decades(6) : {}) },
        { ...axis, values: labels(onY), size: widthOfY, ...(logY ? decades(6) : {}) }],
      series: [{}, ...data.runs.map((run, place) => ({
        label: run.name, show: !hidden.has(place), stroke: () => colour(place), width: 2, dash: dash(place),
        points: { size: 5, fill: () => colour(place), stroke: () => colour(place), space: 12 },
      }))],
      cursor: { points: { size: 8 }, drag: { x: true, y: false }, dataIdx: nearest },
      plugins: [readout(spec)],
    };
  }

  function distinct(values, write) { // with four digits, or as many as it takes to tell the ticks apart
    const given = values.filter((v) => v !== null), apart = new Set(given).size;
    let digits = 4;
    while (digits < 15 && new Set(given.map((v) => write(v, digits))).size < apart) digits++;
    return values.map((v) => (v === null ? "" : write(v, digits)));
  }

  const widthOfY = (chart, labels) => Math.max(58, 14 + 7 * Math.max(0, ...(labels ?? []).map((label) => label.length)));

  function decades(most) { // ticks of a logarithmic axis: 1, 2, 5, 10, ... or as many of them as there is room for
    return { filter: (chart, values) => values, splits: (chart, axis, low, high) => {
      for (const steps of [[1, 2, 5], [1]]) {
        const ticks = [];
        for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
          steps.forEach((step) => ticks.push(Number(`${step}e${power}`)));
        const inside = ticks.filter((tick) => tick >= low && tick <= high);
        if (inside.length === 0) return [low, high];
        if (inside.length <= most || steps.length === 1) return inside.filter((_, i) => i % Math.ceil(inside.length / most) === 0);
      }
    } };
  }

  function readout(spec) { // the values under the cursor
    const box = el("div", { class: "readout", hidden: "" });
    return { hooks: {
      setSelect: (chart) => { if (chart.select.width > 0) zoomed.add(chart); },
      init: (chart) => {
        chart.over.append(box);
        chart.root.addEventListener("dblclick", () => zoomed.delete(chart), true);
        const touch = (event) => {
          const at = event.touches[0], frame = chart.over.getBoundingClientRect();
          chart.setCursor({ left: at.clientX - frame.left, top: at.clientY - frame.top });
        };
        chart.over.addEventListener("touchstart", touch, { passive: true });
        chart.over.addEventListener("touchmove", touch, { passive: true });
      },
      setCursor: (chart) => {
        const { left, idx, idxs } = chart.cursor;
        const values = idx === null || idx === undefined || left < 0 ? [] : data.runs.map((run, place) => [run, place, idxs[place + 1]])
          .filter(([, place, at]) => !hidden.has(place) && at !== null && at !== undefined && chart.data[place + 1][at] !== undefined);
        box.hidden = values.length === 0;
        if (box.hidden) return;
        const x = chart.data[0][data.runs.length === 1 ? values[0][2] : idx];
        box.replaceChildren(el("p", {}, (spec.x === ROUND ? "round " : "") + onX(spec)(x)), ...values.map(([run, place, at]) => {
          const y = chart.data[place + 1][at];
          return el("p", {}, sample(place), data.runs.length > 1 ? el("span", {}, named(run)) : null,
            el("b", {}, y === null ? "not finite" : shown[spec.unit](y)));
        }));
        const wide = chart.over.clientWidth, room = box.offsetWidth + 12;
        box.style.left = `${Math.max(0, left + room > wide ? left - room : left + 12)}px`;
      },
    } };
  }

  function draw() {
    charts.forEach((chart) => chart.destroy());
    charts = drawn.map((spec) => {
      const box = document.getElementById(spec.id);
      return new uPlot(options(spec, box), points(spec), box);
    });
  }
  function fit() {
    charts.forEach((chart, place) => {
      const width = Math.max(120, document.getElementById(drawn[place].id).clientWidth);
      if (width !== chart.width) chart.setSize({ width, height: chart.height });
    });
    probes.forEach((chart) => chart.setSize({ width: Math.max(120, chart.root.parentNode.clientWidth), height: 240 }));
  }

  // ---- one run's clients, partition, environment ----

  function chooser() {
    if (data.runs.length === 1) return null;
    const select = el("select", { id: "chosen", onchange: (event) => { chosen = Number(event.target.value); drawDetails(); } },
      ...data.runs.map((run, place) => el("option", { value: place }, run.name)));
    select.value = chosen;
    return el("label", { class: "chooser" }, "Diagnostics, clients, partition and environment of ", select);
  }

  const who = (byzantine) => (byzantine === null ? "not known" : byzantine ? "Byzantine" : "honest");
  const rowClass = (byzantine) => (byzantine ? "byzantine" : "");

  function suspects(run) {
    const { rows, total, expected } = run.clients;
    if (!rows.length) return section("suspects", "How often each client was trimmed", "No record of the clients was found.");
    const share = (row) => (row[2] ? row[3] / row[2] : 0);
    const top = Math.max(...rows.map(share), expected ?? 0, 0.01);
    const known = rows.some((row) => row[1] !== null);
    if (rows.every((row) => row[2] === 0)) return section("suspects", "How often each client was trimmed",
      "No client's report has counted so far.");
    if (rows.every((row) => row[3] === 0)) return section("suspects", "How often each client was trimmed",
      `${expected === 0 ? "With this beta the rule trims b = 0 scalars" : "This rule trims no scalars"}, so this says nothing about the ${whole(total)} clients.`);
    const bar = (row) => el("div", { class: "bar", title: `client ${row[0]}: ${whole(row[3])} of its ${whole(row[2])} scalars were trimmed` },
      el("b", {}, percent(share(row))), el("div", {}, el("i", { style: { width: `${(100 * share(row)) / top}%` } }),
        expected === null ? null : el("s", { style: { left: `${(100 * expected) / top}%` } })));
    const hint = "Byzantine clients stand out: their scalars are trimmed more often than those of others." +
      (expected === null ? "" : ` The dashed line is the share if nobody stood out, 2b/m = ${percent(expected)}.`) +
      (known ? " The simulation knows who is Byzantine; the federator did not." : "") +
      (rows.length < total ? ` The ${whole(rows.length)} most trimmed of ${whole(total)}; clients.csv has all.` : "");
    return section("suspects", "How often each client was trimmed", hint, table("clients", [
      { title: "client", kind: "number", key: (row) => row[0], cell: (row) => String(row[0]) },
      known ? { title: "role", kind: "text", key: (row) => who(row[1]), cell: (row) => who(row[1]) } : null,
      { title: "trimmed", kind: "number", class: "wide", key: share, cell: bar },
      { title: "scalars sent", kind: "number", key: (row) => row[2], cell: (row) => whole(row[2]) },
    ].filter(Boolean), rows, (row) => rowClass(row[1])));
  }

  // ---- is it the learning rate or a bug? ----

  const PROBES = [
    { id: "fall-lr", title: "Decrease of the loss by one step over lr, as a share of the largest possible (dashed: the setting)", points: "stepping", x: "lr", y: "fall" },
    { id: "error-mu", title: "Error of the slopes over the probing step mu (dashed: the setting)", points: "probing", x: "mu", y: "error" },
  ];
  let probes = [];

  function diagnostics(run) {
    const found = run.diagnostics;
    const list = (findings) => el("ul", { class: "findings" }, ...findings.map((one) => el("li", { class: `is-${one.level}` }, one.text)));
    const hint = "Is it the learning rate or a bug? How good the slopes are, and which lr and mu suit them.";
    const records = found.records.length ? [el("h3", {}, "From the run's records"), list(found.records)] : [];
    if (!found.head) return section("diagnostics", "Diagnostics", hint, ...records,
      el("p", { class: "hint" }, "To measure signal and noise, mu and the step length, with DIR the run's folder: ", el("code", {}, "cyber0 diagnose DIR")));
    const cells = (tag, row) => el("tr", {}, ...row.map((text, place) => el(tag, { class: place ? "number" : "text" }, text)));
    const measured = el("div", { class: "scroll" }, el("table", { id: "stations" }, el("thead", {}, cells("th", found.head)),
      el("tbody", {}, ...found.rows.map((row) => cells("td", row)))));
    return section("diagnostics", "Diagnostics", hint, el("p", { class: `headline is-${found.level}` }, found.headline), list(found.findings),
      found.suggestions.length ? el("ul", { class: "findings" }, ...found.suggestions.map((line) => el("li", { class: "is-suggested" }, `Suggested: ${line}`))) : null,
      measured,
      el("div", { class: "grid" }, ...PROBES.filter((spec) => found.stations.some((s) => s[spec.points].length)).map((spec) =>
        el("figure", { class: "chart" }, el("figcaption", {}, spec.title), el("div", { class: "plot", id: spec.id })))), ...records);
  }

  function drawProbes(run) {
    probes.forEach((chart) => chart.destroy());
    probes = PROBES.filter((spec) => document.getElementById(spec.id)).map((spec) => {
      const box = document.getElementById(spec.id), stations = run.diagnostics.stations;
      const lines = stations.map((station) => {
        const points = station[spec.points], most = Math.max(...points.map((p) => p[spec.y] ?? 0));
        const value = (p) => (p[spec.y] === null ? null : spec.y === "fall" ? Math.max(-1, p.fall / most) : Math.max(1e-4, p.error));
        return [points.map((p) => p[spec.x]), points.map(value)];
      });
      const axis = { stroke: () => css("--muted"), grid: { stroke: () => css("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
      const power = (chart, values) => values.map((v) => (v === null ? "" : Number(v.toPrecision(2)).toString()));
      const share = (chart, values) => values.map((v) => (v === null ? "" : `${Number((100 * v).toPrecision(2))} %`));
      const logY = spec.y === "error";
      const present = { draw: (chart) => { // the run's own setting
        const at = chart.valToPos(run.diagnostics[spec.x], "x", true), { ctx, bbox } = chart;
        if (!(at >= bbox.left && at <= bbox.left + bbox.width)) return;
        ctx.save();
        ctx.strokeStyle = css("--ink");
        ctx.setLineDash([6, 5]);
        ctx.beginPath();
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        ctx.stroke();
        ctx.restore();
      } };
      return new uPlot({
        width: Math.max(120, box.clientWidth), height: 240, padding: [10, 28, 0, 0], cursor: { drag: { x: false, y: false } },
        scales: { x: { time: false, distr: 3 }, y: { distr: logY ? 3 : 1, range: logY ? [1e-4, 10] : [-1, 1.05] } },
        axes: [{ ...axis, values: power, size: 34, ...decades(6) }, { ...axis, values: share, size: 64, ...(logY ? decades(6) : {}) }],
        legend: { live: false, markers: { width: 3 } },
        series: [{ label: spec.x }, ...stations.map((station, place) => ({ label: `after ${whole(station.round)} rounds`, stroke: () => colour(place),
          width: 2, dash: dash(place), spanGaps: true, points: { show: true, size: 5, fill: () => colour(place) } }))],
        plugins: [{ hooks: present }],
      }, uPlot.join(lines), box);
    });
  }

  function network(run) { // for a deployment: the state of each client, and its traffic
    const { columns, rows, total } = run.network;
    const at = (name) => columns.indexOf(name), known = rows.some((row) => row[at("wire_in")] > 0);
    const each = (row, name) => (row[at("reports")] ? row[at(name)] / row[at("reports")] : null);
    const short = (value) => (value === null ? "-" : Number(value.toPrecision(3)).toLocaleString("en"));
    const cost = (title, kind) => ({ title, hint: "bytes a round, up / down", kind: "number", key: (row) => each(row, `${kind}_in`),
      cell: (row) => el("span", { title: `in all ${bytes(row[at(`${kind}_in`)])} up, ${bytes(row[at(`${kind}_out`)])} down` },
        `${short(each(row, `${kind}_in`))} / ${short(each(row, `${kind}_out`))}`) });
    const hint = "Bytes up / down, divided by the reports that counted; payload is the scalars alone" +
      (known ? ", wire is everything on its TCP connections, with TLS, handshakes and catching up." : "; bytes on the wire are not known on this system.") +
      (rows.length < total ? ` ${whole(rows.length)} of ${whole(total)} clients.` : "");
    return section("network", "Clients over the network", hint, table("connections", [
      { title: "client", kind: "number", key: (row) => row[0], cell: (row) => String(row[0]) },
      rows.some((row) => row[1] !== null) ? { title: "state", kind: "text", key: (row) => row[1], cell: (row) => row[1] } : null,
      { title: "reports", kind: "number", key: (row) => row[at("reports")], cell: (row) => whole(row[at("reports")]) },
      { title: "missed", hint: "rounds that ended without its report, though it was waited for", kind: "number", key: (row) => row[at("misses")], cell: (row) => whole(row[at("misses")]) },
      cost("payload", "payload"), known ? cost("wire", "wire") : null,
    ].filter(Boolean), rows));
  }

  function partition(run) {
    const { rows, labels, total, title, all_labels } = run.partition;
    if (!rows.length) return section("partition", "Samples of each client", "No partition was found.");
    const most = Math.max(1, ...rows.flatMap((row) => row.slice(3))), numbers = labels.length <= 20;
    const cell = (row, place) => {
      const count = row[place + 3], deep = count / most;
      return el("span", { class: deep > 0.85 ? "heat deepest" : deep > 0.6 ? "heat deep" : "heat", style: { "--deep": deep.toFixed(3) },
        title: `client ${row[0]}, label ${labels[place]}: ${whole(count)} samples` }, numbers ? (count ? whole(count) : "\u00b7") : "");
    };
    const hint = `By label${title ? `, partition ${title}` : ""}.` +
      (rows.length < total ? ` ${rows.length} of ${whole(total)} clients, evenly spread.` : "") +
      (labels.length < all_labels ? ` ${labels.length} of ${whole(all_labels)} labels.` : "") +
      (rows.some((row) => row[1]) ? " Orange: Byzantine." : "");
    return section("partition", "Samples of each client", hint, table("shares", [
      { title: "client", kind: "number", key: (row) => row[0], cell: (row) => String(row[0]) },
      ...labels.map((label, place) => ({ title: label, kind: "number", class: "cell", key: (row) => row[place + 3], cell: (row) => cell(row, place) })),
      { title: "all", kind: "number", key: (row) => row[2], cell: (row) => whole(row[2]) },
    ], rows, (row) => rowClass(row[1])));
  }

  function environment(run) {
    if (!run.environment.length) return section("environment", "Environment", "The run has not recorded its environment yet.");
    const rows = [...run.environment, ...(run.digest ? [["model digest", run.digest]] : [])];
    return section("environment", "Environment", "", table("versions", [
      { title: "name", kind: "text", key: (row) => row[0], cell: (row) => row[0].replaceAll("_", " ") },
      { title: "value", kind: "text", class: "long", key: (row) => row[1], cell: (row) => row[1] },
    ], rows));
  }

  function repeat(run) {
    if (!run.command) return section("repeat", "Repeat it", "The settings are not known.");
    const code = el("code", { id: "command" }, ...run.command.split(/(?<= )(?=--)/).map((part) => el("span", {}, part))); // breaks between settings
    const button = el("button", { type: "button", class: "quiet", onclick: async () => {
      getSelection().selectAllChildren(code);
      try { await navigator.clipboard.writeText(run.command); button.textContent = "Copied"; }
      catch { button.textContent = "Selected: press Ctrl-C"; }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    } }, "Copy");
    return section("repeat", "Repeat it", "The settings that differ from the defaults; config.toml in the run's folder has them all.",
      el("div", { class: "command" }, el("pre", {}, code), button));
  }

  function config() {
    const runs = data.runs, several = runs.length > 1;
    const names = [...new Set(runs.flatMap((run) => run.config.map((item) => item.name)))];
    if (!names.length) return section("config", "Settings", "The settings are not known.");
    const item = (run, name) => run.config.find((one) => one.name === name);
    const apart = new Set(differing());
    const odd = (name) => (several ? apart.has(name) : item(runs[0], name).changed);
    const rows = onlyChanges ? names.filter(odd) : names;
    const text = several ? "only where the runs differ" : "only what differs from the defaults";
    const box = el("input", { type: "checkbox", id: "only-changes", checked: onlyChanges ? "" : null,
      onchange: (event) => { onlyChanges = event.target.checked; document.getElementById("config").replaceWith(config()); } });
    return section("config", "Settings", "", el("div", { class: "choices" }, el("label", {}, box, text)),
      rows.length ? table("settings", [
        { title: "setting", kind: "text", class: "key", key: (name) => name, cell: (name) => name },
        ...runs.map((run) => ({ title: several ? run.name : "value", kind: "text", class: "value", key: (name) => item(run, name)?.value,
          cell: (name) => item(run, name)?.value || (item(run, name) ? '""' : "-") })),
        { title: "meaning", kind: "text", class: "long", key: (name) => names.indexOf(name), cell: (name) => runs.map((run) => item(run, name)).find(Boolean).text },
      ], rows, (name) => (odd(name) && !onlyChanges ? "changed" : "")) : el("p", { class: "hint" }, several ? "The settings do not differ." : "All settings have their defaults."));
  }

  function drawDetails() {
    const run = data.runs[chosen];
    document.getElementById("details").replaceChildren(suspects(run), run.network ? network(run) : partition(run));
    document.getElementById("machine").replaceChildren(environment(run), repeat(run));
    document.getElementById("diagnosed").replaceChildren(diagnostics(run));
    drawProbes(run);
  }

  function state() {
    const box = document.getElementById("state"), live = data.live;
    box.className = live && !live.ended ? "live" : "";
    if (live && live.lost) box.textContent = live.ended ? "the run has ended" : "the run's server has stopped; this is the last data it sent";
    else if (live) box.textContent = live.ended ? "the run has ended" : `live: round ${whole(live.round)} of ${whole(live.rounds)}${live.speed ? ", " + live.speed : ""}`;
    else box.textContent = data.runs.some((run) => !run.ended) ? "a run that has not ended" : "";
  }

  function drawAll() {
    document.getElementById("page").replaceChildren(el("div", { id: "head" }, head()), curves(), el("div", { id: "choose" }, chooser() ?? ""),
      el("div", { id: "diagnosed" }), el("div", { id: "details", class: "pair" }), el("div", { id: "machine", class: "pair" }), config());
    drawDetails();
    document.getElementById("foot").replaceChildren(`Made by cyber0 ${data.cyber0}, ${data.made}. Charts: uPlot (MIT).`);
    state();
    draw();
  }

  // ---- live ----

  async function poll() {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const latest = await answer.json();
      const moved = latest.runs[0].curve.evaluations !== data.runs[0].curve.evaluations || latest.live.ended;
      const first = !data.runs[0].curve.evaluations;
      data = latest;
      state();
      if (moved || data.runs[0].network) document.getElementById("head").replaceChildren(head());
      if (moved && (first || charted().map((spec) => spec.title).join() !== drawn.map((spec) => spec.title).join())) {
        document.getElementById("curves").replaceWith(curves());
        draw();
      } else if (moved) {
        drawn.forEach((spec, place) => {
          const chart = charts[place], all = !zoomed.has(chart);
          chart.setData(points(spec), all);
          if (!all) chart.redraw();
        });
      }
      drawDetails();
    } catch {
      data.live.lost = true;
      state();
      return;
    }
    if (!data.live.ended) setTimeout(poll, POLL_MS);
  }

  followTheme(() => [...charts, ...probes].forEach((chart) => chart.redraw(false)));
  drawAll();
  // Milliseconds since the page was requested; uPlot draws in microtasks, and this one comes after them.
  queueMicrotask(() => { document.documentElement.dataset.drawn = Math.round(performance.now()); });
  new ResizeObserver(fit).observe(document.getElementById("page"));
  if (data.live && !data.live.ended) setTimeout(poll, POLL_MS);
})();
