// The chat page: the user's actions on the conversation, the parameters and the code.

import * as attachments from "./attachments.js";
import * as chats from "./chats.js";
import { CHAT_ROUTE, Refusal, stream } from "./client.js";
import { Answer, Exchange } from "./conversation.js";
import { $, button, element } from "./dom.js";
import * as panel from "./history.js";
import { offer, parameters } from "./parameters.js";
import { SAMPLES } from "./samples.js";
import { lockedOut, poll, server, watch } from "./server.js";
import { shortcuts } from "./shortcuts.js";
import { reveal, toggle, uncover } from "./sides.js";
import { colour } from "./syntax.js";

const FINISHED = { length: "cut at max_tokens", stop_sequence: "ended by a stop string" };
const ON_TOUCH = matchMedia("(pointer: coarse)").matches; // focusing a field opens the on-screen keyboard

const LANGUAGE = { curl: "sh", boto3: "py", openai: "py", huggingface: "py", javascript: "js" };
const SAVED = 2000; // milliseconds between two saves of a streaming answer
const MAX_TITLE = 60; // maximum characters of a title, taken from the first question

let chat = newChat();
let running = null; // the AbortController of the streaming answer
let queued = null; // the exchange to ask when that answer has ended
let kept = Promise.resolve(); // resolved when all pending saves are done
let sample = "curl";

// -- the request -------------------------------------------------------------------------------------------------

function body(messages, given = $("p-system").value) {
  const system = given.trim();
  const all = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  return { ...(server.model ? { model: server.model } : {}), messages: all, ...parameters() };
}

const messagesOf = (exchanges) => exchanges.flatMap((exchange) => exchange.messages);
const messages = () => messagesOf(chat.exchanges);

/** The URL of requests, and whether they need a key. */
const target = () => ({ base: new URL(".", location.href).href.replace(/\/$/, ""), route: CHAT_ROUTE, locked: server.locked });

/** Show only the start of files, which may have megabytes. */
const shortened = (request) => JSON.parse(JSON.stringify(request, (name, value) => (isFile(name, value) ? `${value.slice(0, 60)}…` : value)));

const isFile = (name, value) => ["url", "data"].includes(name) && typeof value === "string" && value.length > 1000;

function showSample() {
  const question = { role: "user", content: $("prompt").value.trim() || "Hello!" };
  $("code").textContent = SAMPLES[sample](shortened({ ...target(), body: body([...messages(), question]) }));
  colour($("code"), LANGUAGE[sample]);
}

// -- the conversation --------------------------------------------------------------------------------------------

const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;
const scrollToEnd = () => ($("log").scrollTop = $("log").scrollHeight);

/** Change the conversation, and scroll to its end unless the user has scrolled up. */
function following(change) {
  const follow = atEnd();
  change();
  if (follow) scrollToEnd();
}

function busy(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  $("log").setAttribute("aria-busy", String(controller !== null)); // screen readers then read only the complete answer
}

/** Return whether a question may be asked now. If not, the invalid field shows why. */
function ready() {
  if (running) return false;
  if (!$("parameters").checkValidity()) reveal("settings");
  return $("parameters").reportValidity();
}

const actions = { again, turn, ready, restored, parts: attachments.parts, thumbnail: attachments.thumbnail };

function send(text) {
  if (!text && !attachments.waiting()) return;
  if (running) return queue(text);
  if (!ready()) return;
  $("prompt").value = "";
  ask(new Exchange(text, actions, attachments.taken()));
}

/** Send a message when the streaming answer has ended. */
function queue(text) {
  if (queued) return panel.tell("A message is already queued. Cancel it, or wait for the answer to end.");
  const note = element("span", { className: "note" }, "Queued until the answer ends");
  queued = new Exchange(text, actions, attachments.taken());
  queued.showQuestion(note, button("Cancel", unqueue));
  $("prompt").value = "";
  say(note.textContent);
  following(() => $("log").append(queued.asked));
}

/** Remove and return the queued exchange. */
function dequeued() {
  const exchange = queued;
  queued = null;
  exchange.asked.remove();
  exchange.showQuestion();
  return exchange;
}

/** Move the queued message back to the input field. */
function unqueue() {
  if (!queued) return;
  const { question, media } = dequeued();
  $("prompt").value = [question, $("prompt").value].filter(Boolean).join("\n\n");
  attachments.give(media);
}

/** Ask an exchange's question at the end of the chat. */
function ask(exchange) {
  exchange.answer = new Answer(following, server.name);
  chat.exchanges.push(exchange);
  show(exchange);
  run(exchange, body([...messages(), ...exchange.opening]));
}

/** Ask a question again, or a new one in its place. The earlier answer is kept as a version. */
function again(exchange, question = exchange.question) {
  if (!ready()) return;
  cut(exchange);
  ask(exchange.version(question));
}

/** Let the model continue the last answer. */
function proceed(exchange) {
  if (!ready()) return;
  exchange.answer.resume();
  run(exchange, { ...body(messages()), add_generation_prompt: false, continue_final_message: true });
}

/** Remove an exchange and all later ones from the chat. */
function cut(exchange) {
  const [, ...later] = chat.exchanges.splice(chat.exchanges.indexOf(exchange));
  exchange.later = later;
  for (const old of [exchange, ...later].flatMap(({ elements }) => elements)) old.remove();
}

/** Show another version of an exchange, and the exchanges that followed it. */
function turn(exchange, version) {
  if (running) return;
  cut(exchange);
  for (const each of [version, ...version.later]) {
    chat.exchanges.push(each);
    show(each);
  }
  version.later = [];
  version.arrows.querySelector("button:enabled").focus();
  keep(chat);
  showSample();
}

/** Send the request, and show the response in the last exchange. */
async function run(exchange, request) {
  const asking = chat; // the user may open another chat in the meantime
  const { answer } = exchange;
  if (ON_TOUCH) document.activeElement.blur();
  $("log").scrollIntoView({ block: "nearest" });
  scrollToEnd();
  uncover();
  busy(new AbortController());
  Object.assign(asking, { system: $("p-system").value, updated: Date.now() });
  keep(asking);
  const progress = { began: performance.now(), first: 0, count: 0, finish: "" };
  const pending = setInterval(() => answer.wait(waiting(progress.began)), 250);
  answer.wait(waiting(progress.began));
  setTimeout(poll, 100); // is it queued?
  let last = progress.began;
  let failure = null;
  try {
    for await (const piece of stream(request, running.signal)) {
      clearInterval(pending);
      progress.first ||= performance.now();
      progress.count += 1;
      progress.finish = piece.finish;
      answer.take(piece);
      if (performance.now() - last > SAVED) {
        last = performance.now();
        keep(asking);
      }
    }
  } catch (error) {
    failure = error;
  }
  clearInterval(pending);
  busy(null);
  settle(exchange, failure, summary(request.stream, progress));
  keep(asking);
  if (failure || asking !== chat || !queued || !ready()) return unqueue();
  ask(dequeued());
}

/** Describe what happens before the first token. */
function waiting(began) {
  const seconds = Math.floor((performance.now() - began) / 1000);
  const what = server.queued ? `Queued: ${server.queued} ${server.queued === 1 ? "request is" : "requests are"} waiting for the engine` : "Processing the prompt";
  return seconds ? `${what} · ${seconds} s` : `${what} …`;
}

function show(exchange) {
  $("welcome").hidden = true;
  exchange.showVersions();
  $("log").append(...exchange.elements);
}

function settle(exchange, failure, figures) {
  const stopped = failure?.name === "AbortError";
  const broken = failure && !stopped;
  end(exchange, broken ? reason(failure, exchange.answer) : null, stopped ? `stopped · ${figures}` : figures);
  if (failure?.status === 401) lockedOut();
  else if (document.activeElement === document.body && !ON_TOUCH) $("prompt").focus();
  showSample();
}

/** Finish an exchange: show how the request ended, and the possible actions. */
function end(exchange, failure, note) {
  const { answer } = exchange;
  const retry = button(failure ? "Retry" : "Regenerate", () => again(exchange), failure ? "quiet stop" : "quiet");
  const more = button("Continue", () => proceed(exchange), "quiet continue");
  const copy = button("Copy", (event) => copyText(event.target, answer.content, answer.text));
  const results = button("Send results", () => ready() && ask(new Exchange(null, actions)), "main quiet");
  const calls = answer.awaitsResults;
  const possible = [...(answer.content && !calls ? [more] : []), ...(answer.content ? [copy] : []), ...(calls && !failure ? [results] : [])];
  answer.end({ failure, note, actions: [exchange.arrows, retry, ...possible] });
}

// -- saved chats ------------------------------------------------------------------------------------------------

function newChat() {
  return { id: chats.newId(), title: "", created: Date.now(), updated: Date.now(), revision: 0, system: "", exchanges: [], gone: false };
}

/** Show another chat or an empty one. A streaming answer of the previous chat is stopped. */
function turnTo(next) {
  running?.abort();
  for (const old of chat.exchanges.flatMap(({ elements }) => elements)) old.remove();
  chat = next;
  uncover();
  $("welcome").hidden = chat.exchanges.length > 0;
  for (const exchange of chat.exchanges) show(exchange);
  remember();
  scrollToEnd();
  showSample();
}

/** Put the chat's id into the URL, so that a reload shows the chat again. */
function remember() {
  const named = chat.revision ? `#chat-${chat.id}` : "";
  if (location.hash !== named) window.history.replaceState(null, "", `${location.pathname}${location.search}${named}`);
  panel.select(chat.revision ? chat.id : null);
}

const titleOf = ({ exchanges }) => (exchanges[0]?.question ?? "").replace(/\s+/g, " ").trim().slice(0, MAX_TITLE) || "Attachments";

/** Return the chat in the format in which it is saved. */
const saved = ({ gone, ...chat }) => ({ ...chat, title: chat.title || titleOf(chat), exchanges: chat.exchanges.map((each) => each.saved) });

/** Save the chat as it is now, after all earlier saves. */
function keep(keeping) {
  kept = kept.then(async () => {
    if (keeping.gone) return;
    try {
      const { id, title, revision } = await chats.save(saved(keeping));
      Object.assign(keeping, { id, title, revision });
      if (keeping === chat) remember();
      panel.warn("");
      await panel.refresh();
    } catch (error) {
      panel.warn(chats.problem(error), () => chats.exportJson(titleOf(keeping), [saved(keeping)]));
    }
  });
  return kept;
}

/** Restore the saved answer of an exchange. */
function restored(exchange, answer) {
  exchange.answer = new Answer((change) => change(), answer.model);
  exchange.answer.restore(answer);
  end(exchange, answer.failure || null, answer.note);
}

/** Return a chat, or null if it cannot be read. */
function rename(id, title) {
  if (id !== chat.id) return chats.rename(id, title);
  chat.title = title;
  return keep(chat);
}

/** Return a saved chat. Throws an error if it cannot be read. */
async function loaded(id) {
  const found = chats.checked(await chats.load(id));
  return { ...newChat(), ...found, exchanges: found.exchanges.map((each) => Exchange.restored(each, actions)) };
}

/** Show a saved chat. */
async function open(id) {
  if (id === null) {
    chat.gone = true; // it was deleted, and must not be saved again
    return turnTo(newChat());
  }
  try {
    await kept;
    const found = await loaded(id);
    turnTo(found);
    $("p-system").value = found.system;
    showSample();
  } catch (error) {
    panel.tell(error instanceof DOMException ? chats.problem(error) : error.message);
  }
}

/** Show the chat whose id is in the URL. */
function openNamed() {
  const id = /^#chat-(\w+)$/.exec(location.hash)?.[1];
  if (id && id !== chat.id) open(id);
}

/** Reload a chat after it was changed in another tab or renamed in this one. */
async function changedElsewhere(id) {
  const edited = $("log").querySelector(".turn.user textarea") !== null;
  if (id !== chat.id || running || edited) return; // the changes in this tab are saved as a copy
  const found = await chats.load(id).catch(() => null);
  if (found && found.revision !== chat.revision && !running && id === chat.id) await open(id);
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

/** Announce a message to screen readers. */
const say = (text) => ($("said").textContent = text);

/** Copy a text. Return false if the page may not write to the clipboard, as over plain HTTP. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** Copy a text. If this is not allowed, select it in `shown`, so that the user can copy it. */
async function copyText(pressed, text, shown) {
  pressed.dataset.label ??= pressed.textContent;
  const done = await copied(text);
  if (!done) getSelection().selectAllChildren(shown);
  say(done ? "Copied" : "Selected: press Ctrl+C");
  pressed.textContent = done ? "Copied ✓" : "Press Ctrl+C";
  setTimeout(() => (pressed.textContent = pressed.dataset.label), 2000);
}

/** Copy a chat as a program that sends its last question. */
async function copyChat(id, client) {
  const { system, exchanges } = id === chat.id ? { system: $("p-system").value, exchanges: chat.exchanges } : await loaded(id);
  const asked = [...messagesOf(exchanges.slice(0, -1)), ...exchanges.at(-1).opening];
  const text = SAMPLES[client]({ ...target(), body: body(asked, system) });
  if (await copied(text)) return panel.tell("Copied the request for the last answer.");
  reveal("settings");
  $("code").closest("details").open = true;
  $("code").textContent = text;
  getSelection().selectAllChildren($("code"));
  panel.tell("This page may not write to the clipboard: press Ctrl+C.");
}

$("copy").addEventListener("click", () => copyText($("copy"), $("code").textContent, $("code")));
$("log").addEventListener("click", ({ target }) => {
  if (!target.matches(".code-block .copy")) return;
  const code = target.closest(".code-block").querySelector("pre");
  copyText(target, code.textContent, code);
});

// -- the user's actions ------------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value.trim());
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !$("prompt").value && !running) chat.exchanges.findLast(({ asked }) => asked)?.edit();
  else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) $("form").requestSubmit();
  else return;
  event.preventDefault();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  if (!ON_TOUCH) $("prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]") || $("chat-menu").matches(":popover-open") || uncover()) return;
  running?.abort();
});
function clear() {
  turnTo(newChat());
  if (!ON_TOUCH) $("prompt").focus();
}
$("clear").addEventListener("click", clear);
$("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the URL contains the chat's id
  $("prompt").focus();
});
$("starters").addEventListener("click", ({ target }) => target.matches("button") && send(target.textContent));
$("prompt").addEventListener("input", showSample);
$("parameters").addEventListener("input", showSample);

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

shortcuts({
  newChat: clear,
  search: () => {
    if ($("history").hidden) toggle("history");
    $("chats-search").focus();
  },
  fold: () => toggle("history"),
});
if (ON_TOUCH) $("prompt").placeholder = "Ask anything"; // there is no Shift key
showSample();
watch(() => {
  attachments.offer();
  offer(server.serves);
  showSample();
});
panel.begin({ open, rename, copy: copyChat, changed: changedElsewhere }).then(openNamed);
addEventListener("hashchange", openNamed);
