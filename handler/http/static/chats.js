// Chats saved in this browser's IndexedDB: `heads` for the list and its search, `bodies` for the rest.

const NAME = "lmi-chats";
const MAX_SEARCHED = 20_000; // maximum characters of a chat that a search covers
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(NAME) : null;

let opening = null;

/** Describe why chats cannot be saved. */
export function problem(error) {
  if (error?.name === "QuotaExceededError") return "The browser's storage is full. Export this chat or delete others.";
  return `This browser cannot save chats${error?.message ? `: ${error.message}` : "."}`;
}

export const newId = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      for (const name of ["heads", "bodies"]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => {
      const database = request.result;
      database.onversionchange = () => database.close();
      database.onclose = () => (opening = null);
      resolve(database);
    };
    request.onerror = () => reject(request.error);
  }).catch((error) => {
    opening = null; // the next call tries again
    throw error;
  });
  return opening;
}

/** Run `work(heads, bodies)` in a transaction. Return the result of the request that it returns, if any. */
async function transaction(mode, work) {
  const open = await database();
  return new Promise((resolve, reject) => {
    const running = open.transaction(["heads", "bodies"], mode);
    const request = work(running.objectStore("heads"), running.objectStore("bodies"));
    running.oncomplete = () => resolve(request?.result);
    running.onabort = () => reject(running.error ?? new DOMException("The transaction was aborted", "AbortError"));
  });
}

const texts = (exchange) => [exchange.question ?? "", exchange.answer?.content ?? ""];

function head({ id, title, created, updated, revision, exchanges }) {
  return { id, title, created, updated, revision, text: exchanges.flatMap(texts).join("\n").slice(0, MAX_SEARCHED).toLowerCase() };
}

/** The heads of all chats, the most recently changed first, including unreadable ones. */
export async function list() {
  const heads = await transaction("readonly", (heads) => heads.getAll());
  return heads.sort((one, other) => (Number(other.updated) || 0) - (Number(one.updated) || 0));
}

/** Return the heads whose title or text contains every word. */
export function search(heads, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return heads.filter(({ title, text }) => wanted.every((word) => `${title}\n${text}`.toLowerCase().includes(word)));
}

/** A saved chat, or undefined. Its format must be verified with `checked`. */
export const load = (id) => transaction("readonly", (_, bodies) => bodies.get(id));

const isText = (value) => typeof value === "string";
const isRecord = (value) => typeof value === "object" && value !== null;
const isListOf = (list, isOne) => Array.isArray(list) && list.every(isOne);
const isLikely = (token) => isRecord(token) && isText(token.token) && typeof token.logprob === "number";
const isToken = (token) => isLikely(token) && isListOf(token.others, isLikely);
const isCall = (call) => isRecord(call) && [call.id, call.name, call.arguments, call.result].every(isText);
const isMedium = (medium) => isRecord(medium) && ["image", "audio"].includes(medium.kind) && [medium.kind, medium.name, medium.type, medium.data].every(isText);

function isAnswer(answer) {
  if (answer === null) return true;
  const texts = ["content", "reasoning", "note", "failure", "model"];
  if (!isRecord(answer) || !texts.every((name) => isText(answer[name]))) return false;
  return isListOf(answer.calls, isCall) && isListOf(answer.tokens ?? [], isToken);
}

/** Check an exchange or one of its versions, where null stands for the exchange itself. */
function isExchange(exchange) {
  if (!isRecord(exchange) || !(exchange.question === null || isText(exchange.question))) return false;
  const { media, answer, versions = [], later = [] } = exchange;
  const isVersion = (version) => version === null || isExchange(version);
  const own = versions?.length ? versions.filter((version) => version === null).length === 1 : true;
  return isListOf(media, isMedium) && isAnswer(answer) && isListOf(versions, isVersion) && own && isListOf(later, isExchange);
}

/** Return the chat. Throws an error if it does not have the format that `save` writes. */
export function checked(chat) {
  if (!chat) throw new Error("This chat no longer exists.");
  const { exchanges } = chat;
  const whole = isText(chat.id) && isText(chat.title) && isText(chat.system) && Number.isInteger(chat.revision) && isListOf(exchanges, isExchange);
  if (!whole) throw new Error("This chat cannot be read: its format is unknown.");
  return chat;
}

/**
 * Save a chat as the revision after `chat.revision`. If another tab has saved a newer revision, this chat gets
 * a new id, so that neither is lost. Returns the saved chat.
 */
export async function save(chat) {
  let kept = null;
  await transaction("readwrite", (heads, bodies) => {
    const before = heads.get(chat.id);
    before.onsuccess = () => {
      const elsewhere = before.result && before.result.revision !== chat.revision;
      const own = elsewhere ? { id: newId(), title: `${chat.title} (copy)`, revision: 1 } : { revision: chat.revision + 1 };
      kept = { ...chat, ...own };
      heads.put(head(kept));
      bodies.put(kept);
    };
  });
  channel?.postMessage({ id: kept.id });
  return kept;
}

/** Rename a chat, which increases its revision. Returns the new revision, or null if the chat cannot be read. */
export async function rename(id, title) {
  const chat = await load(id);
  try {
    return await save({ ...checked(chat), title });
  } catch (error) {
    if (chat && error instanceof DOMException) throw error;
    return null;
  }
}

/** Delete chats. Returns their saved data, for `restore`. */
export async function remove(ids) {
  const gone = [];
  await transaction("readwrite", (heads, bodies) => {
    for (const id of ids) {
      const kept = {};
      heads.get(id).onsuccess = ({ target }) => (kept.head = target.result);
      bodies.get(id).onsuccess = ({ target }) => (kept.body = target.result);
      gone.push(kept);
      heads.delete(id);
      bodies.delete(id);
    }
  });
  for (const id of ids) channel?.postMessage({ id });
  return gone;
}

/** Save the data again that `remove` has returned. */
export async function restore(gone) {
  await transaction("readwrite", (heads, bodies) => {
    for (const { head, body } of gone) {
      if (head) heads.put(head);
      if (body) bodies.put(body);
    }
  });
  for (const { head, body } of gone) channel?.postMessage({ id: (head ?? body)?.id });
}

/** Call `changed(id)` when another tab has saved, renamed or deleted a chat. */
export function listen(changed) {
  channel?.addEventListener("message", ({ data }) => changed(data.id));
}

// -- files -------------------------------------------------------------------------------------------------------

const EXTENSION = { "application/json": "json", "text/markdown": "md" };

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${name.replace(/[^\p{L}\p{N} ._-]/gu, "").trim().slice(0, 60) || "chat"}.${EXTENSION[type]}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Export the chats as they are saved, including unreadable ones. */
export const exportJson = (name, chats) =>
  download(name, "application/json", JSON.stringify({ format: "lmi-handler chats", version: 1, chats }, null, 2));

export const exportMarkdown = (chat) => download(chat.title, "text/markdown", markdown(chat));

/** Return a Markdown fence that is longer than all those in the text. */
function fenced(text, language = "") {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(({ 0: run }) => run.length + 1)));
  return `${fence}${language}\n${text}\n${fence}`;
}

function markdown({ title, system, exchanges }) {
  const parts = [`# ${title.replaceAll("\n", " ")}`];
  if (system) parts.push("## System", system);
  for (const { question, media, answer } of exchanges) {
    if (question !== null) parts.push("## You", question);
    if (media.length) parts.push(media.map(({ name }) => `*Attached: ${name}*`).join("\n\n"));
    if (!answer) continue;
    parts.push(`## ${answer.model || "Model"}`);
    if (answer.reasoning) parts.push(`<details><summary>Reasoning</summary>\n\n${fenced(answer.reasoning, "text")}\n\n</details>`);
    if (answer.content) parts.push(answer.content);
    for (const call of answer.calls) {
      parts.push(`Tool call \`${call.name}\`:`, fenced(call.arguments, "json"), ...(call.result ? ["Result:", fenced(call.result)] : []));
    }
    if (answer.failure) parts.push(`*Interrupted: ${answer.failure}*`);
  }
  return `${parts.join("\n\n")}\n`;
}
