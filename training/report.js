"use strict";
// The page's buttons and the scored passage. The curves are bokeh's.

const AXES = { step: "step", tokens: "tokens (millions)", minutes: "minutes of training" };

const plots = () => Bokeh.documents.flatMap((document) => document.roots());
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// bokeh draws on a canvas, which style sheets do not reach: its colours are set here.
function paint() {
  for (const plot of plots()) {
    for (const axis of [...plot.below, ...plot.left]) {
      axis.axis_label_text_color = axis.major_label_text_color = colour("--soft");
      axis.axis_line_color = axis.major_tick_line_color = colour("--line");
      axis.minor_tick_line_color = null;
    }
    for (const grid of plot.center) {
      if (grid.grid_line_color !== null) grid.grid_line_color = colour("--line");
    }
    if (plot.title) plot.title.text_color = colour("--ink");
  }
}

// A canvas is not drawn anew for the paper: as it is on the screen it is made as wide as its place,
// which is the paper, between margins of 1 cm or so, or half of it.
const PAPER = 700;
function fitCharts(paper) {
  const all = [...document.querySelectorAll(".chart, .charts > div")];
  const widths = all.map((chart) => chart.clientWidth);
  all.forEach((chart, i) => {
    const place = chart.className === "chart" ? paper : (paper - 24) / 2;
    chart.style.zoom = paper && widths[i] ? place / widths[i] : "";
  });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (window.Bokeh) paint();
}

function setAxis(field) {
  for (const plot of plots()) {
    for (const renderer of plot.renderers) {
      for (const glyph of [renderer.glyph, renderer.nonselection_glyph, renderer.muted_glyph]) {
        if (glyph && glyph.x) glyph.x = { field };
      }
    }
    plot.below[0].axis_label = AXES[field];
    plot.reset.emit();
  }
}

function setScale(scale) {
  for (const name of ["linear", "log"]) {
    document.getElementById(`loss-${name}`).hidden = name !== scale;
  }
  window.dispatchEvent(new Event("resize")); // a plot that was hidden has no width yet
}

function choose(button) {
  for (const other of button.parentElement.children) {
    other.setAttribute("aria-pressed", String(other === button));
  }
  ({ axis: setAxis, scale: setScale, theme: setTheme })[button.dataset.sets](button.dataset.value);
}

// The scored passage: token by token, at the evaluation that the slider names.

function startPassage(data) {
  const place = document.getElementById("passage");
  const slider = document.getElementById("evaluation");
  let current = null;

  function show() {
    const snapshot = data.snapshots[slider ? slider.value : 0];
    document.getElementById("passage-step").textContent = snapshot.title;
    place.replaceChildren(...snapshot.tokens.map(tokenSpan));
    if (current !== null) explain(Math.min(current, snapshot.tokens.length - 1));
  }

  function tokenSpan([text, loss], index) {
    const span = document.createElement("span");
    const share = Math.min(1, loss / data.worst);
    span.style.background = `rgb(var(--heat), ${(0.85 * share).toFixed(3)})`;
    span.dataset.index = index;
    if (text === "\n" || text.endsWith("\n")) {
      const sign = document.createElement("i");
      sign.className = "sign";
      sign.textContent = "\u21b5";
      span.append(text.replace(/\n+$/, ""), sign, text.match(/\n+$/)[0]);
    } else {
      span.textContent = text;
    }
    return span;
  }

  function explain(index) {
    const snapshot = data.snapshots[slider ? slider.value : 0];
    const [text, loss, likeliest] = snapshot.tokens[index];
    const box = document.getElementById("token");
    current = index;
    place.querySelector("[aria-current]")?.removeAttribute("aria-current");
    const span = place.children[index];
    span.setAttribute("aria-current", "true");
    const rows = likeliest.map(([other, chance]) => {
      const row = document.createElement("tr");
      row.className = other === text ? "hit" : "";
      row.append(cell(JSON.stringify(other), "mono"), cell(percent(chance), "right"));
      return row;
    });
    const table = document.createElement("table");
    table.append(...rows);
    const head = document.createElement("div");
    head.textContent = `loss ${loss.toFixed(3)} nats, ${percent(Math.exp(-loss))} given to it`;
    const name = document.createElement("b");
    name.className = "mono";
    name.textContent = JSON.stringify(text);
    box.replaceChildren(name, head, table);
    box.style.display = "block";
    const at = span.getClientRects()[0] || span.getBoundingClientRect();
    const left = Math.min(at.left, document.documentElement.clientWidth - box.offsetWidth - 8);
    box.style.left = `${Math.max(8, left) + scrollX}px`;
    box.style.top = `${at.bottom + scrollY + 6}px`;
  }

  function cell(text, kind) {
    const td = document.createElement("td");
    td.className = kind;
    td.textContent = text;
    return td;
  }

  function leave() {
    document.getElementById("token").style.display = "none";
    place.querySelector("[aria-current]")?.removeAttribute("aria-current");
    current = null;
  }

  place.addEventListener("pointerover", (event) => {
    const span = event.target.closest("[data-index]");
    if (span) explain(Number(span.dataset.index));
  });
  place.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
  place.addEventListener("blur", leave);
  place.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") leave();
    if (by === undefined) return;
    event.preventDefault();
    explain(Math.max(0, Math.min(place.children.length - 1, (current ?? -by) + by)));
  });
  slider?.addEventListener("input", show);
  show();
}

const percent = (share) => (share < 0.001 ? "< 0.1%" : `${(100 * share).toFixed(1)}%`);

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => (dark.matches ? "dark" : "light");
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-sets]");
    if (button) choose(button);
  });
  document.getElementById("changes-only")?.addEventListener("change", (event) => {
    document.body.classList.toggle("changes-only", event.target.checked);
  });
  const passage = document.getElementById("passage-data");
  if (passage) startPassage(JSON.parse(passage.textContent));
  const press = () => {
    const button = document.querySelector(`button[data-value="${theme()}"]`);
    button ? choose(button) : setTheme(theme());
  };
  dark.addEventListener("change", press);
  let before = theme();
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    setTheme("light");
    fitCharts(PAPER);
  });
  addEventListener("afterprint", () => {
    setTheme(before);
    fitCharts(null);
  });
  press();
  const painted = setInterval(() => {
    if (!window.Bokeh || !plots().length) return;
    clearInterval(painted);
    paint();
  }, 30);
}

start();
