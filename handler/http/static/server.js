// The server's state in the header and the panels, and the API key that it may require.

import { keep, key, request } from "./client.js";
import { $, element } from "./dom.js";
import { figures, parse } from "./metrics.js";

const DEFAULT_NAME = "model"; // name of a model that was not given one
const DEFAULT_NAMES = [DEFAULT_NAME, "lmi"]; // under these, such a model is served
const POLL = 1000; // milliseconds between two requests of /metrics

/**
 * `takes`: accepted kinds of message parts; `serves`: supported parameters, if known; `model`: name for requests, if known; `name`: displayed name; `locked`: whether the server requires a
 * key; `queued`: number of requests that wait for its engine.
 */
export const server = { model: "", name: "", locked: key() !== "", queued: 0, takes: ["text"], serves: null };

let before = null; // the last metrics and their time
let timer = 0;
let changed = () => {};

/** Start to poll the server. `onChange` is called when `server` changes. */
export function watch(onChange) {
  changed = onChange;
  poll();
}

function showState(state, text) {
  $("state").dataset.state = state;
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
}

/** Poll the server now, and again after some time. */
export async function poll() {
  clearTimeout(timer);
  const barred = server.locked && !key(); // without a key, all requests would fail
  if (!document.hidden && !$("key-dialog").open && !barred) await look();
  clearTimeout(timer);
  timer = setTimeout(poll, POLL);
}

async function look() {
  try {
    const found = parse(await (await request("metrics")).text());
    const now = performance.now();
    show(figures(found, before?.found, (now - before?.now) / 1000));
    if (!before) await describe(); // at the start, and after the server was unreachable
    before = { found, now };
    server.queued = found.get("lmi_queued_requests") ?? 0;
    const ready = found.get("lmi_engine_ready") === 1;
    showState(ready ? "ready" : "wait", ready ? "Ready" : "The model is not ready yet");
    $("key-button").hidden = !server.locked;
    $("metrics-link").hidden = server.locked;
  } catch (error) {
    before = null;
    if (error.status === 401) lockedOut();
    else showState("down", error.status ? error.message : "The server cannot be reached");
  }
}

function show(texts) {
  for (const [id, text] of Object.entries(texts)) if (text !== null && $(id).textContent !== text) $(id).textContent = text;
}

/** Show the model, its engine, context, device and replicas, and the server's version and commit. */
async function describe() {
  const [{ modelName }] = (await (await request("models")).json()).models;
  const json = async (path) => (await request(path)).json();
  const [[{ models: [details] }], { data }, { version, sha }] = await Promise.all([
    json(`models/${encodeURIComponent(modelName)}`),
    json("v1/models"),
    json("info").catch(() => ({})), // a route of the user's code may have this path
  ]);
  const [group] = details.workerGroups;
  const listed = data.find(({ id }) => id === modelName);
  server.takes = listed?.input_modalities ?? ["text"];
  server.serves = listed?.supported_parameters ?? null;
  const called = (id) => (id === DEFAULT_NAME && listed?.root) || id;
  const adapters = data.filter(({ parent }) => parent).map(({ id }) => id);
  const served = data.filter(({ parent }) => !parent).map(({ id }) => id);
  const given = served.filter((id) => !DEFAULT_NAMES.includes(id)); // names that the operator has chosen
  const chosen = given.length ? given : served.slice(0, 1);
  const own = called(chosen[0]);
  show({
    "model-name": own,
    "s-model": own,
    "s-engine": details.engine,
    "s-context": listed?.max_model_len?.toLocaleString("en") ?? "–",
    "s-device": group.device.deviceType,
    "s-replicas": String(group.maxWorkers),
    "s-version": sha ? `${version}, commit ${sha.slice(0, 12)}` : (version ?? "–"),
  });
  document.title = `${own} · lmi-handler`;
  const kept = $("model").value;
  const options = (ids) => ids.map((id) => new Option(called(id), id, false, id === kept));
  const list = element("optgroup", { label: "Adapters" }, ...options(adapters));
  $("model").replaceChildren(...options(chosen), ...(adapters.length ? [list] : []));
  $("model").hidden = $("model").length < 2;
  $("model-name").hidden = !$("model").hidden;
  choose();
}

function choose() {
  server.model = $("model").value;
  server.name = $("model").selectedOptions[0].text;
  changed();
}

/** Handle status 401: forget the refused key. */
export function lockedOut() {
  const had = key() !== "";
  keep("");
  server.locked = true;
  before = null;
  $("metrics-link").hidden = true; // a browser opens links without the key
  showState("down", "Locked: an API key is needed");
  changed();
  askForKey(had ? "The server rejected this key." : undefined);
}

function askForKey(why = "It is stored for this tab only and sent only to this server.") {
  $("key-button").hidden = false;
  $("key-why").textContent = why;
  $("key-input").value = "";
  $("key-forget").hidden = !key();
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-button").addEventListener("click", () => askForKey());
$("key-form").addEventListener("submit", (event) => {
  const given = $("key-input").value.trim();
  if (event.submitter?.value === "forget") {
    keep("");
    showState("down", "Locked: an API key is needed");
  } else if (given) keep(given);
});
$("key-dialog").addEventListener("close", () => poll());
$("model").addEventListener("change", choose);
document.addEventListener("visibilitychange", () => document.hidden || poll());
addEventListener("focus", () => before && describe().catch(poll)); // adapters may have been loaded in the meantime
