"use strict";
// Line charts as SVG: x are steps, y values, `smooth` a second line, `marks` points with the first and last named;
// `lines` are several of these, of `run`s, in one chart.
// Colours are the page's variables, so that a change of theme needs no drawing; a chart is drawn to its width in pixels.
const Charts = (() => {
  const HEIGHT = 190, LEFT = 50, RIGHT = 10, TOP = 12, BOTTOM = 22;
  function svg(name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  // Round numbers of 1, 2 or 5 times a power of ten, at most `most` of them, from low to high.
  function ticks(low, high, most, whole) {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(power * ([1, 2, 5].find((f) => f * power >= rough * 0.999) || 10), whole ? 1 : 0);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return [found, step];
  }
  function number(value, step, percent) {
    if (percent) return (100 * value).toFixed(Math.max(0, Math.ceil(-Math.log10(100 * step) - 1e-9))) + "%";
    const size = Math.abs(value);
    if (size < step / 1e6) return "0";
    if (size >= 1e4) return Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
    if (size < 1e-3) return value.toExponential(1).replace(".0e", "e");
    return value.toFixed(Math.min(6, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))));
  }
  const exact = (value, percent) => (percent ? (100 * value).toFixed(1) + " %" : String(Number(value.toPrecision(5))));
  // An axis ends where values can be: at 0 where none is negative, a share at 100 %.
  function range(values, margin, percent) {
    const low = Math.min(...values), high = Math.max(...values);
    const room = (high - low || Math.abs(high) || 1) * margin;
    const top = percent && high <= 1 ? 1 : high <= 0 && low < 0 ? 0 : Infinity;
    return [low >= 0 ? Math.max(0, low - room) : low - room, Math.min(top, high + room)];
  }
  const line = (xs, ys, at) => "M" + xs.map((x, i) => at.x(x).toFixed(1) + " " + at.y(ys[i]).toFixed(1)).join("L");

  function axes(picture, chart, at, width, [left, right], [low, high]) {
    const [rows, rowStep] = ticks(low, high, 6, false);
    for (const value of rows) {
      picture.append(svg("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: at.y(value), y2: at.y(value) }));
      picture.append(svg("text", { class: "tick", x: LEFT - 6, y: at.y(value) + 4, "text-anchor": "end" }, number(value, rowStep, chart.percent)));
    }
    const [columns, columnStep] = ticks(left, right, Math.max(2, Math.floor(width / 80)), true);
    for (const value of columns) {
      picture.append(svg("text", { class: "tick", x: at.x(value), y: HEIGHT - 6, "text-anchor": "middle" }, number(value, columnStep, false)));
    }
  }
  function named(picture, chart, at) {
    const last = chart.x.length - 1, rising = chart.y[last] >= chart.y[0] ? 1 : -1;
    const from = at.y(chart.y[0]), to = at.y(chart.y[last]);
    picture.append(svg("line", { class: "before", x1: at.x(chart.x[0]), x2: at.x(chart.x[last]), y1: from, y2: from }));
    const inside = (y) => (y < TOP + 8 ? y + 32 : y > HEIGHT - BOTTOM - 2 ? y - 32 : y);
    const word = (x, y, anchor, text) => picture.append(svg("text", { class: "note outlined", x: at.x(x), y: inside(y), "text-anchor": anchor }, text));
    word(chart.x[0], from + 4 + 16 * rising, "start", "before " + chart.first);
    word(chart.x[last], to + 4 - 16 * rising, "end", "after " + chart.last);
  }
  function hover(picture, chart, lines, at, width) {
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    const dots = lines.map((one) => svg("circle", { class: "dot" + run(one), r: 4 }));
    const texts = lines.map((one, i) => svg("text", { class: "note value" + run(one), y: TOP + 2 + 13 * i }));
    const shown = [cursor, ...dots, ...texts];
    const show = (on) => shown.forEach((node) => { node.style.visibility = on ? "visible" : "hidden"; });
    show(false);
    picture.append(...shown);
    picture.addEventListener("pointermove", (event) => {
      const place = event.clientX - picture.getBoundingClientRect().left;
      const away = (x) => Math.abs(at.x(x) - place);
      const nearest = lines.map((one) => one.x.reduce((best, x, i) => (away(x) < away(one.x[best]) ? i : best), 0));
      const x = at.x(lines.map((one, i) => one.x[nearest[i]]).reduce((a, b) => (away(b) < away(a) ? b : a)));
      const left = x > width / 2;
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      lines.forEach((one, i) => {
        const step = one.x[nearest[i]], value = one.y[nearest[i]];
        dots[i].setAttribute("cx", at.x(step));
        dots[i].setAttribute("cy", at.y(value));
        texts[i].setAttribute("x", left ? x - 8 : x + 8);
        texts[i].setAttribute("text-anchor", left ? "end" : "start");
        texts[i].textContent = "step " + step + ": " + exact(value, chart.percent);
      });
      show(true);
    });
    picture.addEventListener("pointerleave", () => show(false));
  }
  const run = (one) => (one.run === undefined ? "" : " run-" + one.run);
  function draw(holder, chart) {
    const width = Math.max(160, holder.clientWidth), lines = chart.lines || [chart];
    const few = chart.marks || lines.every((one) => one.x.length < 12);
    const steps = lines.flatMap((one) => one.x), first = Math.min(...steps), last = Math.max(...steps);
    const [left, right] = first < last ? [first, last] : [first - 1, first + 1];
    const [low, high] = range(lines.flatMap((one) => one.y), chart.marks ? 0.28 : 0.07, chart.percent);
    const at = {
      x: (x) => LEFT + ((x - left) / (right - left)) * (width - LEFT - RIGHT - 6) + 3,
      y: (y) => HEIGHT - BOTTOM - ((y - low) / (high - low)) * (HEIGHT - BOTTOM - TOP),
    };
    const about = lines.map((one) => one.first + " to " + one.last).join("; ");
    const picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": chart.title + ", " + about });
    axes(picture, chart, at, width, [left, right], [low, high]);
    for (const one of lines) {
      const smooth = one.smooth || [];
      picture.append(svg("path", { class: "curve" + (smooth.length ? " faint" : "") + run(one), d: line(one.x, one.y, at) }));
      if (smooth.length) picture.append(svg("path", { class: "curve" + run(one), d: line(one.x, smooth, at) }));
      if (few) one.x.forEach((x, i) => picture.append(svg("circle", { class: "dot" + run(one), cx: at.x(x), cy: at.y(one.y[i]), r: 3 })));
    }
    if (chart.marks && !chart.lines && chart.x.length > 1) named(picture, chart, at);
    hover(picture, chart, lines, at, width);
    holder.replaceChildren(picture);
  }
  // A card with a chart in `parent`, which is drawn when it comes near the screen: fifty open as fast as five.
  const plots = [];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const plot = plots.find((p) => p.node === entry.target);
      if (plot && entry.isIntersecting && !plot.drawn) { plot.drawn = true; draw(plot.node, plot.chart); seen.unobserve(plot.node); }
    }
  }, { rootMargin: "400px" });
  addEventListener("resize", () => plots.forEach((p) => { if (p.drawn) draw(p.node, p.chart); }));
  function part(tag, className, text) {
    const node = document.createElement(tag);
    node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function add(parent, chart) {
    const card = part("div", "chart"), head = part("div", "head"), node = part("div", "plot");
    const name = part("span", "name", chart.title);
    name.title = chart.name;
    head.append(name, part("span", "unit", chart.unit), part("span", "last", chart.lines ? "" : chart.last));
    card.append(head, node);
    parent.append(card);
    plots.push({ node, chart, drawn: false });
    seen.observe(node);
  }
  function clear(...parents) {
    plots.forEach((p) => seen.unobserve(p.node));
    plots.length = 0;
    parents.forEach((parent) => parent.replaceChildren());
  }
  return { add, clear };
})();
