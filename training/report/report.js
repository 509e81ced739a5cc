// Fills the page from its data: text, tables, buttons and the scored passage. `show` may be called
// again with what has changed.

const data = JSON.parse(document.getElementById("page-data").textContent);
const byId = (id) => document.getElementById(id);
const percent = (share) => (share < 0.001 ? "< 0.1%" : `${(100 * share).toFixed(1)}%`);
const isSingle = () => data.runs.length === 1;
let choose = null; // of a live page: choose(names) of the runs to show

const TERMS = {
  MFU: "Model FLOPs utilization: the share of the hardware's peak FLOP/s that training uses.",
  "bits per byte": "The loss per byte of text, in bits. Unlike the loss per token, it can be "
    + "compared between tokenizers.",
  "validation loss": "Mean loss per token, in nats, on text that is not trained on.",
  "training loss": "Loss per token, in nats, of the last logged step.",
  "tokens per second": "Average since the logged step before, without evaluations and saving.",
  "training time": "Time spent in steps, without evaluations, saving and pauses.",
  wsd: "Warmup, stable, decay: the learning rate rises, stays constant, and falls at the end.",
  cosine: "After warmup, the learning rate falls along half a cosine.",
};

// An element with a class and children: nodes, or strings, which stay text.
function make(tag, kind, ...children) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.append(...children);
  return node;
}

function makeButton(kind, ...children) {
  const node = make("button", kind, ...children);
  node.type = "button";
  return node;
}

// A button that explains something when it is pointed at, focused or tapped.
function hint(text, ...label) {
  const node = makeButton(label.length ? "hint text" : "hint", ...(label.length ? label : ["?"]));
  node.dataset.hint = text;
  return node;
}

// A label, followed by the explanation of the first term in it.
function explained(label) {
  const term = Object.keys(TERMS).find((name) => label.includes(name));
  return term ? [label, " ", hint(TERMS[term])] : [label];
}

function table(rows, head = []) {
  const line = (tag) => (cells) => make("tr", "", ...cells.map((cell) => make(tag, "", cell)));
  return make("table", "", ...(head.length ? [line("th")(head)] : []), ...rows.map(line("td")));
}

// Fill the last element of a section, and show the section, if there is anything to show.
function section(id, nodes) {
  byId(id).hidden = !nodes.length;
  byId(id).lastElementChild.replaceChildren(...nodes);
}

function key(kind, color, text) {
  const line = make("i", kind);
  line.style.color = color;
  return make("span", "key", line, text);
}

function legend() {
  const of = (run, rows) => color(run, rows, data.runs.length);
  const keys = isSingle()
    ? [key("", of(0, "training"), "training, smoothed"),
      key("thin", of(0, "training"), "as logged"),
      key("", of(0, "validation"), "validation")]
    : [...data.runs.map((run, i) => key("", of(i, "training"), run.name)),
      key("", "var(--soft)", "training, smoothed"), key("thin", "var(--soft)", "as logged"),
      key("dashed", "var(--soft)", "validation (hollow dots)")];
  const marks = data.runs.flatMap((run) => run.marks.map((mark) => mark.kind));
  for (const kind of ["resumed", "warning"]) {
    const shade = isSingle() ? `var(--${kind})` : "var(--soft)";
    const text = isSingle() ? kind : `${kind} (color of its run)`;
    if (marks.includes(kind)) keys.push(key("dotted", shade, text));
  }
  return keys;
}

// The curves. The unit of the loss is chosen when other runs are shown, and kept when rows arrive.
function showRuns(runs) {
  const names = JSON.stringify(runs.map((run) => run.name));
  byId("chosen").hidden = !choose || !isSingle();
  byId("chosen").textContent = runs[0]?.name ?? "";
  if (names !== showRuns.names) {
    showRuns.names = names;
    press(document.querySelector(`button[data-unit="${data.unit ?? "loss"}"]`));
    setView({ zoom: null });
  }
  byId("legend").replaceChildren(...legend());
  showCharts(byId("charts"), runs);
}

// The table of runs: a header sorts, up and then down; a live page chooses runs in it.
const order = { column: null, sign: 1 };

function showTable({ columns, rows }) {
  const names = ["run", "state", ...columns];
  const value = (row) => ({ run: row.name, state: row.state })[order.column]
    ?? row.cells[columns.indexOf(order.column)][1];
  const sorted = [...rows];
  if (order.column !== null) {
    sorted.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null); // unknown comes last
      return order.sign * (x < y ? -1 : Number(x > y));
    });
  }
  const head = names.map((name) => {
    const button = makeButton("sort", name);
    button.addEventListener("click", () => {
      order.sign = order.column === name ? -order.sign : 1;
      order.column = name;
      showTable(data.table);
      [...byId("table").querySelectorAll("th button")].find((b) => b.textContent === name).focus();
    });
    const cell = make("th", "", button);
    if (name === order.column) cell.ariaSort = order.sign > 0 ? "ascending" : "descending";
    return cell;
  });
  const lines = sorted.map((row) => {
    const cells = [runName(row.name), make("span", `state ${row.state}`, row.state),
      ...row.cells.map(([text]) => text)].map((cell) => make("td", "", cell));
    cells.forEach((cell, i) => (cell.dataset.label = names[i]));
    return make("tr", "", ...cells);
  });
  section("table", rows.length ? [make("table", "runs", make("tr", "", ...head), ...lines)] : []);
}

// A run in the table: its color if it is shown; in a live page a box to compare it, and its name
// to show it alone.
function runName(name) {
  const shown = data.runs.map((run) => run.name), i = shown.indexOf(name);
  const own = i < 0 ? "transparent" : color(i, "training", shown.length);
  if (!choose) return key("", own, name);
  const box = make("input", "");
  Object.assign(box, { type: "checkbox", checked: i >= 0, ariaLabel: `show ${name}` });
  box.addEventListener("change", () => {
    const others = shown.filter((other) => other !== name);
    choose(box.checked ? [...others, name] : others);
  });
  const alone = makeButton("link", name);
  alone.addEventListener("click", () => choose([name]));
  return make("span", "", box, key("", own, alone));
}

function sample({ name, prompt, text }) {
  const rest = text.startsWith(prompt) ? text.slice(prompt.length) : text;
  return make("div", "card", make("b", "", name), make("pre", "", make("mark", "", prompt), rest));
}

function showSamples(samples) {
  byId("samples").querySelector("h2 span").textContent =
    isSingle() ? "Samples (same prompt, newest first)" : "Latest sample of each run";
  section("samples", samples.map(sample));
  fade(byId("samples").lastElementChild);
}

function showEvents(rows) {
  const head = [...(isSingle() ? [] : ["run"]), "step", "time", "event"];
  const shown = rows.length > data.runs.length; // more than that each has started
  section("events", shown ? [table(rows, head)] : []);
}

function command([name, text]) {
  const button = makeButton("copy", "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch { // not allowed here: select it, for the keyboard
      getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
      button.textContent = "selected";
    }
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  return make("div", "command", name, make("pre", "", text), button);
}

function configSection([name, options]) {
  const rows = options.map((option) => {
    const value = [option.value, ...(TERMS[option.value] ? [" ", hint(TERMS[option.value])] : [])];
    const cells = [[hint(option.help, option.name)], value, [option.default]];
    const kind = option.changed ? "changed" : "same";
    return make("tr", kind, ...cells.map((cell) => make("td", "", ...cell)));
  });
  const head = [name, "", "default"].map((text) => make("th", "", text));
  const kind = options.some((option) => option.changed) ? "" : "same";
  return make("table", kind, make("tr", "", ...head), ...rows);
}

// The scored passage at the evaluation that the slider selects.
const passage = { worst: 1, snapshots: [] };

function showPassage(changed) {
  const slider = byId("evaluation"), last = passage.snapshots.length - 1;
  const follows = Number(slider.value) >= last; // at the newest: stays there
  Object.assign(passage, changed);
  const { worst, snapshots } = passage;
  byId("validation").hidden = !snapshots.length;
  if (!snapshots.length) return;
  slider.max = snapshots.length - 1;
  if (follows) slider.value = slider.max;
  slider.hidden = snapshots.length === 1;
  byId("worst").textContent = `${worst.toFixed(1)} nats = ln V (uniform guess)`;
  slider.dispatchEvent(new Event("input"));
}

function startPassage() {
  const place = byId("passage"), slider = byId("evaluation"), box = byId("token");
  let current = null; // index of the token that is explained

  const tokens = () => passage.snapshots[slider.value].tokens;

  function showTokens() {
    byId("passage-step").textContent = passage.snapshots[slider.value].title;
    place.replaceChildren(...tokens().map(tokenSpan));
    if (current !== null) explain(Math.min(current, tokens().length - 1));
  }

  function tokenSpan([text, loss], index) {
    const end = text.match(/\n*$/)[0]; // a line end gets a visible sign
    const span = make("span", "", text.slice(0, text.length - end.length));
    if (end) span.append(make("i", "sign", "\u21b5"), end);
    const heat = 0.85 * Math.min(1, loss / passage.worst);
    span.style.background = `rgb(var(--heat), ${heat.toFixed(3)})`;
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
  slider.addEventListener("input", showTokens);
}

// Buttons of a group: one is pressed.
function press(button) {
  for (const other of button.parentElement.children) {
    other.setAttribute("aria-pressed", String(other === button));
  }
  const { axis, scale, unit } = button.dataset;
  if (axis) setView({ axis, zoom: null });
  if (scale) setView({ scale });
  if (unit) setView({ unit });
}

function startButtons() {
  startTheme();
  for (const button of document.querySelectorAll(".choice button:not([data-theme])")) {
    button.addEventListener("click", () => press(button));
  }
  byId("reset").addEventListener("click", () => setView({ zoom: null }));
  byId("save").addEventListener("click", () => charts[0].save());
  byId("smoothing").addEventListener("input", (event) =>
    setView({ smoothing: event.target.value / 100 }));
  byId("all-options").addEventListener("change", (event) => {
    document.body.classList.toggle("all-options", event.target.checked);
  });
  for (const button of document.querySelectorAll("button.scroll")) {
    const cards = byId("samples").lastElementChild;
    button.addEventListener("click", () =>
      cards.scrollBy({ left: button.dataset.by * 0.8 * cards.clientWidth, behavior: "smooth" }));
  }
}

// Fade the sides of an element that can be scrolled to.
function fade(node) {
  const left = node.scrollLeft > 2;
  const right = node.scrollLeft + node.clientWidth < node.scrollWidth - 2;
  node.dataset.more = `${left ? "left" : ""} ${right ? "right" : ""}`.trim();
  for (const button of node.parentElement.querySelectorAll("button.scroll")) {
    button.hidden = !left && !right;
    button.disabled = button.dataset.by < 0 ? !left : !right;
  }
}

function startFading() {
  for (const node of document.querySelectorAll(".cards, .wide")) {
    node.addEventListener("scroll", () => fade(node));
    new ResizeObserver(() => fade(node)).observe(node);
  }
}

function startHints() {
  const box = byId("hint");
  let current = null; // the button that is explained
  const hide = () => (box.hidden = true);
  const of = (event) => event.target.closest?.("[data-hint]");
  function explain(event) {
    const button = of(event);
    if (!button) return event.type === "click" && hide();
    current = button;
    box.textContent = button.dataset.hint;
    box.hidden = false;
    button.setAttribute("aria-describedby", "hint");
    const at = button.getBoundingClientRect();
    const left = Math.min(at.left, document.documentElement.clientWidth - box.offsetWidth - 8);
    box.style.left = `${Math.max(8, left) + scrollX}px`;
    box.style.top = `${at.bottom + scrollY + 4}px`;
  }
  for (const type of ["pointerover", "focusin", "click"]) document.addEventListener(type, explain);
  for (const type of ["pointerout", "focusout"]) {
    document.addEventListener(type, (event) => of(event) === current && hide());
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

// How each part of the data is shown; later parts may look at earlier ones in `data`.
const PARTS = {
  runs: showRuns,
  table: (found) => showTable(found ?? { columns: [], rows: [] }),
  status: (text = "") => (byId("status").textContent = text),
  about: (rows = []) => byId("about").replaceChildren(...rows.map(([name, text]) =>
    make("div", "", make("dt", "", name), make("dd", "", text)))),
  headlines: (found = {}) => byId("headlines").replaceChildren(
    ...Object.entries(found).map(([label, value]) =>
      make("div", "tile", make("b", "", value), make("span", "", ...explained(label))))),
  events: (rows) => showEvents(rows ?? []),
  samples: (found) => showSamples(found ?? []),
  passage: (found) => showPassage(found ?? { snapshots: [] }),
  commands: (found = []) => section("commands", [...attentionLink(), ...found.map(command)]),
  config: (found = {}) => section("config", Object.entries(found).map(configSection)),
  differences: ([titles, ...rows] = []) =>
    section("differences", rows.length ? [table(rows, titles)] : []),
  data: (rows = []) => section("data", rows.length ? [table(rows)] : []),
  environment: (rows = []) => section("environment", rows.length ? [table(rows)] : []),
};

function attentionLink() {
  if (!data.attention) return [];
  const link = make("a", "", "what each head attends to");
  link.href = data.attention;
  return [make("p", "", link)];
}

// Show the parts that have changed: {part: new data}.
function show(changes) {
  Object.assign(data, changes);
  for (const [name, fill] of Object.entries(PARTS)) if (name in changes) fill(changes[name]);
}

startButtons();
startHints();
startPassage();
startFading();
if (data.runs) show(data);
