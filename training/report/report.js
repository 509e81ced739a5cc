// Fills the page from its data: text, tables, buttons and the scored passage.

const data = JSON.parse(document.getElementById("page-data").textContent);
const byId = (id) => document.getElementById(id);
const percent = (share) => (share < 0.001 ? "< 0.1%" : `${(100 * share).toFixed(1)}%`);
const single = data.runs.length === 1;

// An element with a class and children: nodes, or strings, which stay text.
function make(tag, kind, ...children) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...children);
  return node;
}

function table(rows, head = []) {
  const line = (tag) => (cells) => make("tr", "", ...cells.map((cell) => make(tag, "", cell)));
  return make("table", "", ...(head.length ? [line("th")(head)] : []), ...rows.map(line("td")));
}

// Fill the last element of a section, and show the section, if there is anything to show.
function section(id, nodes) {
  byId(id).hidden = !nodes.length;
  byId(id).lastElementChild.append(...nodes);
}

function key(kind, color, text) {
  const line = make("i", kind);
  line.style.color = color;
  return make("span", "key", line, text);
}

function legend() {
  const of = (run, rows) => color(run, rows, data.runs.length);
  const keys = single
    ? [key("", of(0, "training"), "training, smoothed"),
      key("thin", of(0, "training"), "as logged"),
      key("", of(0, "validation"), "validation")]
    : [...data.runs.map((run, i) => key("", of(i, "training"), run.name)),
      key("thin", "var(--soft)", "training; dots: validation")];
  const marks = data.runs.flatMap((run) => run.marks.map((mark) => mark.kind));
  for (const kind of ["resumed", "warning"]) {
    if (marks.includes(kind)) keys.push(key("dashed", `var(--${kind})`, kind));
  }
  return keys;
}

function comparison([head, ...rows]) {
  const keyOf = (name, i) => key("", color(i, "training", rows.length), name);
  return table(rows.map(([name, ...cells], i) => [keyOf(name, i), ...cells]), head);
}

function sample({ name, prompt, text }) {
  const rest = text.startsWith(prompt) ? text.slice(prompt.length) : text;
  return make("div", "card", make("b", "", name), make("pre", "", make("mark", "", prompt), rest));
}

function configSection([name, options]) {
  const rows = options.map((option) => {
    const cells = [option.name, option.value, option.default].map((text) => make("td", "", text));
    const row = make("tr", option.changed ? "changed" : "same", ...cells);
    row.title = option.help;
    return row;
  });
  const head = [name, "", "default"].map((text) => make("th", "", text));
  return make("table", "", make("tr", "", ...head), ...rows);
}

// The scored passage at the evaluation that the slider selects.
function startPassage({ worst, snapshots }) {
  const place = byId("passage"), slider = byId("evaluation"), box = byId("token");
  let current = null; // index of the token that is explained

  const tokens = () => snapshots[slider.value].tokens;

  function show() {
    byId("passage-step").textContent = snapshots[slider.value].title;
    place.replaceChildren(...tokens().map(tokenSpan));
    if (current !== null) explain(Math.min(current, tokens().length - 1));
  }

  function tokenSpan([text, loss], index) {
    const end = text.match(/\n*$/)[0]; // a line end gets a visible sign
    const span = make("span", "", text.slice(0, text.length - end.length));
    if (end) span.append(make("i", "sign", "\u21b5"), end);
    span.style.background = `rgb(var(--heat), ${(0.85 * Math.min(1, loss / worst)).toFixed(3)})`;
    span.dataset.index = index;
    return span;
  }

  function explain(index) {
    leave();
    const [text, loss, guesses] = tokens()[index];
    const span = place.children[current = index];
    span.setAttribute("aria-current", "true");
    const rows = guesses.map(([guess, share]) => make("tr", guess === text ? "hit" : "",
      make("td", "mono", JSON.stringify(guess)), make("td", "right", percent(share))));
    box.replaceChildren(
      make("b", "mono", JSON.stringify(text)),
      make("div", "", `loss ${loss.toFixed(3)} nats, probability ${percent(Math.exp(-loss))}`),
      make("table", "", ...rows));
    box.style.display = "block";
    const at = span.getClientRects()[0] || span.getBoundingClientRect();
    const left = Math.min(at.left, document.documentElement.clientWidth - box.offsetWidth - 8);
    box.style.left = `${Math.max(8, left) + scrollX}px`;
    box.style.top = `${at.bottom + scrollY + 6}px`;
  }

  function leave() {
    box.style.display = "none";
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
  slider.addEventListener("input", show);
  slider.max = slider.value = snapshots.length - 1;
  slider.hidden = snapshots.length === 1;
  byId("worst").textContent = `${worst.toFixed(1)} nats = ln V (uniform guess)`;
  byId("validation").hidden = false;
  show();
}

// Buttons of a group: one is pressed.
function press(button) {
  for (const other of button.parentElement.children) {
    other.setAttribute("aria-pressed", String(other === button));
  }
  const { axis, scale } = button.dataset;
  if (axis) setView({ axis, zoom: null });
  if (scale) setView({ scale });
}

function startButtons() {
  startTheme();
  for (const button of document.querySelectorAll(".choice button:not([data-theme])")) {
    button.addEventListener("click", () => press(button));
  }
  byId("reset").addEventListener("click", () => setView({ zoom: null }));
  byId("save").addEventListener("click", () => charts[0].save());
  byId("changes-only").addEventListener("change", (event) => {
    document.body.classList.toggle("changes-only", event.target.checked);
  });
}

function start() {
  startButtons();
  byId("status").textContent = data.status ?? "";
  byId("headlines").append(...Object.entries(data.headlines ?? {}).map(([label, value]) =>
    make("div", "tile", make("b", "", value), make("span", "", label))));
  if (data.comparison) byId("comparison").append(comparison(data.comparison));
  byId("legend").append(...legend());
  startCharts(byId("charts"), data.runs);
  const events = data.events.map((row) => (single ? row.slice(1) : row));
  const head = ["run", "step", "time", "event"].slice(Number(single));
  section("events", events.length ? [table(events, head)] : []);
  byId("samples").firstElementChild.textContent =
    single ? "Samples (same prompt, newest first)" : "Latest sample of each run";
  section("samples", data.samples.map(sample));
  if (data.passage?.snapshots.length) startPassage(data.passage);
  section("commands", (data.commands ?? []).map(([name, text]) =>
    make("div", "command", name, make("pre", "", text))));
  section("config", Object.entries(data.config ?? {}).map(configSection));
  const [titles, ...rows] = data.differences ?? [];
  if (titles) section("differences", [table(rows, titles)]);
  for (const id of ["data", "environment"]) {
    section(id, data[id]?.length ? [table(data[id])] : []);
  }
}

start();
