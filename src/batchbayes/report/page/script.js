"use strict";
(() => {
  const { points, explorer, thumbnails } = JSON.parse(document.getElementById("data").textContent);
  const byId = (name) => document.getElementById(name);
  const showPicture = (element, index, wanted) => {
    const [width, height] = thumbnails.size, columns = thumbnails.columns;
    const scale = Math.max(1, Math.round(wanted / Math.max(width, height)));
    const rows = Math.ceil(thumbnails.keys.length / columns);
    element.classList.add("thumb", "small-picture");
    Object.assign(element.style, {
      width: `${width * scale}px`, height: `${height * scale}px`,
      backgroundImage: `url(${byId("sprite").src})`,
      backgroundSize: `${width * columns * scale}px ${height * rows * scale}px`,
      backgroundPosition: `-${(index % columns) * width * scale}px -${Math.floor(index / columns) * height * scale}px`,
    });
  };
  for (const element of document.querySelectorAll("[data-picture]")) showPicture(element, Number(element.dataset.picture), 96);

  if (!explorer) return;

  const SVG = "http://www.w3.org/2000/svg";
  const [left, right, top, bottom] = [62, 628, 12, 352];
  // Uncertainties of classes crowd near zero. A square-root scale spreads them out, and a logarithm those near no doubt.
  const scaled = (scale, values, start, end) => {
    const highest = Math.max(...values) || 1;
    const lowest = scale === "log" ? Math.max(1e-6, Math.min(highest / 10, ...values)) : 0;
    const bend = { root: Math.sqrt, log: Math.log10, plain: (value) => value }[scale];
    const place = (value) => start + ((bend(Math.max(lowest, value)) - bend(lowest)) / (bend(highest) - bend(lowest))) * (end - start);
    return { place, ticks: ticks(scale, lowest, highest, (value) => (place(value) - start) / (end - start)) };
  };
  // Round numbers: evenly spaced on a plain axis, at least a seventh of the axis apart on a bent one.
  const ticks = (scale, lowest, highest, share) => {
    const round = [];
    const first = scale === "log" ? Math.ceil(Math.log10(lowest)) : Math.floor(Math.log10(highest)) - 2;
    for (let power = first; power <= Math.log10(highest); power += 1) {
      round.push(...(scale === "log" ? [1] : [1, 2, 5]).map((digit) => digit * 10 ** power));
    }
    if (scale === "plain") {
      const step = round.find((value) => highest / value <= 6);
      return Array.from({ length: Math.floor(highest / step) + 1 }, (_, i) => i * step);
    }
    const found = scale === "root" ? [0] : [];
    for (const value of round) {
      if (value <= highest && (!found.length || share(value) - share(found.at(-1)) >= 1 / 7)) found.push(value);
    }
    return found;
  };
  const xAxis = scaled(explorer.x_scale, [...points.map((p) => p.x), ...explorer.thresholds], left, right);
  const yAxis = scaled(explorer.y_scale, points.map((p) => p.y), ...(explorer.y_down ? [top, bottom] : [bottom, top]));
  const [toX, toY] = [xAxis.place, yAxis.place];
  const short = (value) => Number(value.toPrecision(3)).toString();
  const risk = (value) => (explorer.percent ? (100 * value).toFixed(1) + " %" : short(value));
  const make = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  const chart = byId("chart");
  const names = { right: "right", wrong: "wrong", strange: "strange input", plain: explorer.y === "error_rate" ? "test image" : "test example" };

  // A shape for each kind, so that they can be told apart without colour.
  const shape = (kind, x, y) => {
    if (kind === "wrong") return make("path", { d: `M${x - 4.5} ${y + 4}L${x} ${y - 5}L${x + 4.5} ${y + 4}Z` });
    if (kind === "strange") return make("rect", { x: x - 3.2, y: y - 3.2, width: 6.4, height: 6.4 });
    return make("circle", { cx: x, cy: y, r: 4 });
  };

  const drawAxes = () => {
    chart.append(make("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    chart.append(make("line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom }));
    for (const x of xAxis.ticks) chart.append(make("text", { x: toX(x), y: bottom + 18, "text-anchor": "middle" }, short(x)));
    for (const y of yAxis.ticks) chart.append(make("text", { x: left - 6, y: toY(y) + 5, "text-anchor": "end" }, short(y)));
    chart.append(make("text", { x: (left + right) / 2, y: bottom + 40, "text-anchor": "middle" }, explorer.x_label));
    const middle = (top + bottom) / 2;
    const label = { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` };
    chart.append(make("text", label, explorer.y_label));
  };

  const aside = make("rect", { class: "aside", y: top, height: bottom - top });
  const limit = make("line", { class: "limit", y1: top, y2: bottom });
  chart.append(aside);
  drawAxes();
  // Those that matter most are drawn last, on top.
  const layer = { right: 0, plain: 0, strange: 1, wrong: 2 };
  const dots = points.map((point, index) => {
    const dot = shape(point.kind, toX(point.x), toY(point.y));
    dot.setAttribute("class", `dot ${point.kind}`);
    dot.dataset.index = index;
    return dot;
  });
  dots.slice().sort((a, b) => layer[points[a.dataset.index].kind] - layer[points[b.dataset.index].kind]).forEach((dot) => chart.append(dot));
  chart.append(limit);

  for (const kind of Object.keys(names).filter((name) => points.some((point) => point.kind === name))) {
    const entry = document.createElement("span");
    const key = make("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" });
    const mark = shape(kind, 7, 7);
    mark.setAttribute("class", `dot ${kind}`);
    key.append(mark);
    entry.append(key, names[kind]);
    byId("legend").append(entry);
  }

  let chosen = -1;
  const choose = (index) => {
    if (chosen >= 0) dots[chosen].classList.remove("chosen");
    chosen = index;
    const point = points[index];
    dots[index].classList.add("chosen");
    const picture = document.createElement("div");
    if (point.picture !== null) showPicture(picture, point.picture, 144);
    const title = document.createElement("h3");
    title.textContent = point.title;
    const list = document.createElement("ul");
    for (const line of point.lines) list.append(Object.assign(document.createElement("li"), { textContent: line }));
    byId("detail").replaceChildren(picture, title, list);
  };

  // The nearest dot, so that small ones are easy to hit with a finger too.
  const nearest = (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 640, y = ((event.clientY - box.top) / box.height) * 400;
    let best = -1, distance = 24 * 24;
    points.forEach((point, index) => {
      const away = (toX(point.x) - x) ** 2 + (toY(point.y) - y) ** 2;
      if (away < distance) [best, distance] = [index, away];
    });
    if (best >= 0) choose(best);
  };
  chart.addEventListener("pointermove", nearest);
  chart.addEventListener("pointerdown", nearest);
  chart.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
    let next = null;
    if (event.key in steps) next = Math.min(points.length - 1, Math.max(0, chosen + steps[event.key]));
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = points.length - 1;
    if (next === null || !points.length) return;
    event.preventDefault();
    choose(next);
  });

  const slider = byId("threshold");
  const last = explorer.thresholds.length - 1;
  const update = () => {
    const index = Number(slider.value), threshold = explorer.thresholds[index];
    byId("limit").textContent = `${explorer.x_label} ${short(threshold)}`;
    byId("kept").textContent = (100 * explorer.coverage[index]).toFixed(1) + " %";
    byId("risk").textContent = risk(explorer.risk[index]);
    slider.setAttribute("aria-valuetext", `${byId("kept").textContent} answered, ${explorer.risk_label} ${byId("risk").textContent}`);
    const x = toX(threshold);
    aside.setAttribute("x", x);
    aside.setAttribute("width", Math.max(0, right - x));
    limit.setAttribute("x1", x);
    limit.setAttribute("x2", x);
    points.forEach((point, i) => dots[i].classList.toggle("beyond", point.x > threshold));
  };
  slider.max = last;
  const start = explorer.thresholds.findIndex((threshold) => threshold >= explorer.threshold);
  slider.value = start < 0 ? last : start;
  byId("risk-all").textContent = risk(explorer.risk[last]);
  slider.addEventListener("input", update);
  update();
})();
