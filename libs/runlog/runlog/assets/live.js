"use strict";
// The page of a run that goes on (`runlog serve`): it asks every two seconds whether there are new rows, and takes them.
(() => {
  const $ = (id) => document.getElementById(id);
  const open = (part) => [...part.querySelectorAll("details")].map((d) => d.open);
  let seen = "";
  async function look() {
    try {
      const state = await (await fetch("state")).text();
      if (seen && state !== seen) {
        const page = new DOMParser().parseFromString(await (await fetch("/")).text(), "text/html");
        for (const id of ["head", "below", "time", "tail"]) {
          const opened = open($(id));
          $(id).replaceChildren(...page.getElementById(id).childNodes);
          $(id).querySelectorAll("details").forEach((d, i) => { d.open = Boolean(opened[i]); });
        }
        Report.take(JSON.parse(page.getElementById("data").textContent));
      }
      seen = state;
      $("live").textContent = "live";
    } catch {
      $("live").textContent = "no longer served";
    }
    setTimeout(look, 2000);
  }
  look();
})();
