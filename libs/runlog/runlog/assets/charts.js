"use strict";
// Line charts as SVG: x are steps, y values, `smooth` a second line, `marks` points with the first and last named.
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
  function range(values, margin) {
    const low = Math.min(...values), high = Math.max(...values);
    const room = (high - low || Math.abs(high) || 1) * margin;
    return [low - room, high + room];
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
    picture.append(svg("text", { class: "note", x: at.x(chart.x[0]), y: from + 4 + 16 * rising }, "before " + chart.first));
    picture.append(svg("text", { class: "note", x: at.x(chart.x[last]), y: to + 4 - 16 * rising, "text-anchor": "end" }, "after " + chart.last));
  }
  function hover(picture, chart, at, width) {
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    const dot = svg("circle", { class: "dot", r: 4 }), text = svg("text", { class: "note value", y: TOP + 2 });
    const shown = [cursor, dot, text];
    const show = (on) => shown.forEach((node) => { node.style.visibility = on ? "visible" : "hidden"; });
    show(false);
    picture.append(...shown);
    picture.addEventListener("pointermove", (event) => {
      const place = event.clientX - picture.getBoundingClientRect().left;
      let best = 0;
      chart.x.forEach((x, i) => { if (Math.abs(at.x(x) - place) < Math.abs(at.x(chart.x[best]) - place)) best = i; });
      const x = at.x(chart.x[best]), left = x > width / 2;
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      dot.setAttribute("cx", x);
      dot.setAttribute("cy", at.y(chart.y[best]));
      text.setAttribute("x", left ? x - 8 : x + 8);
      text.setAttribute("text-anchor", left ? "end" : "start");
      text.textContent = "step " + chart.x[best] + ": " + exact(chart.y[best], chart.percent);
      show(true);
    });
    picture.addEventListener("pointerleave", () => show(false));
  }
  function draw(holder, chart) {
    const width = Math.max(160, holder.clientWidth);
    const few = chart.marks || chart.x.length < 12;
    const [left, right] = chart.x.length > 1 ? [chart.x[0], chart.x[chart.x.length - 1]] : [chart.x[0] - 1, chart.x[0] + 1];
    const [low, high] = range(chart.y, chart.marks ? 0.28 : 0.07);
    const at = {
      x: (x) => LEFT + ((x - left) / (right - left)) * (width - LEFT - RIGHT - 6) + 3,
      y: (y) => HEIGHT - BOTTOM - ((y - low) / (high - low)) * (HEIGHT - BOTTOM - TOP),
    };
    const picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": chart.title + ", " + chart.first + " to " + chart.last });
    axes(picture, chart, at, width, [left, right], [low, high]);
    const faint = chart.smooth.length ? " faint" : "";
    picture.append(svg("path", { class: "curve" + faint, d: line(chart.x, chart.y, at) }));
    if (chart.smooth.length) picture.append(svg("path", { class: "curve", d: line(chart.x, chart.smooth, at) }));
    if (few) chart.x.forEach((x, i) => picture.append(svg("circle", { class: "dot", cx: at.x(x), cy: at.y(chart.y[i]), r: 3 })));
    if (chart.marks && chart.x.length > 1) named(picture, chart, at);
    hover(picture, chart, at, width);
    holder.replaceChildren(picture);
  }
  return { draw };
})();
