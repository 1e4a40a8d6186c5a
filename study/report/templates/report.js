"use strict";
// The report's interactive pictures: every trial as a dot over any two of its figures, and every
// trial's curve. Names are set as text, never as HTML.
(function () {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("explore-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const escape = (text) =>
    String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  async function library() {
    const text = atob(byId("plotly-gz").textContent.trim());
    const packed = Uint8Array.from(text, (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.appendChild(script);
  }

  function layout(x, y) {
    const style = getComputedStyle(document.body);
    const text = style.getPropertyValue("--text"), line = style.getPropertyValue("--line");
    const axis = (title, log) => ({
      title: { text: escape(title) }, type: log ? "log" : undefined,
      tickformat: log ? "~g" : undefined, gridcolor: line, zerolinecolor: line, automargin: true,
    });
    const active = style.getPropertyValue("--link");
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, size: 13 },
      xaxis: axis(x.name, x.log), yaxis: axis(y.name, y.log), margin: { t: 36, r: 10 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: text, activecolor: active },
      legend: { orientation: "h", y: -0.25 }, hovermode: "closest",
    };
  }

  const isLog = (values) => {
    const found = values.filter((v) => typeof v === "number");
    const least = Math.min(...found);
    return found.length > 0 && least > 0 && Math.max(...found) > 20 * least;
  };
  const settings = { responsive: true, displaylogo: false };

  function drawScatter() {
    const x = byId("explore-x").value, y = byId("explore-y").value;
    const traces = data.rows.map((row, number) => {
      const mine = data.trials.filter((trial) => trial.row === number);
      return {
        type: "scatter", mode: "markers", name: escape(row),
        x: mine.map((t) => t.values[x] ?? null), y: mine.map((t) => t.values[y] ?? null),
        text: mine.map((t) => escape(t.name)),
        marker: { color: data.colours[number % data.colours.length], size: 8, opacity: 0.8 },
        hovertemplate: "%{text}<br>%{x}, %{y}<extra></extra>",
      };
    });
    const values = (name) => data.trials.map((t) => t.values[name]);
    const axis = (name) => ({ name, log: isLog(values(name)) });
    window.Plotly.react("explore-scatter", traces, layout(axis(x), axis(y)), settings);
  }

  function drawCurves() {
    const seen = new Set();
    const traces = data.trials.filter((t) => t.curve).map((t) => {
      const first = !seen.has(t.row);
      seen.add(t.row);
      return {
        type: "scatter", mode: "lines", name: escape(data.rows[t.row]),
        legendgroup: String(t.row), showlegend: first, x: t.curve[0], y: t.curve[1],
        text: t.curve[0].map(() => escape(t.name)), opacity: 0.7,
        line: { color: data.colours[t.row % data.colours.length], width: 1.5 },
        hovertemplate: "%{text}<br>epoch %{x}: %{y}<extra></extra>",
      };
    });
    const axes = layout({ name: "epoch" }, { name: data.y, log: data.log });
    window.Plotly.react("explore-curves", traces, axes, settings);
  }

  function fill(select, chosen) {
    for (const name of data.names) {
      const option = document.createElement("option");
      option.textContent = option.value = name;
      option.selected = name === chosen;
      select.appendChild(option);
    }
    select.addEventListener("change", drawScatter);
  }

  async function open() {
    await library();
    fill(byId("explore-x"), data.x);
    fill(byId("explore-y"), data.y);
    byId("explore").hidden = false;
    const draw = () => { drawScatter(); drawCurves(); };
    draw();
    dark.addEventListener("change", draw);
    document.body.dataset.explore = "ready";
  }
  open();
})();
