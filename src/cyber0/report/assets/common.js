"use strict";
// What the pages of cyber0 have in common. Text enters a page by textContent alone, since names may hold anything.
const cyber0Page = (() => {
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const COLOURS = 6; // --run-0 ... of report.css, told apart with any kind of colour vision; dashes tell the rest

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "onclick" || name === "onchange") node[name] = value;
      else if (name === "style") Object.entries(value).forEach(([k, v]) => node.style.setProperty(k, v));
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return node;
  }
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (run) => css(`--run-${run % COLOURS}`);
  const dash = (run) => DASHES[(Math.floor(run / COLOURS) + run) % DASHES.length];
  const whole = (value) => Number(value).toLocaleString("en");
  const percent = (share) => (100 * share).toFixed(share < 0.0995 ? 1 : 0) + " %";

  function section(id, title, hint, ...children) {
    return el("section", { id }, el("h2", {}, title), hint ? el("p", { class: "hint" }, hint) : null, ...children);
  }

  function sample(run) { // a piece of the run's line
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 26 8");
    svg.setAttribute("class", "sample");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of Object.entries({ x1: 0, y1: 4, x2: 26, y2: 4, "stroke-width": 3 })) line.setAttribute(name, value);
    line.style.stroke = `var(--run-${run % COLOURS})`;
    line.setAttribute("stroke-dasharray", dash(run).join(" "));
    svg.append(line);
    return svg;
  }

  function nearest(chart, series, index, x) { // each run has its own rounds: its nearest one is shown
    const ys = chart.data[series], xs = chart.data[0];
    if (series === 0 || (ys[index] !== null && ys[index] !== undefined)) return index;
    let left = index, right = index;
    while (left >= 0 && (ys[left] === null || ys[left] === undefined)) left--;
    while (right < ys.length && (ys[right] === null || ys[right] === undefined)) right++;
    if (left < 0 || right >= ys.length) return null; // before the run started or after it ended
    return x - xs[left] <= xs[right] - x ? left : right;
  }

  // Lets the button in the head of the page choose light, dark or what the system says; `redraw` draws the charts again.
  function followTheme(redraw) {
    const themes = ["auto", "light", "dark"], button = document.getElementById("theme");
    let theme = "auto";
    try { theme = themes.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto"; } catch { /* no storage */ }
    function apply() {
      if (theme === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = theme;
      button.textContent = `Theme: ${theme}`;
      redraw();
    }
    button.onclick = () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      try { localStorage.setItem("theme", theme); } catch { /* no storage */ }
      apply();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
    apply();
  }

  return { el, css, colour, dash, whole, percent, sample, section, nearest, followTheme };
})();
