// The conversation: its exchanges as elements, and as messages of the next request.

import { button, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { tokenView } from "./tokens.js";

/** The note saved with an answer that is still streaming. */
const CLOSED = "The page was closed before the answer was complete.";

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // the call is incomplete
  }
}

/** A streamed answer of the model: its thoughts, text and tool calls. */
export class Answer {
  #thoughts = null; // {box, summary, text, began}, or null without thoughts
  #calls = new Map(); // {call, title, shown, result} by the server's index
  #markdown;
  #frame = 0;
  #cost = 0; // milliseconds for rendering the last frame
  #rendered;
  #seconds; // duration of the thoughts, after they have ended
  #pending = null; // the element that describes what happens before the first token
  #ended; // {note, failure}, as saved
  #tokens = []; // with their probabilities, if they were requested
  #shownTokens = null;
  #foot = []; // the elements below the answer

  /** `rendered` is called before and after each change of the display; `model` is the model's name. */
  constructor(rendered, model = "") {
    this.#rendered = rendered;
    this.model = model;
    this.#seconds = null;
    this.#ended = { note: "", failure: CLOSED };
    this.text = element("div", { className: "text" });
    this.#markdown = new MarkdownView(this.text);
    this.element = element("div", { className: "turn assistant busy" }, element("span", { className: "hidden" }, `${model || "Model"}: `), this.text);
    this.complete = false; // it has ended or was stopped, and is not empty
  }

  get content() {
    return this.#markdown.text;
  }

  get reasoning() {
    return this.#thoughts?.text.textContent ?? "";
  }

  get empty() {
    return !this.content && !this.#thoughts && !this.#calls.size;
  }

  get awaitsResults() {
    return this.#calls.size > 0;
  }

  /** The answer as messages of the next request, with the results of its tool calls. */
  get messages() {
    const entries = [...this.#calls.values()];
    const calls = entries.map(({ call }) => ({ ...call, type: "function" }));
    const results = entries.map(({ call, result }) => ({ role: "tool", tool_call_id: call.id, content: result.value }));
    const message = { role: "assistant", content: this.content };
    if (calls.length) Object.assign(message, { tool_calls: calls }, this.reasoning ? { reasoning_content: this.reasoning } : {});
    return [message, ...results];
  }

  /** The answer in the format in which it is saved. */
  get saved() {
    const calls = [...this.#calls.values()].map(({ call: { id, function: { name, arguments: given } }, result }) => ({
      id, name, arguments: given, result: result.value,
    }));
    const tokens = this.#tokens.length ? { tokens: this.#tokens } : {};
    return { content: this.content, reasoning: this.reasoning, seconds: this.#seconds, calls, ...tokens, ...this.#ended, model: this.model };
  }

  /** Show a saved answer. `end` must be called next. */
  restore({ content, reasoning, seconds, calls, tokens = [] }) {
    this.take({
      text: content,
      reasoning,
      tokens,
      calls: calls.map(({ id, name, arguments: given }, index) => ({ index, id, function: { name, arguments: given } })),
    });
    if (this.#thoughts && Number.isFinite(seconds)) this.#thoughts.began = performance.now() - seconds * 1000;
    [...this.#calls.values()].forEach(({ result }, index) => (result.value = calls[index].result));
  }

  /** Show what happens before the first token. */
  wait(text) {
    this.#pending ??= element("div", { className: "pending" });
    if (!this.#pending.isConnected) this.text.before(this.#pending);
    if (this.#pending.textContent !== text) this.#pending.textContent = text;
  }

  take({ text, reasoning, calls, tokens }) {
    if (text || reasoning || calls.length) this.#pending?.remove();
    if (reasoning) this.#think(reasoning);
    if (text) this.#markdown.append(text);
    this.#tokens.push(...tokens);
    for (const call of calls) this.#take(call);
    if (!reasoning && (text || calls.length)) this.#thought();
    this.#frame ||= setTimeout(() => requestAnimationFrame(() => this.#render()), 5 * this.#cost); // rendering takes at most a sixth of the time
  }

  #render() {
    if (!this.#frame) return; // it has ended in the meantime
    this.#frame = 0;
    const began = performance.now();
    this.#rendered(() => this.#markdown.render());
    this.#cost = performance.now() - began;
  }

  #think(text) {
    if (!this.#thoughts) {
      const summary = element("summary", {}, "Thinking …");
      const thoughts = element("div", { className: "thoughts", dir: "auto" }, "");
      const box = element("details", { className: "reasoning" }, summary, thoughts);
      this.#thoughts = { box, summary, text: thoughts, began: performance.now() };
      this.text.before(box);
    }
    this.#thoughts.text.append(text);
  }

  /** End the thoughts. */
  #thought() {
    const thoughts = this.#thoughts;
    if (!thoughts?.began) return;
    this.#seconds = (performance.now() - thoughts.began) / 1000;
    thoughts.summary.textContent = `Thought for ${this.#seconds.toFixed(1)} s`;
    thoughts.began = 0;
    thoughts.text.normalize();
  }

  /** Add a tool call, or another piece of one. */
  #take({ index = this.#calls.size, id, function: { name = "", arguments: piece = "" } = {} }) {
    let entry = this.#calls.get(index);
    if (!entry) {
      const number = this.#calls.size;
      const title = element("code");
      const shown = element("pre", { tabIndex: 0 });
      const result = element("textarea", { rows: 2, placeholder: "What the tool returned", "aria-label": `Result of call ${number + 1}` });
      entry = { call: { id: id ?? `call_${number}`, function: { name: "", arguments: "" } }, title, shown, result };
      const head = element("div", { className: "bar" }, element("span", {}, "Tool call"), title);
      this.element.append(element("div", { className: "call" }, head, shown, result));
      this.#calls.set(index, entry);
    }
    entry.call.function.name += name;
    entry.call.function.arguments += piece;
    entry.title.textContent = entry.call.function.name;
    entry.shown.textContent = pretty(entry.call.function.arguments);
  }

  /** End the answer. `failure` is the reason if it failed, `note` describes how it ended, `actions` are buttons. */
  end({ failure, note, actions }) {
    clearTimeout(this.#frame);
    this.#frame = 0;
    this.complete = !failure || !this.empty;
    this.#ended = { note, failure: failure ?? "" };
    this.#pending?.remove();
    this.element.classList.remove("busy");
    this.element.classList.toggle("broken", Boolean(failure));
    this.#rendered(() => {
      this.#thought();
      this.#markdown.finish();
      const error = failure ? [element("div", { className: "error" }, failure)] : [];
      const tokens = this.#tokens.length ? [button("Tokens", ({ target }) => this.#toggleTokens(target), "quiet", { "aria-pressed": "false" })] : [];
      this.#foot = [...error, element("div", { className: "foot" }, element("span", { className: "note" }, note), ...actions, ...tokens)];
      this.element.append(...this.#foot);
    });
  }

  /** Continue the answer after its end. */
  resume() {
    this.#ended = { note: "", failure: CLOSED };
    for (const shown of this.#foot) shown.remove();
    this.#showTokens(false);
    this.element.classList.remove("broken");
    this.element.classList.add("busy");
  }

  #toggleTokens(pressed) {
    const wanted = this.#shownTokens === null;
    pressed.setAttribute("aria-pressed", String(wanted));
    this.#showTokens(wanted);
  }

  /** Show the tokens instead of the text, or the text again. */
  #showTokens(wanted) {
    this.#shownTokens?.remove();
    this.#shownTokens = wanted ? tokenView(this.#tokens) : null;
    this.text.hidden = wanted;
    if (wanted) this.text.after(this.#shownTokens);
  }
}

/** A question and its answer. After tool calls, their results replace the question, and `question` is null. */
export class Exchange {
  #actions;

  /** Restore a saved exchange and its versions. `actions.restored` restores their answers. */
  static restored({ question, media, answer, versions = [], later = [] }, actions) {
    const exchange = new Exchange(question, actions, media);
    exchange.later = later.map((each) => Exchange.restored(each, actions));
    if (versions.length) exchange.versions = versions.map((each) => (each ? Exchange.restored(each, actions) : exchange));
    for (const each of exchange.versions) each.versions = exchange.versions;
    if (answer) actions.restored(exchange, answer);
    return exchange;
  }

  /**
   * `actions.ready()` returns whether a question may be asked now, `actions.again(exchange, question)` asks a new one in its place, `actions.turn(exchange, version)`
   * shows another version.
   */
  constructor(question, actions, media = []) {
    this.question = question;
    this.media = media;
    this.answer = null;
    this.versions = [this]; // all exchanges at this position of the chat, which share this list
    this.later = []; // the later exchanges, while another version is shown
    this.arrows = element("span", { className: "versions" });
    this.#actions = actions;
    this.asked = question === null ? null : element("div", { className: "turn user" });
    this.showQuestion();
  }

  get saved() {
    const versions = this.versions.map((each) => (each === this ? null : { ...each.#own, later: each.later.map((one) => one.saved) }));
    return { ...this.#own, ...(versions.length > 1 ? { versions } : {}) };
  }

  get #own() {
    return { question: this.question, media: this.media, answer: this.answer?.saved ?? null };
  }

  get messages() {
    if (!this.answer?.complete) return [];
    return [...this.opening, ...this.answer.messages];
  }

  /** The question as a message. */
  get opening() {
    if (this.question === null) return [];
    const text = this.question ? [{ type: "text", text: this.question }] : [];
    return [{ role: "user", content: this.media.length ? [...this.#actions.parts(this.media), ...text] : this.question }];
  }

  get elements() {
    return [this.asked, this.answer?.element].filter(Boolean);
  }

  /** Return a new version of the exchange, which replaces one without an answer. */
  version(question) {
    const next = new Exchange(question, this.#actions, this.media);
    next.versions = this.versions;
    const empty = !this.answer?.complete && !this.later.length;
    next.versions.splice(empty ? next.versions.indexOf(this) : next.versions.length, Number(empty), next);
    return next;
  }

  /** Show the buttons for other versions, if there are any. */
  showVersions() {
    const at = this.versions.indexOf(this);
    const arrow = (text, name, version) =>
      button(text, () => this.#actions.turn(this, version), "quiet", { "aria-label": name, title: name, disabled: !version });
    const back = arrow("‹", "Previous version", this.versions[at - 1]);
    const on = arrow("›", "Next version", this.versions[at + 1]);
    this.arrows.replaceChildren(...(this.versions.length > 1 ? [back, `${at + 1} of ${this.versions.length}`, on] : []));
  }

  /** Show the question, with `foot` below it while it is queued, and otherwise with a button to edit it. */
  showQuestion(...foot) {
    if (!this.asked) return;
    this.asked.classList.toggle("queued", foot.length > 0);
    const who = element("span", { className: "hidden" }, "You: ");
    const text = element("div", { className: "text", dir: "auto" }, this.question);
    const media = element("div", { className: "media" }, ...this.media.map(this.#actions.thumbnail));
    const below = element("div", { className: "foot" }, ...(foot.length ? foot : [button("Edit", () => this.edit())]));
    this.asked.replaceChildren(who, ...(this.media.length ? [media] : []), text, below);
  }

  /** Replace the question by a form for editing it. */
  edit() {
    const begun = this.asked.querySelector("textarea");
    if (begun) return begun.focus();
    const field = element("textarea", { value: this.question, rows: 2, "aria-label": "Edit your message" });
    const cancel = () => {
      this.showQuestion();
      this.asked.querySelector("button").focus();
    };
    const save = () => {
      if (!(field.value.trim() || this.media.length) || !this.#actions.ready()) return;
      this.showQuestion();
      this.#actions.again(this, field.value.trim());
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      else save();
      event.preventDefault();
      event.stopPropagation();
    });
    const foot = element("div", { className: "foot" }, button("Send", save, "main quiet"), button("Cancel", cancel));
    this.asked.replaceChildren(field, foot);
    field.focus();
  }
}
