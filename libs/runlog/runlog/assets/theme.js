"use strict";
// Light or dark: the system's until the reader chooses. What is drawn in colours of its own listens to "theme".
(() => {
  const wanted = new URLSearchParams(location.search).get("theme"), root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = wanted === "dark" || wanted === "light" ? wanted : null;
  function apply() {
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    document.dispatchEvent(new Event("theme"));
  }
  system.addEventListener("change", apply);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    apply();
  });
  apply();
})();
