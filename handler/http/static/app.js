// The chat page: what the user does with the conversation, the parameters and the code.

import { CHAT_ROUTE, Refusal, ask } from "./client.js";
import { Answer, Exchange, button } from "./conversation.js";
import { SAMPLES } from "./samples.js";
import { lockedOut, server, watch } from "./server.js";

const $ = (id) => document.getElementById(id);
const FINISHED = { length: "cut at max_tokens", stop_sequence: "ended by a stop string" };
const ON_TOUCH = matchMedia("(pointer: coarse)").matches; // where the focus on a field opens a keyboard

let exchanges = [];
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
  return { ...found, ...moreFields() };
}

/** The fields that the user writes as JSON; the form does not send what is no object. */
function moreFields() {
  const field = $("p-more");
  let value = {};
  try {
    value = JSON.parse(field.value || "{}");
  } catch (error) {
    field.setCustomValidity(`This is not JSON: ${error.message}`);
    return {};
  }
  const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
  field.setCustomValidity(isObject ? "" : "This must be a JSON object.");
  return isObject ? value : {};
}

function body(messages) {
  const system = $("p-system").value.trim();
  const all = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  return { ...(server.model ? { model: server.model } : {}), messages: all, ...parameters() };
}

const history = () => exchanges.flatMap((exchange) => exchange.messages);

function showSample() {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const question = { role: "user", content: $("prompt").value.trim() || "Hello!" };
  const request = { base, route: CHAT_ROUTE, locked: server.locked, body: body([...history(), question]) };
  $("code").textContent = SAMPLES[sample](request);
}

// -- the conversation --------------------------------------------------------------------------------------------

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;
const scrollToEnd = () => ($("log").scrollTop = $("log").scrollHeight);

/** Change what is shown, and stay at its end, unless the reader has scrolled up. */
function following(change) {
  const follow = atEnd();
  change();
  if (follow) scrollToEnd();
}

function busy(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  $("log").setAttribute("aria-busy", String(controller !== null)); // read out when it is whole, not piece by piece
}

const ready = () => !running && $("parameters").reportValidity();

const actions = { ask: run, ready };

function send(text) {
  if (!text || !ready()) return;
  $("prompt").value = "";
  run(new Exchange(text, actions));
}

/** Ask an exchange's question, also once more; later exchanges go. */
async function run(exchange) {
  if (!ready()) return;
  const index = exchanges.indexOf(exchange);
  const later = index < 0 ? [] : exchanges.splice(index);
  for (const old of later.flatMap(({ elements }) => elements)) if (old !== exchange.asked) old.remove();
  const asked = body([...history(), ...exchange.opening]);
  const answer = new Answer(following);
  exchange.answer = answer;
  exchanges.push(exchange);
  $("welcome").hidden = true;
  $("log").append(...exchange.elements);
  if (ON_TOUCH) document.activeElement.blur();
  $("log").scrollIntoView({ block: "nearest" });
  scrollToEnd();
  busy(new AbortController());
  const progress = { began: performance.now(), first: 0, count: 0, finish: "" };
  let failure = null;
  try {
    for await (const piece of ask(asked, running.signal)) {
      progress.first ||= performance.now();
      progress.count += 1;
      progress.finish = piece.finish;
      answer.take(piece);
    }
  } catch (error) {
    failure = error;
  }
  busy(null);
  if (exchanges.at(-1) === exchange) settle(exchange, failure, summary(asked.stream, progress)); // else a new chat began
}

function settle(exchange, failure, figures) {
  const { answer } = exchange;
  const stopped = failure?.name === "AbortError";
  const broken = failure && !stopped;
  const again = button(broken ? "Retry" : "Regenerate", () => run(exchange), broken ? "quiet stop" : "quiet");
  const copy = button("Copy", (event) => copyText(event.target, answer.content, answer.text));
  const results = button("Send results", () => run(new Exchange(null, actions)), "main quiet");
  answer.end({
    failure: broken ? reason(failure, answer) : null,
    note: stopped ? `stopped · ${figures}` : figures,
    actions: [again, ...(answer.content ? [copy] : []), ...(answer.awaitsResults && !broken ? [results] : [])],
  });
  if (failure?.status === 401) lockedOut();
  else if (document.activeElement === document.body && !ON_TOUCH) $("prompt").focus();
  showSample();
}

function reason(error, answer) {
  const words = error instanceof Refusal && error.status ? `The server refused (${error.status}): ${error.message}` : error.message;
  return answer.empty ? `${words}\nThis message is not part of the chat until a retry succeeds.` : words;
}

function summary(streamed, { began, first, count, finish }) {
  const now = performance.now();
  const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(2)} s`;
  const parts = [seconds(now - began)];
  if (streamed && count) parts.unshift(`${count} ${count === 1 ? "token" : "tokens"}`, `first after ${seconds(first - began)}`);
  if (streamed && count > 1) parts.push(`${(((count - 1) * 1000) / (now - first)).toFixed(1)} tokens/s`);
  if (FINISHED[finish]) parts.push(FINISHED[finish]);
  return parts.join(" · ");
}

// -- copying -----------------------------------------------------------------------------------------------------

/** `shown` has the text, for a page over plain HTTP, which may not write: the reader can. */
async function copyText(pressed, text, shown) {
  pressed.dataset.label ??= pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    $("copied").textContent = "Copied";
    pressed.textContent = "Copied ✓";
  } catch {
    getSelection().selectAllChildren(shown);
    $("copied").textContent = "Selected: press Ctrl+C";
    pressed.textContent = "Press Ctrl+C";
  }
  setTimeout(() => (pressed.textContent = pressed.dataset.label), 2000);
}

$("copy").addEventListener("click", () => copyText($("copy"), $("code").textContent, $("code")));
$("log").addEventListener("click", ({ target }) => {
  if (!target.matches(".code-block .copy")) return;
  const code = target.closest(".code-block").querySelector("pre");
  copyText(target, code.textContent, code);
});

// -- what the user does ------------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value.trim());
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  if (!ON_TOUCH) $("prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key-dialog").open) running?.abort();
});
$("clear").addEventListener("click", () => {
  running?.abort();
  for (const old of exchanges.flatMap(({ elements }) => elements)) old.remove();
  exchanges = [];
  $("welcome").hidden = false;
  showSample();
  if (!ON_TOUCH) $("prompt").focus();
});
$("starters").addEventListener("click", ({ target }) => target.matches("button") && send(target.textContent));
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
    sample = tab.id.replace("tab-", "");
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

if (ON_TOUCH) $("prompt").placeholder = "Ask anything"; // there is no Shift key
if (matchMedia("(max-width: 56rem)").matches) {
  for (const panel of document.querySelectorAll("details.panel")) panel.open = false;
}
showSample();
watch(showSample);
