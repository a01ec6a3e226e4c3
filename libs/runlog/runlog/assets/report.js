"use strict";
const Report = (() => {
  let data = { charts: [], episodes: [], episodes_logged: 0 };
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;

  // An element with a class and text. Text only ever becomes a text node.
  function el(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined && text !== null) node.textContent = text;
    return node;
  }
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const short = (v) => (v === null || v === undefined ? "none" : String(Math.round(v * 1000) / 1000));

  document.addEventListener("theme", () => showDetail());

  // ---- curves ---------------------------------------------------------------------------------------------------
  function showCharts() {
    const front = (c) => c.known && !c.rounding;
    const others = data.charts.filter((c) => !front(c));
    Charts.clear($("charts"), $("more-charts"));
    data.charts.filter(front).forEach((c) => Charts.add($("charts"), c));
    const box = others.length > 6 || $("charts").children.length === 0 ? $("more-charts") : $("charts");
    others.forEach((c) => Charts.add(c.rounding ? $("more-charts") : box, c));
    const hidden = $("more").hidden;
    $("more").hidden = $("more-charts").children.length === 0;
    if (hidden) $("more").open = $("charts").children.length === 0;
    $("more").querySelector("summary").textContent = "Other metrics (" + $("more-charts").children.length + ")";
  }

  // ---- episodes -------------------------------------------------------------------------------------------------
  const PAGE = 200;  // rows in the list; the filters find the rest
  const state = { shown: [], selected: null, colour: "mask" };
  let lowest = Infinity, highest = -Infinity, strongest = 1e-9;  // rewards, and the largest advantage
  function pill(reward) {
    if (lowest > highest) return "";  // a run without rewards
    const tone = reward === null || lowest === highest ? "" : reward > (lowest + highest) / 2 ? " good" : " bad";
    return el("span", "pill" + tone, reward === null ? "no reward" : short(reward));
  }
  // The episodes of one group stand side by side: what one did, the others can be held against.
  const groupKey = (e) => JSON.stringify([e.step, e.split, e.environment, e.group]);
  const groups = new Map();
  function indexEpisodes() {
    groups.clear();
    for (const e of data.episodes) {
      e.plain = (e.tokens.length ? e.tokens.join("") : e.messages.map((m) => m.content).join("\n")) + "\n" + (e.expected || "");
      e.answer = lastTurn(e);
      if (e.reward !== null) { lowest = Math.min(lowest, e.reward); highest = Math.max(highest, e.reward); }
      for (const a of e.advantage || []) strongest = Math.max(strongest, Math.abs(a || 0));
      if (e.group === null || e.group === undefined) continue;
      groups.set(groupKey(e), [...(groups.get(groupKey(e)) || []), e]);
    }
  }
  function lastTurn(e) {
    const said = e.messages.filter((m) => m.role === "assistant");
    if (said.length) return said[said.length - 1].content;
    return e.mask ? e.tokens.filter((_, i) => e.mask[i]).join("") : e.plain;
  }
  const limit = (id, fallback) => ($(id).value === "" ? fallback : Number($(id).value));
  function filtered() {
    const low = limit("step-min", -Infinity), high = limit("step-max", Infinity);
    const worst = limit("reward-min", -Infinity), best = limit("reward-max", Infinity);
    const bounded = $("reward-min").value !== "" || $("reward-max").value !== "";
    const text = $("search").value.toLowerCase();
    const split = $("split").value;
    const [key, direction] = $("sort").value.split("-");
    const sign = direction === "asc" ? 1 : -1;
    return data.episodes
      .filter((e) => e.step >= low && e.step <= high)
      .filter((e) => !bounded || (e.reward !== null && e.reward >= worst && e.reward <= best))
      .filter((e) => !split || e.split === split)
      .filter((e) => !text || e.plain.toLowerCase().includes(text))
      .sort((a, b) => sign * ((a[key] ?? -Infinity) - (b[key] ?? -Infinity)) || a.id - b.id);
  }
  function refresh() {
    state.shown = filtered();
    const all = data.episodes.length;
    let count = state.shown.length === all ? all + " shown" : state.shown.length + " of " + all + " shown";
    if (data.episodes_logged > all) count += ", a sample of " + data.episodes_logged;
    $("episode-count").textContent = count;
    const list = $("list");
    list.replaceChildren();
    if (!state.shown.length) list.append(el("p", "empty", all ? "No episode matches these filters." : "This run kept no episodes."));
    for (const e of state.shown.slice(0, PAGE)) list.append(row(e));
    if (state.shown.length > PAGE) list.append(el("p", "empty", "The first " + PAGE + " are listed; narrow the filters for the rest."));
    if (!state.shown.includes(state.selected)) select(state.shown[0] || null);
  }
  function place(e, joint) {
    const parts = ["step " + e.step];
    if (e.split !== "training") parts.push(e.split);
    if (e.environment) parts.push(e.environment);
    if (e.group !== null && e.group !== undefined) parts.push((e.split === "training" ? "group " : "task ") + e.group);
    return parts.join(joint);
  }
  function siblings(e) {
    const all = groups.get(groupKey(e)) || [];
    if (all.length < 2) return null;
    const node = el("div", "siblings");
    node.append(el("span", "fact", "Its group of " + all.length + ":"));
    for (const other of all) {
      const button = el("button", other === e ? "here" : "");
      button.type = "button";
      button.title = other.answer.trim().slice(0, 200);
      button.append(pill(other.reward));
      button.addEventListener("click", () => select(other));
      node.append(button);
    }
    return node;
  }
  function row(e) {
    const node = el("div", "row");
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", String(e === state.selected));
    node.dataset.id = e.id;
    node.append(el("span", "where", place(e, " \u00b7 ")), el("span", "size", e.length + " tokens"), pill(e.reward), el("span", "text", e.answer.trim() || "(empty answer)"));
    node.addEventListener("click", () => select(e));
    return node;
  }
  function select(e) {
    state.selected = e;
    for (const node of $("list").querySelectorAll(".row")) {
      node.setAttribute("aria-selected", String(e !== null && node.dataset.id === String(e.id)));
    }
    showDetail();
  }
  $("list").addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move || !state.shown.length) return;
    event.preventDefault();
    const at = Math.min(Math.max(state.shown.indexOf(state.selected) + move, 0), Math.min(state.shown.length, PAGE) - 1);
    select(state.shown[at]);
    $("list").querySelector('[aria-selected="true"]').scrollIntoView({ block: "nearest" });
  });

  // ---- one episode ----------------------------------------------------------------------------------------------
  const COLOURS = { mask: "Mask", advantage: "Advantage", log_probs: "Log-prob", versions: "Weights" };
  const usable = (e, key) => Array.isArray(e[key]);
  function shade(e, key, i) {
    if (key === "mask") return e.mask[i] ? css("--sampled") : css("--given");
    const value = e[key][i];
    if (value === null || value === undefined) return "transparent";
    if (key === "advantage") {
      if (!value) return "transparent";
      return "rgba(" + css(value > 0 ? "--pos" : "--neg") + "," + (0.1 + 0.42 * Math.min(1, Math.abs(value) / strongest)) + ")";
    }
    if (key === "log_probs") return value === 0 ? "transparent" : "rgba(" + css("--neg") + "," + Math.min(0.7, -value / 6) + ")";
    return value < 0 ? "transparent" : "hsla(" + ((value * 67) % 360) + ",65%,50%,0.28)";
  }
  function legend(key) {
    const node = el("span", "legend");
    const entry = (colour, text) => {
      const item = el("span"), swatch = el("b");
      swatch.style.background = colour;
      item.append(swatch, text);
      node.append(item);
    };
    if (key === "mask") { entry(css("--sampled"), "trained"); entry("transparent", "given"); }
    if (key === "advantage") { entry("rgba(" + css("--pos") + ",.5)", "positive"); entry("rgba(" + css("--neg") + ",.5)", "negative"); entry("transparent", "none"); }
    if (key === "log_probs") entry("rgba(" + css("--neg") + ",.6)", "unlikely");
    if (key === "versions") node.append("one colour for each version of the weights");
    return node;
  }
  function hint(e, i) {
    const parts = ["token " + (i >= (e.head ?? Infinity) ? i + e.cut : i)];
    if (usable(e, "mask")) parts.push(e.mask[i] ? "trained" : "given");
    if (usable(e, "advantage") && e.advantage[i] !== null) parts.push("advantage " + short(e.advantage[i]));
    if (usable(e, "log_probs") && (!e.mask || e.mask[i])) parts.push("log-prob " + short(e.log_probs[i]));
    if (usable(e, "versions") && e.versions[i] >= 0) parts.push("weights " + e.versions[i]);
    return parts.join("\n");
  }
  function tokenNodes(e, key) {
    const pane = el("div", "tokens");
    e.tokens.forEach((text, i) => {
      if (e.cut && i === e.head) pane.append(el("div", "gap", "\u2026 " + e.cut + " tokens left out \u2026"));
      const node = el("span", "tok");
      node.title = hint(e, i);
      if (usable(e, key)) node.style.background = shade(e, key, i);
      node.dataset.trained = e.mask ? e.mask[i] : "";
      const lines = text.split("\n");
      lines.forEach((part, j) => {
        node.append(part);
        if (j < lines.length - 1) { node.append(el("span", "nl", "\u21b5"), "\n"); }
      });
      pane.append(node);
    });
    return pane;
  }
  function messageNode(m) {
    const node = el("div", "msg " + (["user", "assistant", "tool", "system"].includes(m.role) ? m.role : ""));
    node.append(el("div", "role", m.role));
    if (m.reasoning) node.append(el("div", "thought", m.reasoning));
    if (m.content) node.append(el("div", "body", m.content));
    for (const call of m.calls || []) {
      const box = el("div", "call");
      box.append(el("b", "", call.name), " " + call.arguments);
      node.append(box);
    }
    return node;
  }
  function named(name, value) {
    const node = el("div", "named");
    node.append(el("b", "", name), " ", el("span", "", value));
    return node;
  }
  function showDetail() {
    const pane = $("detail"), e = state.selected;
    pane.replaceChildren();
    if (!e) { pane.append(el("p", "empty", "Nothing selected.")); return; }
    const heading = el("div", "heading");
    const name = place(e, ", ");
    heading.append(el("strong", "", name[0].toUpperCase() + name.slice(1)), pill(e.reward));
    const facts = [e.length + " tokens"];
    if (e.trained !== null) facts.push(e.trained + " trained");
    if (e.calls && !("tool_calls" in e.metadata)) facts.push(e.calls + (e.calls === 1 ? " tool call" : " tool calls"));
    for (const [name, value] of Object.entries(e.metadata)) facts.push(name.replaceAll("_", " ") + " " + value);
    facts.forEach((f) => heading.append(el("span", "fact", f)));
    pane.append(heading);
    const others = siblings(e);
    if (others) pane.append(others);
    if (e.error) pane.append(el("div", "error", "Failed: " + e.error));
    if (e.expected !== null) pane.append(named("Expected answer", e.expected));
    const parts = Object.entries(e.parts).map(([part, value]) => part + " " + short(value));
    if (parts.length) pane.append(named("Reward", parts.join(" \u00b7 ")));
    if (e.tokens.length) {
      const bar = el("div", "colouring"), modes = el("div", "modes");
      const keys = Object.keys(COLOURS).filter((k) => usable(e, k));
      const key = keys.includes(state.colour) ? state.colour : keys[0];
      for (const k of keys) {
        const button = el("button", "", COLOURS[k]);
        button.type = "button";
        button.dataset.colour = k;
        button.setAttribute("aria-pressed", String(k === key));
        button.addEventListener("click", () => { state.colour = k; showDetail(); });
        modes.append(button);
      }
      if (keys.length) bar.append(modes, legend(key));
      pane.append(bar, tokenNodes(e, key));
    }
    if (e.messages.length) {
      pane.append(el("h3", "", "Conversation"));
      e.messages.forEach((m) => pane.append(messageNode(m)));
    }
  }
  $("filters").addEventListener("input", refresh);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("reset", () => setTimeout(refresh));
  // Show what a page's data holds; what was selected stays so.
  function take(found) {
    data = found;
    showCharts();
    indexEpisodes();
    $("episodes").hidden = !data.episodes_logged;
    state.selected = data.episodes.find((e) => state.selected && e.id === state.selected.id) || null;
    refresh();
    showDetail();
  }
  take(JSON.parse($("data").textContent));
  return { take };
})();
