"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent).charts;
  const box = document.getElementById("charts"), more = document.getElementById("more");
  charts.forEach((c) => Charts.add(c.known && !c.rounding ? box : document.getElementById("more-charts"), c));
  const others = document.getElementById("more-charts").children.length;
  more.hidden = others === 0;
  more.open = box.children.length === 0;
  more.querySelector("summary").textContent = "Other metrics (" + others + ")";
})();
