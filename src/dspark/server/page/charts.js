// Small SVG charts. Each function draws into a <figure>, replacing what it drew before.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 340;
const HEIGHT = 150;
const LEFT = 40;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 30;

function element(name, attributes = {}, text = undefined) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/** 1, 2 or 5 times a power of ten, at or above `value`. */
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((nice) => nice >= value * 0.999999);
}

function short(value) {
  if (value >= 1000) return `${value / 1000}k`;
  return String(Number(value.toPrecision(3)));
}

/** An empty plot with axes from 0 (or `xMin`); returns how to place points in it. */
function plot(figure, { xMax, yMax, xMin = 0, xLabel, yLabel, summary, xTicks = true }) {
  figure.querySelector("svg")?.remove();
  figure.querySelector("figcaption span").textContent = summary;
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": summary });
  const x = (value) => LEFT + ((value - xMin) / (xMax - xMin || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / yMax) * (HEIGHT - TOP - BOTTOM);
  for (const part of [0, 0.5, 1]) {
    const level = y(part * yMax);
    svg.append(element("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: level, y2: level }));
    svg.append(element("text", { x: LEFT - 4, y: level + 4, "text-anchor": "end" }, short(part * yMax)));
    if (xTicks) {
      const value = xMin + part * (xMax - xMin);
      const anchor = ["start", "middle", "end"][part * 2];
      svg.append(element("text", { x: x(value), y: HEIGHT - BOTTOM + 13, "text-anchor": anchor }, short(value)));
    }
  }
  svg.append(element("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, xLabel));
  svg.append(element("text", { x: LEFT + 3, y: TOP + 10 }, yLabel));
  figure.append(svg);
  return { svg, x, y };
}

/** bars: [{label, value, title}] */
export function barChart(figure, bars, options) {
  const yMax = options.yMax ?? niceCeiling(Math.max(0, ...bars.map((bar) => bar.value)));
  const { svg, x, y } = plot(figure, { ...options, yMax, xMax: Math.max(1, bars.length), xTicks: false });
  bars.forEach((bar, index) => {
    const rect = element("rect", {
      class: "bar", x: x(index + 0.15), width: x(0.7) - x(0), y: y(bar.value), height: y(0) - y(bar.value),
    });
    rect.append(element("title", {}, bar.title));
    svg.append(rect);
    svg.append(element("text", { x: x(index + 0.5), y: HEIGHT - BOTTOM + 13, "text-anchor": "middle" }, bar.label));
  });
}

/** points: [[x, y]], joined by a line */
export function lineChart(figure, points, options) {
  const xs = points.map((point) => point[0]);
  const yMax = niceCeiling(Math.max(0, ...points.map((point) => point[1])));
  const { svg, x, y } = plot(figure, {
    ...options, yMax, xMin: Math.min(0, ...xs), xMax: Math.max(0, ...xs),
  });
  const path = points.map(([px, py]) => `${x(px).toFixed(1)},${y(py).toFixed(1)}`).join(" ");
  svg.append(element("polyline", { class: "line", points: path }));
}

/** points: [{x, y, size, title}]; the last one is marked unless `markLast` is false */
export function scatter(figure, points, options) {
  const yMax = options.yMax ?? niceCeiling(Math.max(0, ...points.map((point) => point.y)));
  const xMax = options.xMax ?? niceCeiling(Math.max(0, ...points.map((point) => point.x)));
  const { svg, x, y } = plot(figure, { ...options, xMax, yMax });
  if (options.diagonal) {
    svg.append(element("line", { class: "guide", x1: x(0), y1: y(0), x2: x(xMax), y2: y(yMax) }));
  }
  points.forEach((point, index) => {
    const isLast = options.markLast !== false && index === points.length - 1;
    const mark = element("circle", {
      class: isLast ? "mark now" : options.markLast === false ? "mark" : "mark faint",
      cx: x(point.x), cy: y(point.y), r: isLast ? 5 : (point.size ?? 3),
    });
    mark.append(element("title", {}, point.title));
    svg.append(mark);
  });
}

/** columns: [{title, parts: {phase: value}}], stacked */
export function stackedBars(figure, columns, phases, options) {
  const sum = (parts) => phases.reduce((total, phase) => total + (parts[phase] ?? 0), 0);
  const yMax = niceCeiling(Math.max(0, ...columns.map((column) => sum(column.parts))));
  const slots = Math.max(options.slots, columns.length);
  const { svg, x, y } = plot(figure, { ...options, yMax, xMax: slots, xTicks: false });
  columns.forEach((column, index) => {
    const place = slots - columns.length + index;
    const group = element("g");
    group.append(element("title", {}, column.title));
    let below = 0;
    for (const phase of phases) {
      const value = column.parts[phase] ?? 0;
      group.append(element("rect", {
        class: phase, x: x(place + 0.1), width: x(0.8) - x(0),
        y: y(below + value), height: Math.max(0, y(below) - y(below + value)),
      }));
      below += value;
    }
    svg.append(group);
  });
  phases.forEach((phase, index) => {
    const left = LEFT + index * 50;
    svg.append(element("rect", { class: phase, x: left, y: HEIGHT - 26, width: 8, height: 8 }));
    svg.append(element("text", { x: left + 10, y: HEIGHT - 18 }, options.names[phase]));
  });
}
