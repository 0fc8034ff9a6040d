
"use strict";
// Draws the curves of a comparison as SVG. Every text is set as text, and never parsed as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = document.getElementById("sample").namespaceURI;
const COLOURS = 7; // c0 to c6 in the style
const DASHES = ["", "7 4", "2 3", "8 3 2 3"]; // when there are more groups than colours
const SECONDS = "time/train_seconds";
const MARGIN = { left: 58, right: 14, top: 10, bottom: 40 }; // pixels
const MAX_DOTS = 60; // of a curve whose points are marked
const MAX_ROWS = 12; // of the box beside the cursor
const NEAR = 8; // pixels between the cursor and a point whose value is shown

const hiddenRuns = new Set(); // places in data.runs
const plots = new Map(); // of the charts that are shown
let axis = data.axes[0].key;
let isLogarithmic = false;

// ------------------------------------------------------------------------------ Elements

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function shape(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

function dashesOf(group) {
  return DASHES[Math.floor(group / COLOURS) % DASHES.length];
}

// ------------------------------------------------------------------------------- Numbers

function numberText(value, digits, isPercent = false) {
  const size = Math.abs(value) * (isPercent ? 100 : 1);
  const style = isPercent ? "percent" : "decimal";
  if (size !== 0 && (size < 1e-4 || size >= 1e13)) return value.toExponential(Math.min(digits, 6) - 1);
  return new Intl.NumberFormat("en", { style, maximumSignificantDigits: digits }).format(value);
}

function tickText(value, step, isPercent) {
  const digits = Math.ceil(Math.log10(Math.max(Math.abs(value), step) / step) - 1e-9) + 1;
  const known = Math.min(Math.max(digits, 1), 17);
  if (isPercent || Math.abs(value) < 1e4 || Math.abs(value) >= 1e13) {
    return numberText(value, known, isPercent);
  }
  return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: known }).format(value);
}

// The unit of an axis of times that ends here: seconds, minutes or hours.
function timeUnit(seconds) {
  if (seconds >= 36000) return { size: 3600, name: "h" };
  if (seconds >= 600) return { size: 60, name: "min" };
  return { size: 1, name: "s" };
}

function positionText(value) {
  if (axis === SECONDS) {
    const unit = timeUnit(value);
    return `${numberText(value / unit.size, 6)} ${unit.name}`;
  }
  const number = new Intl.NumberFormat("en", { maximumFractionDigits: 2 }).format(value);
  return axis === "progress/samples" ? `${number} samples` : `update ${number}`;
}

// Round places on a linear axis, and the distance between them.
function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 5, 10].find((candidate) => candidate * power >= rough * 0.999) ?? 10;
  const step = factor * power;
  const first = Math.ceil(low / step - 1e-9);
  const places = [];
  for (let number = 0; number <= 2 * count; number += 1) {
    const place = (first + number) * step;
    if (place > high + step * 1e-9) break;
    places.push(place);
  }
  return { places, step };
}

// Powers of ten, with their multiples by 2 and 5 if there is room, from two logarithms.
function logarithmicTicks(low, high, count) {
  if (high - low < 1) return linearTicks(10 ** low, 10 ** high, count).places;
  const factors = high - low <= 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((high - low) / count));
  const places = [];
  for (let power = Math.floor(low / every) * every; power <= high; power += every) {
    for (const factor of factors) {
      const place = factor * 10 ** power;
      if (Math.log10(place) >= low && Math.log10(place) <= high) places.push(place);
    }
  }
  return places;
}

// -------------------------------------------------------------------------------- Curves

// The curves of a chart that are not hidden, with their points on the present axes.
function visibleCurves(chart) {
  const curves = [];
  data.groups.forEach((group, number) => {
    const runs = group.runs.filter((run) => !hiddenRuns.has(run));
    for (const { name, stage } of chart.series) {
      const mean = entry(group.means, name);
      for (const run of runs) {
        const curve = runCurve(data.runs[run], name);
        if (curve) curves.push({ ...curve, stage, group: number, kind: mean ? "seed" : "run" });
      }
      if (mean && runs.length > 0) {
        const label = `${group.label}, mean of ${mean.count}`;
        curves.push({ ...meanCurve(mean), label, stage, group: number, kind: "mean" });
      }
    }
  });
  return curves;
}

// A run may have a metric of any name, even that of a method of objects.
function entry(table, name) {
  return Object.hasOwn(table, name) ? table[name] : undefined;
}

function runCurve(run, name) {
  const curve = entry(run.curves, name);
  if (!curve) return null;
  const points = curve.y.map((y, index) => ({ x: run.x[axis][curve.places ? curve.places[index] : index], y }));
  return { label: run.name, points: points.filter(canBeDrawn) };
}

function meanCurve(mean) {
  const points = mean.y.map((y, index) => ({ x: mean.x[axis][index], y, deviation: mean.deviation[index] }));
  return { points: points.filter(canBeDrawn) };
}

function canBeDrawn(point) {
  return point.x !== null && (!isLogarithmic || point.y > 0);
}

// The limits of the axes and the functions that turn values into pixels.
function scales(curves, width, height) {
  let right = 0;
  let left = 0;
  let low = Infinity;
  let high = -Infinity;
  for (const { points } of curves) {
    for (const { x, y, deviation = 0 } of points) {
      left = Math.min(left, x);
      right = Math.max(right, x);
      const bottom = y - deviation;
      low = Math.min(low, isLogarithmic && bottom <= 0 ? y : bottom);
      high = Math.max(high, y + deviation);
    }
  }
  if (right === left) right = left + 1;
  const toAxis = isLogarithmic ? Math.log10 : (value) => value;
  let bottom = toAxis(low);
  let top = toAxis(high);
  const room = (top - bottom) * 0.04 || Math.abs(top) * 0.1 || 1;
  bottom -= room;
  top += room;
  const plotWidth = width - MARGIN.left - MARGIN.right;
  const plotHeight = height - MARGIN.top - MARGIN.bottom;
  const xPixel = (x) => MARGIN.left + ((x - left) / (right - left)) * plotWidth;
  const yPixel = (y) => {
    const value = isLogarithmic ? Math.log10(Math.max(y, 10 ** bottom)) : y;
    return MARGIN.top + ((top - value) / (top - bottom)) * plotHeight;
  };
  return { left, right, bottom, top, xPixel, yPixel };
}

function path(points, scale, yOf = (point) => point.y) {
  const pairs = points.map((point) => `${scale.xPixel(point.x).toFixed(1)} ${scale.yPixel(yOf(point)).toFixed(1)}`);
  return pairs.length ? `M${pairs.join("L")}` : "";
}

// -------------------------------------------------------------------------------- Charts

function makePlot(chart) {
  const svg = shape("svg", { "aria-hidden": "true" });
  const tip = element("div", { className: "tip", hidden: true });
  const box = element("div", { className: "plot", tabIndex: 0 }, svg, tip);
  // A slider is what a screen reader calls something that the arrow keys move.
  box.setAttribute("role", "slider");
  box.setAttribute("aria-label", `${chart.heading}: place on the curves`);
  const absent = element("p", { className: "absent" });
  const caption = element("figcaption", { textContent: chart.heading });
  const figure = element("figure", {}, caption, box, absent);
  const plot = { chart, figure, box, svg, tip, absent, curves: [], scale: null, cursor: null };
  box.addEventListener("pointermove", (event) => followPointer(plot, event));
  box.addEventListener("pointerdown", (event) => followPointer(plot, event));
  box.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") hideCursor(plot); // a finger is lifted to read the values
  });
  box.addEventListener("blur", () => hideCursor(plot));
  box.addEventListener("keydown", (event) => followKey(plot, event));
  return plot;
}

function draw(plot) {
  const { svg, chart } = plot;
  const width = Math.max(plot.box.clientWidth, 200);
  const height = Math.round(Math.min(Math.max(width * 0.55, 230), 340));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  svg.replaceChildren();
  hideCursor(plot);
  plot.curves = visibleCurves(chart);
  nameAbsentRuns(plot);
  plot.curves = plot.curves.filter((curve) => curve.points.length > 0);
  plot.scale = plot.curves.length ? scales(plot.curves, width, height) : null;
  if (!plot.scale) {
    shape("text", { class: "tick", x: width / 2, y: height / 2, "text-anchor": "middle" }, svg).textContent = "nothing to show";
    return;
  }
  drawAxes(plot, width, height);
  for (const curve of plot.curves) drawCurve(curve, plot.scale, svg);
  plot.box.setAttribute("aria-valuemin", plot.scale.left);
  plot.box.setAttribute("aria-valuemax", plot.scale.right);
  plot.box.setAttribute("aria-valuenow", plot.scale.left);
}

function drawAxes(plot, width, height) {
  const { scale, svg, chart } = plot;
  const end = width - MARGIN.right;
  const floor = height - MARGIN.bottom;
  const unit = axis === SECONDS ? timeUnit(scale.right) : { size: 1, name: "" };
  const rows = 5;
  const yTicks = isLogarithmic
    ? { places: logarithmicTicks(scale.bottom, scale.top, rows) }
    : linearTicks(scale.bottom, scale.top, rows);
  for (const place of yTicks.places) {
    const y = scale.yPixel(place);
    shape("path", { class: "grid", d: `M${MARGIN.left} ${y}H${end}` }, svg);
    const label = shape("text", { class: "tick", x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, svg);
    label.textContent = yTicks.step ? tickText(place, yTicks.step, chart.is_percent) : numberText(place, 3, chart.is_percent);
  }
  const columns = Math.max(3, Math.min(8, Math.floor(width / 90)));
  const { places, step } = linearTicks(scale.left / unit.size, scale.right / unit.size, columns);
  for (const place of places) {
    if (axis !== SECONDS && !Number.isInteger(place)) continue; // there is no half update
    const x = scale.xPixel(place * unit.size);
    shape("path", { class: "grid", d: `M${x} ${floor}v5` }, svg);
    shape("text", { class: "tick", x, y: floor + 18, "text-anchor": "middle" }, svg).textContent = tickText(place, step);
  }
  shape("path", { class: "grid", d: `M${MARGIN.left} ${floor}H${end}` }, svg);
  const heading = data.axes.find(({ key }) => key === axis).heading + (unit.name && `, ${unit.name}`);
  const x = (MARGIN.left + end) / 2;
  shape("text", { class: "axis-heading", x, y: height - 5, "text-anchor": "middle" }, svg).textContent = heading;
}

function drawCurve(curve, scale, svg) {
  const { points, stage, kind } = curve;
  const group = shape("g", { class: `c${curve.group % COLOURS}` }, svg);
  if (kind === "mean") {
    const upper = path(points, scale, (point) => point.y + point.deviation);
    const lower = path([...points].reverse(), scale, (point) => point.y - point.deviation);
    shape("path", { class: "band", d: `${upper}${lower.replace("M", "L")}Z` }, group);
  }
  const isTraining = stage === "training" || stage === "";
  const look = kind === "seed" ? "seed" : isTraining ? "training" : "evaluation";
  const line = shape("path", { class: `line ${look}`, d: path(points, scale) }, group);
  if (dashesOf(curve.group)) line.setAttribute("stroke-dasharray", dashesOf(curve.group));
  const hasDots = points.length === 1 || (!isTraining && kind !== "seed" && points.length <= MAX_DOTS);
  for (const point of hasDots ? points : []) drawDot(point, curve, scale, group);
}

function drawDot(point, { stage, kind }, scale, parent) {
  const x = scale.xPixel(point.x);
  const y = scale.yPixel(point.y);
  const look = kind === "seed" ? "seed-dot" : "dot";
  if (stage === "test") shape("rect", { class: look, x: x - 3, y: y - 3, width: 6, height: 6 }, parent);
  else shape("circle", { class: look, cx: x, cy: y, r: 3 }, parent);
}

// Say which runs have the metric but no point on the present axes.
function nameAbsentRuns(plot) {
  const names = plot.curves
    .filter((curve) => curve.points.length === 0)
    .map((curve) => (curve.stage ? `${curve.label} (${curve.stage})` : curve.label));
  const reason = isLogarithmic ? "no positive value here" : "not logged here";
  plot.absent.textContent = names.length ? `${reason}: ${[...new Set(names)].join(", ")}` : "";
}

// -------------------------------------------------------------------------------- Cursor

function followPointer(plot, event) {
  if (!plot.scale) return;
  const frame = plot.svg.getBoundingClientRect();
  const pointer = { x: event.clientX - frame.left, y: event.clientY - frame.top };
  let nearest = null;
  let least = Infinity;
  for (const curve of plot.curves) {
    for (const point of curve.points) {
      const distance = Math.hypot(plot.scale.xPixel(point.x) - pointer.x, plot.scale.yPixel(point.y) - pointer.y);
      if (distance < least) {
        least = distance;
        nearest = { curve, point };
      }
    }
  }
  showCursor(plot, nearest.point.x, nearest.curve);
}

function followKey(plot, event) {
  if (event.key === "Escape") hideCursor(plot);
  if (!plot.scale) return;
  const places = [...new Set(plot.curves.flatMap(({ points }) => points.map(({ x }) => x)))].sort((a, b) => a - b);
  const last = places.length - 1;
  const page = Math.max(1, Math.round(places.length / 10));
  const present = plot.cursor === null ? -1 : places.findIndex((place) => place >= plot.cursor);
  const moves = {
    ArrowRight: present + 1, ArrowUp: present + 1, ArrowLeft: present - 1, ArrowDown: present - 1,
    PageUp: present + page, PageDown: present - page, Home: 0, End: last,
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  showCursor(plot, places[Math.min(Math.max(moves[event.key], 0), last)], null);
}

// Show the values of all curves that have a point near a place.
function showCursor(plot, place, nearestCurve) {
  const { scale, svg, tip, box } = plot;
  removeCursor(plot);
  plot.cursor = place;
  const layer = shape("g", { "data-cursor": "" }, svg);
  const x = scale.xPixel(place);
  const floor = svg.viewBox.baseVal.height - MARGIN.bottom;
  shape("path", { class: "cursor", d: `M${x} ${MARGIN.top}V${floor}` }, layer);
  const rows = [];
  for (const curve of plot.curves) {
    const point = closest(curve.points, place);
    if (Math.abs(scale.xPixel(point.x) - x) > NEAR) continue;
    const colour = `c${curve.group % COLOURS}`;
    shape("circle", { class: `marker ${colour}`, cx: scale.xPixel(point.x), cy: scale.yPixel(point.y), r: 3.5 }, layer);
    rows.push({ curve, point, colour, isNearest: curve === nearestCurve });
  }
  // The curve that was pointed at comes first, and single seeds come last.
  const rank = ({ isNearest, curve }) => (isNearest ? 0 : curve.kind === "seed" ? 2 : 1);
  rows.sort((one, other) => rank(one) - rank(other));
  fillTip(plot, place, rows);
  const isRight = x > svg.viewBox.baseVal.width / 2;
  tip.hidden = false;
  tip.style.left = isRight ? "" : `${x + 14}px`;
  tip.style.right = isRight ? `${svg.viewBox.baseVal.width - x + 14}px` : "";
  box.setAttribute("aria-valuenow", place);
}

function closest(points, place) {
  let best = points[0];
  for (const point of points) {
    if (Math.abs(point.x - place) < Math.abs(best.x - place)) best = point;
  }
  return best;
}

function fillTip(plot, place, rows) {
  const isPercent = plot.chart.is_percent;
  const table = element("table");
  const sentences = [];
  for (const { curve, point, colour, isNearest } of rows.slice(0, MAX_ROWS)) {
    const name = curve.stage ? `${curve.label} (${curve.stage})` : curve.label;
    let value = numberText(point.y, 5, isPercent);
    if (point.deviation !== undefined) value += ` ± ${numberText(point.deviation, 2, isPercent)}`;
    const swatch = element("i", { className: colour });
    const row = element("tr", { className: isNearest ? "nearest" : "" });
    row.append(element("td", {}, swatch, name), element("td", { textContent: value }));
    table.append(row);
    sentences.push(`${name} ${value}`);
  }
  const heading = element("div", { textContent: positionText(place) });
  const left = rows.length - MAX_ROWS;
  const more = left > 0 ? [element("div", { textContent: `and ${left} more` })] : [];
  plot.tip.replaceChildren(heading, table, ...more);
  plot.box.setAttribute("aria-valuetext", `${positionText(place)}: ${sentences.join("; ")}`);
}

function removeCursor(plot) {
  plot.svg.querySelector("[data-cursor]")?.remove();
}

function hideCursor(plot) {
  removeCursor(plot);
  plot.cursor = null;
  plot.tip.hidden = true;
}

// ------------------------------------------------------------------------------ Controls

function drawAll() {
  for (const plot of plots.values()) draw(plot);
}

function showCharts() {
  const shown = data.charts.filter((chart) => chart.is_shown);
  for (const chart of plots.keys()) if (!chart.is_shown) plots.delete(chart);
  for (const chart of shown) if (!plots.has(chart)) plots.set(chart, makePlot(chart));
  document.getElementById("charts").replaceChildren(...shown.map((chart) => plots.get(chart).figure));
  drawAll();
}

function choice(type, text, isChecked, onChange) {
  const input = element("input", { type, checked: isChecked });
  input.addEventListener("change", () => onChange(input));
  return { input, label: element("label", {}, input, text) };
}

function makeAxes() {
  for (const { key, heading } of data.axes) {
    const { input, label } = choice("radio", heading, key === axis, () => {
      axis = key;
      drawAll();
    });
    input.name = "axis";
    input.disabled = !data.runs.some((run) => run.x[key].some((value) => value !== null));
    label.classList.toggle("disabled", input.disabled);
    document.getElementById("axes").append(label);
  }
}

function makeMetrics() {
  const choices = document.querySelector("#metrics .choices");
  for (const chart of data.charts) {
    const { label } = choice("checkbox", chart.heading, chart.is_shown, (input) => {
      chart.is_shown = input.checked;
      showCharts();
    });
    choices.append(label);
  }
}

function sampleLine(group) {
  const svg = shape("svg", { class: `c${group % COLOURS}`, viewBox: "0 0 28 10", "aria-hidden": "true" });
  const line = shape("path", { class: "line evaluation", d: "M0 5H28" }, svg);
  if (dashesOf(group)) line.setAttribute("stroke-dasharray", dashesOf(group));
  return svg;
}

function makeLegend() {
  const list = element("ul");
  const isShort = data.runs.length <= 12;
  data.groups.forEach((group, number) => {
    const boxes = [];
    const whole = choice("checkbox", group.label, true, (input) => {
      for (const box of boxes) box.checked = input.checked;
      for (const run of group.runs) setHidden(run, !input.checked);
      drawAll();
    });
    whole.input.after(sampleLine(number));
    const item = element("li", {}, whole.label);
    if (group.runs.length > 1) {
      const runs = element("ul");
      for (const run of group.runs) {
        const { input, label } = choice("checkbox", data.runs[run].name, true, () => {
          setHidden(run, !input.checked);
          const count = boxes.filter((box) => box.checked).length;
          whole.input.checked = count > 0;
          whole.input.indeterminate = count > 0 && count < boxes.length;
          drawAll();
        });
        boxes.push(input);
        runs.append(element("li", {}, label));
      }
      const summary = element("summary", { textContent: `${group.runs.length} runs` });
      item.append(element("details", { open: isShort }, summary, runs));
    }
    list.append(item);
  });
  document.getElementById("legend").append(list);
}

function setHidden(run, isHidden) {
  if (isHidden) hiddenRuns.add(run);
  else hiddenRuns.delete(run);
}

document.getElementById("logarithmic").addEventListener("change", (event) => {
  isLogarithmic = event.target.checked;
  drawAll();
});
makeAxes();
makeMetrics();
makeLegend();
showCharts();
if (data.charts.length === 0) document.getElementById("charts").textContent = "No run has logged a metric.";
let lastWidth = document.getElementById("charts").clientWidth;
new ResizeObserver(([entry]) => {
  if (entry.contentRect.width === lastWidth) return;
  lastWidth = entry.contentRect.width;
  drawAll();
}).observe(document.getElementById("charts"));
