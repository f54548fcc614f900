// The chat page: what the user does, what the server answers, and what is shown of both.

import { CHAT_ROUTE, Refusal, ask, keep, key, request } from "./client.js";
import { figures, parse } from "./metrics.js";
import { SAMPLES } from "./samples.js";

const $ = (id) => document.getElementById(id);
const POLL = 1000; // milliseconds between looks at /metrics
const FINISHED = { length: "cut at max_tokens", stop_sequence: "ended by a stop string" };

let history = []; // the messages so far, without the system's; a new chat has one of its own
let model = "";
let locked = key() !== "";
let running = null; // the AbortController of the answer that is coming
let sample = "curl";

// -- the request -------------------------------------------------------------------------------------------------

/** What the form asks for; a field left empty is not sent. */
function parameters() {
  const found = {};
  for (const field of $("parameters").elements) {
    if (!field.name || field.value === "") continue;
    if (field.type === "number") found[field.name] = field.valueAsNumber;
    else if (field.type !== "checkbox") found[field.name] = field.value;
    else if (field.checked) found[field.name] = true;
  }
  return found;
}

function body(text) {
  const system = $("p-system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...history, { role: "user", content: text }];
  return { ...(model ? { model } : {}), messages, ...parameters() };
}

function showSample() {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const asked = body($("prompt").value.trim() || "Hello!");
  $("code").textContent = SAMPLES[sample]({ base, route: CHAT_ROUTE, locked, body: asked });
}

// -- the conversation --------------------------------------------------------------------------------------------

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;
const scrollToEnd = () => ($("log").scrollTop = $("log").scrollHeight);

function addTurn(role, text) {
  $("welcome")?.remove();
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const who = document.createElement("span");
  who.className = "hidden";
  who.textContent = role === "user" ? "You: " : "Model: ";
  const said = document.createElement("div");
  said.className = "text";
  said.textContent = text;
  turn.append(who, said);
  $("log").append(turn);
  scrollToEnd();
  return turn;
}

function addNote(turn, text) {
  const note = document.createElement("div");
  note.className = "note";
  note.textContent = text;
  turn.append(note);
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

function busy(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  $("log").setAttribute("aria-busy", String(controller !== null)); // read out when it is whole, not piece by piece
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running || !$("parameters").reportValidity()) return;
  const asked = body(text);
  const chat = history;
  const mine = addTurn("user", text);
  const turn = addTurn("assistant", "");
  const said = turn.querySelector(".text");
  turn.classList.add("busy");
  $("prompt").value = "";
  showError("");
  busy(new AbortController());
  const began = performance.now();
  let first = 0;
  let count = 0;
  let finish = "";
  let failure = null;
  try {
    for await (const piece of ask(asked, running.signal)) {
      first ||= performance.now();
      count += 1;
      finish = piece.finish ?? finish;
      const follow = atEnd(); // unless the reader has scrolled up
      said.append(piece.text);
      if (follow) scrollToEnd();
    }
  } catch (error) {
    failure = error;
  }
  turn.classList.remove("busy");
  busy(null);
  if (chat !== history) return; // a new chat was begun meanwhile
  settle({ text, mine, turn, failure, summary: summary(asked.stream, count, began, first, finish) });
}

/** Keep what was said, or take back what came to nothing. */
function settle({ text, mine, turn, failure, summary }) {
  const answer = turn.querySelector(".text").textContent;
  const stopped = failure?.name === "AbortError";
  if (!failure || answer || stopped) {
    history.push({ role: "user", content: text }, { role: "assistant", content: answer });
    const follow = atEnd();
    addNote(turn, stopped ? `stopped · ${summary}` : summary);
    if (follow) scrollToEnd();
  } else {
    mine.remove();
    turn.remove();
    $("prompt").value ||= text;
  }
  if (failure && !stopped) refused(failure);
  if (document.activeElement === document.body) $("prompt").focus();
  showSample();
}

function summary(streamed, count, began, first, finish) {
  const now = performance.now();
  const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(2)} s`;
  const parts = [seconds(now - began)];
  if (streamed && count) parts.unshift(`${count} tokens`, `first after ${seconds(first - began)}`);
  if (streamed && count > 1) parts.push(`${(((count - 1) * 1000) / (now - first)).toFixed(1)} tokens/s`);
  if (FINISHED[finish]) parts.push(FINISHED[finish]);
  return parts.join(" · ");
}

function refused(error) {
  if (error.status === 401) return lockedOut();
  showError(error instanceof Refusal && error.status ? `The server refused (${error.status}): ${error.message}` : error.message);
}

// -- the key -----------------------------------------------------------------------------------------------------

/** The server said 401: a key that it did not take is of no more use. */
function lockedOut() {
  const had = key() !== "";
  keep("");
  locked = true;
  before = null;
  $("metrics-link").hidden = true; // a browser opens links without the key
  showState("down", "Locked: an API key is needed");
  showSample();
  askForKey(had ? "The server did not take the key that you gave." : undefined);
}

function askForKey(why = "It is kept for this tab only, and sent to this server only.") {
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

// -- the server's state ------------------------------------------------------------------------------------------

let before = null; // the last figures, and when they came
let timer = 0;

function showState(state, text) {
  $("state").dataset.state = state;
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
}

/** Look at the server now, and again after a while. */
async function poll() {
  clearTimeout(timer);
  const barred = locked && !key(); // nothing is to be had without one
  if (!document.hidden && !$("key-dialog").open && !barred) await look();
  clearTimeout(timer);
  timer = setTimeout(poll, POLL);
}

async function look() {
  try {
    const found = parse(await (await request("metrics")).text());
    const now = performance.now();
    for (const [id, text] of Object.entries(figures(found, before?.found, (now - before?.now) / 1000))) $(id).textContent = text;
    before = { found, now };
    if (!model) await findModel();
    const ready = found.get("lmi_engine_ready") === 1;
    showState(ready ? "ready" : "wait", ready ? `Ready: ${model}` : "The model is not ready yet");
    $("key-button").hidden = !locked;
    $("metrics-link").hidden = locked;
  } catch (error) {
    before = null;
    if (error.status === 401) lockedOut();
    else showState("down", error.status ? error.message : "The server cannot be reached");
  }
}

async function findModel() {
  const listed = await (await request("models")).json();
  model = listed.models[0].modelName;
  showSample();
}

// -- what the user does ------------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key-dialog").open) running?.abort();
});
$("clear").addEventListener("click", () => {
  running?.abort();
  history = [];
  $("log").replaceChildren();
  showError("");
  showSample();
  $("prompt").focus();
});
$("prompt").addEventListener("input", showSample);
$("parameters").addEventListener("input", showSample);
$("parameters").addEventListener("submit", (event) => event.preventDefault());

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => {
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
    }
    sample = tab.textContent;
    $("code").setAttribute("aria-labelledby", tab.id);
    showSample();
  });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
}

$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("code").textContent);
    $("copied").textContent = "Copied";
    $("copy").textContent = "Copied ✓";
  } catch {
    getSelection().selectAllChildren($("code")); // a page over plain HTTP may not write; the reader can
    $("copied").textContent = "Selected: press Ctrl+C";
    $("copy").textContent = "Press Ctrl+C";
  }
  setTimeout(() => ($("copy").textContent = "Copy"), 2000);
});

if (matchMedia("(max-width: 56rem)").matches) {
  for (const panel of document.querySelectorAll("details.panel")) panel.open = false;
}
document.addEventListener("visibilitychange", () => document.hidden || poll());
showSample();
poll();
