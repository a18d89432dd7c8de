// Draw the plots of a page from plot-data.js; both scripts are loaded only by pages that have plots.
(function () {
  "use strict";
  const own = document.currentScript.src;
  function load(name) {
    return new Promise(function (resolve, reject) {
      const script = document.createElement("script");
      script.src = own.replace(/site\.js.*$/, name);
      script.onload = resolve;
      script.onerror = reject;
      document.head.appendChild(script);
    });
  }
  function draw() {
    const places = document.querySelectorAll(".posenc-plot[data-plot]");
    if (!places.length) return;
    Promise.all([load("plotly.js"), load("plot-data.js")]).then(function () {
      const colour = getComputedStyle(document.body).getPropertyValue("--md-typeset-color") || "#333";
      places.forEach(function (place) {
        const plot = window.posencPlots[place.dataset.plot];
        const layout = Object.assign({}, plot.layout, {
          paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour },
          margin: { l: 60, r: 10, t: 50, b: 50 },
        });
        window.Plotly.newPlot(place, plot.data, layout, { responsive: true, displaylogo: false });
      });
    });
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", draw);
  else draw();
})();
