// Line charts in SVG. All charts of the page share the x axis and its zoom.

const AXES = { step: "step", tokens: "tokens (millions)", minutes: "minutes of training" };
// Each curve: [rows, column, style, label, decimals (null: three digits), factor]. A column is a
// name, or a function of the rows. Style "smooth" draws a line fitted to the values, "hidden" only
// lists them in the box at the pointer.
const LOSS = [
  ["training", "loss", "thin", "loss", 4],
  ["training", "mean", "smooth", "smoothed", 4],
  ["validation", "val_loss", "dots", "validation loss", 4],
  ["validation", "perplexity", "hidden", "perplexity", 2],
  ["validation", "bits_per_byte", "hidden", "bits per byte", 4],
];
const BITS = [
  ["training", "loss", "thin", "bits per byte", 4, bitsPerNat],
  ["training", "mean", "smooth", "smoothed", 4, bitsPerNat],
  ["validation", "bits_per_byte", "dots", "validation, bits per byte", 4],
  ["validation", "val_loss", "hidden", "validation loss", 4],
];
const CHARTS = [
  { name: "loss", title: "" },
  // From zero, so that a speed that hardly changes looks like one.
  { name: "lr", title: "learning rate", zero: true,
    curves: [["training", "lr", "line", "learning rate", null]] },
  { name: "grad_norm", title: "gradient norm, before clipping", zero: true,
    curves: [["training", "grad_norm", "line", "gradient norm", 3]] },
  { name: "tokens_per_second", title: "tokens per second", zero: true,
    curves: [["training", "tokens_per_second", "line", "tokens per second", 0]] },
  { name: "step_time", title: "time per step, ms", zero: true,
    curves: [["training", stepTime, "line", "time per step, ms", 1]] },
  { name: "mfu", title: "MFU, % of the hardware's peak", zero: true,
    curves: [["training", "mfu", "line", "MFU, %", 1, 100]] },
  { name: "bits_per_byte", title: "validation, bits per byte",
    curves: [["validation", "bits_per_byte", "dots", "bits per byte", 4]] },
];
const MARGIN = { left: 50, right: 14, top: 24, bottom: 40 };
const NEAR = 6; // pixels

// zoom: [first, last] x, or null; smoothing: share of the points that a smooth line looks at
const view = { unit: "loss", axis: "step", scale: "linear", zoom: null, smoothing: 0.12 };

// A loss per token in nats times this is in bits per byte; NaN: not known for this run.
function bitsPerNat(run) {
  return 1 / (Math.LN2 * (run.bytes_per_token || NaN));
}

// Milliseconds, from the speed and the average number of tokens per step.
function stepTime({ step, tokens, tokens_per_second }) {
  return tokens_per_second.map((speed, i) =>
    (speed && step[i] ? (1e9 * tokens[i]) / step[i] / speed : null));
}

// At each x the value of the line that fits the `share` of all points that are nearest: no lag, as
// a running average would have (local regression with tricube weights; Cleveland 1979).
function smoothed(xs, ys, share) {
  const n = xs.length, near = Math.min(n, Math.max(3, Math.round(share * n)));
  let first = 0;
  return ys.map((own, i) => {
    while (first + near < n && xs[first + near] - xs[i] < xs[i] - xs[first]) first++;
    const reach = 1.001 * Math.max(xs[i] - xs[first], xs[first + near - 1] - xs[i]);
    let w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
    for (let j = first; j < first + near; j++) {
      const x = xs[j] - xs[i], weight = (1 - Math.abs(x / reach) ** 3) ** 3;
      w += weight; wx += weight * x; wy += weight * ys[j];
      wxx += weight * x * x; wxy += weight * x * ys[j];
    }
    const spread = w * wxx - wx * wx;
    return share > 0 && spread > 0 ? (wxx * wy - wx * wxy) / spread : own;
  });
}

// Several runs have a color each; a single one has two, for training and validation.
function color(run, rows, runs) {
  return `var(--curve-${runs > 1 ? run % 6 : Number(rows === "validation")})`;
}

function svg(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// About `count` round numbers from low to high: multiples of 1, 2 or 5 times a power of ten.
function ticks(low, high, count) {
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power * count >= high - low);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    found.push(...[1, 2, 5].map((factor) => factor * power).filter((t) => t >= low && t <= high));
  }
  return found.length > 3 ? found : ticks(low, high, 6); // less than a decade
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 6 });
const tickText = (t) =>
  Math.abs(t) >= 1e5 ? compact.format(t)
    : Math.abs(t) >= 1000 ? t.toLocaleString("en") : String(Number(t.toPrecision(12)));

function valueText(value, decimals) {
  if (decimals === null) return value.toPrecision(3);
  const digits = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  return value.toLocaleString("en", digits);
}

class Chart {
  constructor(spec, runs) {
    Object.assign(this, spec, { runs, pixel: null, dragging: false });
    this.node = document.createElement("div");
    this.node.className = `chart ${spec.name}`;
    this.box = document.createElement("div");
    this.box.className = "pointer-box";
    const resized = () => { // to 0 when it is taken off the page
      if (this.node.clientWidth && this.node.clientWidth !== this.width) this.draw();
    };
    new ResizeObserver(resized).observe(this.node); // also draws it for the first time
  }

  get isLog() {
    return this.name === "loss" && view.scale === "log";
  }

  // The curves of all runs on the present axes. What cannot be drawn, such as NaN, is null.
  curveList() {
    const curves = this.curves ?? (view.unit === "bits" ? BITS : LOSS);
    return this.runs.flatMap((run, i) =>
      curves.map(([rows, column, style, label, decimals, factor = 1]) => {
        const times = typeof factor === "function" ? factor(run) : factor;
        const values = valuesOf(run[rows], column);
        // Points of a smooth line: those that have a value.
        const known = [...values.keys()].filter((j) => values[j] !== null);
        const kept = style === "smooth" ? known : null;
        const at = (name, j) => run[rows][name][kept ? kept[j] : j];
        const own = kept ? kept.map((j) => values[j]) : values;
        const steps = kept ? kept.map((j) => run[rows].step[j]) : [];
        const ys = (kept ? smoothed(steps, own, view.smoothing) : own).map((y) =>
          (y === null || Number.isNaN(times) || (this.isLog && y <= 0) ? null : times * y));
        return { run, rows, style, label, decimals, at, ys, color: color(i, rows, this.runs.length),
          xs: ys.map((_, j) => at(view.axis, j)) };
      }));
  }

  // Choose the range of each axis, and with it the functions from values to pixels.
  layOut() {
    const { left, right, top, bottom } = MARGIN;
    const inner = this.width - left - right, base = this.height - bottom;
    const scaled = (y) => (this.isLog ? Math.log(y) : y);
    const all = this.runs.flatMap((run) => [run.training, run.validation]);
    const xs = all.flatMap((rows) => rows[view.axis]);
    const [x0, x1] = view.zoom ?? extent(xs.length ? [0, ...xs] : [], 0.02);
    const inView = this.shown.filter((curve) => curve.style !== "hidden").flatMap(({ xs, ys }) =>
      ys.filter((y, i) => y !== null && xs[i] >= x0 && xs[i] <= x1));
    let [y0, y1] = extent([...(this.zero ? [0] : []), ...inView.map(scaled)], 0.05);
    if (this.zero) y0 = 0;
    this.x = (value) => left + ((value - x0) / (x1 - x0)) * inner;
    this.xValue = (pixel) => x0 + ((pixel - left) / inner) * (x1 - x0);
    this.y = (value) => base - ((scaled(value) - y0) / (y1 - y0)) * (base - top);
    this.xTicks = ticks(x0, x1, Math.max(2, Math.min(9, inner / 90)));
    this.yTicks = this.isLog ? logTicks(Math.exp(y0), Math.exp(y1))
      : ticks(y0, y1, this.height / 60);
  }

  draw() {
    this.width = this.node.clientWidth;
    this.height = this.name === "loss" ? 380 : 220;
    this.shown = this.curveList();
    this.layOut();
    const { width, height } = this;
    const { left, right, top, bottom } = MARGIN, base = height - bottom, end = width - right;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    for (const tick of this.yTicks) {
      const y = this.y(tick);
      root.append(svg("line", { class: "grid", x1: left, x2: end, y1: y, y2: y }),
        svg("text", { class: "y", x: left - 7, y: y + 4 }, tickText(tick)));
    }
    for (const tick of this.xTicks) {
      const x = this.x(tick);
      root.append(svg("line", { class: "grid", x1: x, x2: x, y1: base, y2: base + 5 }),
        svg("text", { class: "x", x, y: base + 18 }, tickText(tick)));
    }
    root.append(svg("line", { class: "axis", x1: left, x2: end, y1: base, y2: base }),
      svg("text", { class: "x", x: (left + end) / 2, y: height - 5 }, AXES[view.axis]),
      svg("text", { class: "title", x: left, y: 14 }, this.title));
    const clip = `clip-${this.name}`;
    root.append(svg("clipPath", { id: clip },
      svg("rect", { x: left, y: top - 4, width: end - left, height: base - top + 8 })));
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    this.runs.forEach((run, i) => run.marks.forEach((mark) => {
      const x = this.x(mark[view.axis]), attributes = { class: `mark ${mark.kind}` };
      if (this.runs.length > 1) attributes.style = `stroke: ${color(i, "training", 2)}`;
      inside.append(svg("line", { ...attributes, x1: x, x2: x, y1: top, y2: base }));
    }));
    for (const curve of this.shown) this.drawCurve(inside, curve);
    this.pointer = svg("g", {});
    root.append(inside, this.pointer);
    this.listen(root);
    this.node.replaceChildren(root, this.box);
    if (this.pixel === null) this.leave();
    else this.point(this.pixel); // new rows arrived under the pointer
  }

  drawCurve(parent, { xs, ys, style, color }) {
    if (style === "hidden") return;
    let path = "", pen = "M"; // a null leaves a gap
    ys.forEach((y, i) => {
      if (y !== null) path += `${pen}${this.x(xs[i]).toFixed(1)},${this.y(y).toFixed(1)}`;
      pen = y === null ? "M" : "L";
    });
    // Of several runs, validation is dashed with hollow dots: both curves of a run have its color.
    const several = this.runs.length > 1 && style === "dots" ? "several" : "";
    parent.append(svg("path",
      { class: `curve ${style} ${several}`, d: path, style: `stroke: ${color}` }));
    // A line of one point, as at a run's start, would not be seen.
    if (style !== "dots" && ys.filter((y) => y !== null).length !== 1) return;
    const look = several ? `stroke: ${color}; fill: var(--page)` : `fill: ${color}`;
    ys.forEach((y, i) => y !== null && parent.append(
      svg("circle", { cx: this.x(xs[i]), cy: this.y(y), r: 3.5, style: look })));
  }

  // The pointer shows values; dragging the mouse zooms. A finger that drags scrolls the page.
  listen(root) {
    let start = null;
    const at = (event) => event.clientX - root.getBoundingClientRect().left;
    const selection = svg("rect", { class: "selection", y: MARGIN.top, width: 0,
      height: this.height - MARGIN.top - MARGIN.bottom });
    root.append(selection);
    root.addEventListener("pointerdown", (event) => {
      this.point(at(event));
      if (event.pointerType !== "mouse" || event.button) return;
      event.preventDefault(); // no text is selected
      start = at(event);
      this.dragging = true; // and is not redrawn meanwhile
      root.setPointerCapture(event.pointerId);
    });
    root.addEventListener("pointermove", (event) => {
      const here = at(event);
      this.point(here);
      if (start === null) return;
      selection.setAttribute("x", Math.min(start, here));
      selection.setAttribute("width", Math.abs(here - start));
    });
    root.addEventListener("pointerup", (event) => {
      const ends = [start, at(event)].sort((a, b) => a - b).map(this.xValue);
      const moved = start !== null && Math.abs(at(event) - start) > NEAR;
      start = null;
      this.dragging = false;
      if (moved) setView({ zoom: ends });
    });
    root.addEventListener("dblclick", () => setView({ zoom: null }));
    root.addEventListener("pointerleave", () => this.leave());
    root.addEventListener("pointercancel", () => (this.dragging = false));
  }

  leave() {
    this.pixel = null;
    this.box.hidden = true;
    this.pointer.replaceChildren();
  }

  // Show the points nearest to the pointer, and each training curve where it runs past it.
  point(pixel) {
    this.leave();
    this.pixel = pixel;
    const points = this.shown.filter((curve) => curve.xs.length).map((curve) => {
      const i = nearest(curve.xs, this.xValue(pixel)), x = this.x(curve.xs[i]);
      return { ...curve, i, x, y: curve.ys[i], distance: Math.abs(x - pixel) };
    });
    if (!points.length) return;
    const first = points.reduce((a, b) => (b.distance < a.distance ? b : a));
    const passes = ({ rows, xs, i }) => rows === "training" && i > 0 && i < xs.length - 1;
    const near = (point) => point.distance <= first.distance + NEAR || passes(point);
    const marks = this.runs.flatMap((run) => run.marks.map((mark) => ({ run, ...mark })))
      .filter((mark) => Math.abs(this.x(mark[view.axis]) - pixel) <= NEAR);
    this.showBox(pixel, first, points.filter((p) => p.y !== null && near(p)), marks);
  }

  showBox(pixel, first, points, marks) {
    const table = document.createElement("table"), several = this.runs.length > 1;
    const row = (label, text, color = "") => {
      const line = table.insertRow();
      for (const words of [label, text]) line.insertCell().textContent = words;
      line.firstChild.style.color = color;
    };
    const at = (name) => first.at(name, first.i);
    row("step", at("step").toLocaleString("en"));
    row("tokens", `${at("tokens").toFixed(2)} M`);
    row("time", `${at("minutes").toFixed(1)} min`);
    for (const { run, at: ofCurve, i, label, y, decimals, color } of points) {
      const step = ofCurve("step", i), other = step === at("step") ? "" : ` (step ${step})`;
      row(`${several ? `${run.name}: ` : ""}${label}${other}`, valueText(y, decimals), color);
    }
    for (const { run, text, step } of marks) {
      row(several ? run.name : "event", `${text} (step ${step})`);
    }
    const left = pixel > this.width / 2; // of the pointer
    this.box.style.left = left ? "auto" : `${pixel + 14}px`;
    this.box.style.right = left ? `${this.width - pixel + 14}px` : "auto";
    this.box.replaceChildren(table);
    this.box.hidden = false;
    const base = this.height - MARGIN.bottom;
    this.pointer.append(
      svg("line", { class: "axis", x1: first.x, x2: first.x, y1: MARGIN.top, y2: base }),
      ...points.filter((point) => point.style !== "hidden").map(({ x, y, color }) =>
        svg("circle", { cx: x, cy: this.y(y), r: 4, style: `fill: ${color}` })));
  }

  // Download the chart with the style sheet in it; a file has no other way to its colors.
  save() {
    const copy = this.node.querySelector("svg").cloneNode(true);
    copy.prepend(svg("style", {}, document.querySelector("style").textContent));
    copy.setAttribute("data-theme", document.documentElement.dataset.theme);
    copy.setAttribute("width", this.width);
    const text = new XMLSerializer().serializeToString(copy);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    link.download = `${this.name}.svg`;
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

// [lowest, highest] of the values, with a margin on both sides.
function extent(values, margin) {
  if (!values.length) return [0, 1];
  let low = Infinity, high = -Infinity;
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  const more = margin * (high - low) || Math.abs(high) * margin || 1;
  return [low - more, high + more];
}

// Index of the value nearest to x, in ascending values.
function nearest(values, x) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle; else high = middle;
  }
  return x - values[low] <= values[high] - x ? low : high;
}

let charts = [];

function setView(change) {
  Object.assign(view, change);
  document.getElementById("reset").hidden = view.zoom === null;
  for (const chart of charts) if (chart.width) chart.draw();
}

const valuesOf = (rows, column) => (typeof column === "function" ? column(rows) : rows[column]);

// Draw every chart of which there is data. Those that are there already keep their place.
function showCharts(place, runs) {
  const has = ([rows, column]) =>
    runs.some((run) => valuesOf(run[rows], column).some((y) => y !== null));
  const specs = CHARTS.filter((spec) => spec.name === "loss" || spec.curves.some(has));
  if (specs.map((spec) => spec.name).join() !== charts.map((chart) => chart.name).join()) {
    charts = specs.map((spec) => new Chart(spec, runs));
    place.replaceChildren(...charts.map((chart) => chart.node));
    return;
  }
  for (const chart of charts) {
    chart.runs = runs;
    if (!chart.dragging && chart.width) chart.draw();
  }
}
