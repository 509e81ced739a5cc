// The live page: what the server sends is merged into `data` and shown.

let source = null;

function say(text) {
  byId("connection").textContent = text;
  byId("connection").hidden = !text;
}

// Connect, and again whenever the connection is lost: the server may be started again.
function connect() {
  source?.close();
  const own = source = new EventSource(`events${location.search}`);
  let ended = false;
  own.addEventListener("message", (event) => {
    say("");
    receive(JSON.parse(event.data));
  });
  own.addEventListener("end", () => (ended = true));
  own.addEventListener("error", () => {
    own.close();
    if (own !== source) return; // other runs were chosen
    say(ended ? "The server has ended. What is shown stays; the page follows again when the server "
      + "is started again." : "The connection is lost. Trying again ...");
    setTimeout(() => own === source && connect(), 1500);
  });
}

// Rows of a curve: the first `keep` of the old ones, and the new ones.
function joined(old, { keep, ...columns }) {
  if (keep === undefined) return columns;
  return Object.fromEntries(Object.entries(columns).map(([name, values]) =>
    [name, [...old[name].slice(0, keep), ...values]]));
}

function receive({ reset, ...found }) {
  const before = reset ? [] : data.runs;
  found.runs = found.runs?.map((run, i) => ({ ...run,
    training: joined(before[i]?.training, run.training),
    validation: joined(before[i]?.validation, run.validation) }));
  if (!found.runs) delete found.runs;
  if (found.attention) {
    const token = new URLSearchParams(location.search).get("token");
    found.attention = `attention?${new URLSearchParams({ token, run: found.attention })}`;
  }
  if (reset) { // parts that are not sent are emptied
    for (const name of Object.keys(PARTS)) found[name] ??= undefined;
    delete data.attention;
    delete data.unit;
  }
  if (found.chosen && !found.table) found.table = data.table; // its colors and boxes
  show(found);
  const [run] = data.runs;
  document.title = data.runs.length === 1 ? `${run.name}: ${data.status}` : data.title;
  if (!data.runs.length) say("There is no run in this folder yet. It will appear here by itself.");
}

choose = (names) => {
  const query = new URLSearchParams(location.search);
  query.delete("run");
  for (const name of names) query.append("run", name);
  history.replaceState(null, "", `?${query}`);
  connect();
};

connect();
