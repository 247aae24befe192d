"use strict";

// Curves arrive as numbers; how they look depends on the theme and on the width of the page.
const sections = JSON.parse(document.getElementById("sections").textContent);
const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 40rem)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : systemDark.matches;
}

function shadeOf(method) {
  return isDark() ? method.dark : method.colour;
}

function axis(more) {
  return {
    gridcolor: colour("--grid"),
    linecolor: colour("--line"),
    zerolinecolor: colour("--grid"),
    tickcolor: colour("--line"),
    automargin: true,
    ...more,
  };
}

// Logarithmic, with numbers as people write them.
function lossAxis(more) {
  return axis({ type: "log", tickformat: "~g", nticks: 4, ...more });
}

function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    hovermode: "closest",
    dragmode: narrow.matches ? false : "zoom",
    ...more,
  };
}

const config = { responsive: true, displayModeBar: false, scrollZoom: false };

// The range of the seeds behind a curve: one line there and back, filled.
function band(curve, colourOfCurve, more) {
  return {
    x: curve.x.concat(curve.x.slice().reverse()),
    y: curve.high.concat(curve.low.slice().reverse()),
    fill: "toself", fillcolor: colourOfCurve + "26", line: { width: 0 }, mode: "lines",
    hoverinfo: "skip", showlegend: false, ...more,
  };
}

const PANELS = [
  { key: "loss", axis: "y", format: ".4f" },
  { key: "score", axis: "y2" },
  { key: "size", axis: "y3", format: ",.0f" },
  { key: "share", axis: "y4", format: ".2f" },
];
// Where the panels are, from the top; the last one is only there where somebody has measured.
const THREE = [[0.7, 1], [0.36, 0.64], [0, 0.3]];
const FOUR = [[0.79, 1], [0.53, 0.73], [0.27, 0.47], [0, 0.2]];

function hasShares(section) {
  return section.methods.some((method) => method.share.x.length > 0);
}

// Constant sizes are no news in the panel of batch sizes: there they are only marks to compare with.
function line(method, panel) {
  const dash = method.decays ? "dash" : "solid";
  if (panel.key !== "size") return { color: shadeOf(method), width: 2.2, dash };
  return { color: shadeOf(method), width: 1.4, dash: method.constant ? "dot" : dash };
}

function resultTraces(section) {
  const traces = [];
  for (const method of section.methods) {
    for (const panel of PANELS) {
      const curve = method[panel.key];
      if (!curve.x.length) continue;
      const shared = {
        xaxis: "x", yaxis: panel.axis, legendgroup: method.name, visible: method.main ? true : "legendonly",
      };
      if (curve.low) traces.push(band(curve, shadeOf(method), shared));
      traces.push({
        x: curve.x, y: curve.y, name: method.label, mode: "lines", type: "scatter",
        line: line(method, panel),
        showlegend: panel.key === "loss",
        hovertemplate: `%{y:${panel.format || section.metric.format}} at %{x:,.0f} examples<extra>${method.label}</extra>`,
        ...shared,
      });
    }
  }
  return traces;
}

function panelTitle(text, y) {
  return {
    text: `<b>${text}</b>`, showarrow: false, xref: "paper", yref: "paper", x: 0, y, xanchor: "left", yanchor: "bottom",
    font: { size: 13 },
  };
}

// The noise share that CABS keeps.
function quarter() {
  return {
    type: "line", xref: "paper", x0: 0, x1: 1, yref: "y4", y0: 0.25, y1: 0.25,
    line: { color: colour("--quiet"), width: 1, dash: "dot" },
  };
}

function resultLayout(section) {
  const domains = hasShares(section) ? FOUR : THREE;
  const titles = ["Training loss", section.metric.title, "Batch size", "Noise share of the loss"];
  return layout({
    margin: { l: 10, r: 24, t: 28, b: 10 },  // the last label of an axis needs room, or it is left out
    xaxis: axis({ anchor: hasShares(section) ? "y4" : "y3", title: { text: "training examples accessed" }, range: [0, section.budget], tickformat: "~s" }),
    yaxis: lossAxis({ domain: domains[0] }),
    yaxis2: axis({ domain: domains[1], tickformat: section.metric.format, range: section.scoreRange }),
    yaxis3: section.largestSize
      ? axis({ domain: domains[2], range: [0, section.largestSize] })
      : lossAxis({ domain: domains[2] }),
    ...(hasShares(section) ? { yaxis4: lossAxis({ domain: domains[3] }), shapes: [quarter()] } : {}),
    annotations: domains.map((domain, panel) => panelTitle(titles[panel], domain[1])),
    legend: { orientation: "h", x: 0, xanchor: "left", y: -0.1, yanchor: "top", font: { size: 12 }, groupclick: "togglegroup" },
  });
}


// A curve as far as it was measured, and a cross where the run diverged, which is in sight however large the loss was.
function divergedTrace(section, curve, shade) {
  const [low, high] = section.lossRange.map((exponent) => 10 ** exponent);
  const seen = curve.y.map((value) => Math.min(Math.max(value, low), high));
  const last = seen.length ? seen[seen.length - 1] : high;
  return {
    x: [...curve.x, curve.end], y: [...seen, last], name: curve.label, mode: "lines+markers", type: "scatter",
    line: { color: shade, width: 2, dash: "dot" }, cliponaxis: false,
    marker: { symbol: "x", color: shade, size: [...curve.x.map(() => 0), 10], line: { width: 0 }, opacity: 1 },
    hovertemplate: `%{x:,.0f} examples<extra>${curve.label}</extra>`,
  };
}

function familyTraces(section, family) {
  const traces = [];
  for (const curve of family.curves) {
    const shade = isDark() ? curve.dark : curve.colour;
    if ("end" in curve) {
      traces.push(divergedTrace(section, curve, shade));
      continue;
    }
    if (curve.low) traces.push(band(curve, shade, { legendgroup: curve.label }));
    traces.push({
      x: curve.x, y: curve.y, name: curve.label, legendgroup: curve.label, mode: "lines", type: "scatter",
      line: { color: shade, width: 2 },
      hovertemplate: `%{y:.4f} at %{x:,.0f} examples<extra>${curve.label}</extra>`,
    });
  }
  return traces;
}

function familyLayout(section, family) {
  return layout({
    title: { text: `<b>${family.name}</b>`, x: 0.02, xanchor: "left", font: { size: 13 } },
    margin: { l: 10, r: 24, t: 36, b: 10 },
    xaxis: axis({ range: [0, section.budget], tickformat: "~s", nticks: 5 }),
    yaxis: lossAxis({ range: section.lossRange }),
    legend: { orientation: "h", x: 0, xanchor: "left", y: -0.15, yanchor: "top", font: { size: 11 } },
  });
}

// The loss at the end over the learning rate; methods whose learning rate decays are dashed.
function rateTraces(section) {
  return section.rates.map((method) => ({
    x: method.x, y: method.y, name: method.name, mode: "lines+markers", type: "scatter",
    visible: method.main ? true : "legendonly",
    line: { color: shadeOf(method), width: method.ours ? 3 : 1.6, dash: method.decays ? "dash" : "solid" },
    error_y: {
      type: "data", symmetric: false, array: method.above, arrayminus: method.below, color: shadeOf(method),
      thickness: 1, width: 3,
    },
    hovertemplate: `%{y:.4g} with α = %{x:g}<extra>${method.name}</extra>`,
  }));
}

function rateLayout(section) {
  const rates = [...new Set(section.rates.flatMap((method) => method.x))].sort((a, b) => a - b);
  return layout({
    margin: { l: 10, r: 24, t: 12, b: 10 },
    xaxis: axis({ type: "log", title: { text: "learning rate α" }, tickvals: rates, ticktext: rates.map((rate) => `${rate}`) }),
    yaxis: lossAxis({ title: { text: "training loss at the end" } }),
    legend: { orientation: "h", x: 0, xanchor: "left", y: -0.2, yanchor: "top", font: { size: 11 } },
  });
}

// A legend takes its room from the panels above it, unless the plot is the higher the more names there are.
function makeRoom(id, panels, names) {
  const rows = Math.ceil(names / (narrow.matches ? 1 : 4));
  document.getElementById(id).style.height = `${panels + 24 * rows + 80}px`;
}

function draw() {
  return sections.map((section, index) => {
    makeRoom(`results-${index}`, (hasShares(section) ? 4 : 3) * 190, section.methods.length);
    if (section.rates.length) makeRoom(`rates-${index}`, 380, section.rates.length);
    const plots = [Plotly.react(`results-${index}`, resultTraces(section), resultLayout(section), config)];
    if (section.rates.length) {
      plots.push(Plotly.react(`rates-${index}`, rateTraces(section), rateLayout(section), config));
    }
    section.families.forEach((family, position) => {
      plots.push(
        Plotly.react(`family-${index}-${position}`, familyTraces(section, family), familyLayout(section, family), config));
    });
    return Promise.all(plots);
  });
}

function redraw() {
  // Curves that the reader has switched off stay off.
  const shown = new Map();
  document.querySelectorAll(".plot").forEach((plot) => {
    if (plot.data) shown.set(plot.id, plot.data.map((trace) => trace.visible));
  });
  return Promise.all(draw()).then(() => Promise.all([...shown].map(([id, visible]) =>
    Plotly.restyle(id, { visible: visible.map((value) => (value === undefined ? true : value)) }))));
}

document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  redraw();
});
systemDark.addEventListener("change", redraw);
narrow.addEventListener("change", redraw);
Promise.all(draw()).then(() => { document.documentElement.dataset.ready = "yes"; });
