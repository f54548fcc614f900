// The panel of saved chats: a list with a search, and actions to rename, export and delete a chat, with undo.

import * as chats from "./chats.js";
import { $, button, element } from "./dom.js";

const UNDO = 15_000; // milliseconds

const UNREADABLE = "Unreadable chat";

let heads = [];
let shown = null; // the id of the chat that the page shows
let chosen = null; // the id of the chat whose menu is open
let timer = 0;
let told = ""; // the problem that the user was told about, with the offer to export the chat
let actions;

/** `actions.open(id)` shows a chat, or a new one for null; `rename(id, title)` renames it; `copy(id, client)` copies it as code; `changed(id)` is called after a change in another tab. */
export function begin(given) {
  actions = given;
  chats.listen(async (id) => {
    await refresh();
    actions.changed(id);
  });
  return refresh();
}

export function select(id) {
  shown = id;
  render();
}

/** Show a message, with a button for an action. */
export function tell(text, label, act) {
  clearTimeout(timer);
  const close = () => ($("toast").hidden = true);
  const acts = label ? [button(label, () => (close(), act()), "main quiet")] : [];
  $("toast").replaceChildren(element("span", {}, text), ...acts, button("✕", close, "quiet", { "aria-label": "Dismiss" }));
  $("toast").hidden = false;
  timer = setTimeout(close, UNDO);
}

/** Show why chats cannot be saved, or "" when they can. `save` exports the chat that was not saved. */
export function warn(text, save) {
  $("chats-problem").textContent = text;
  $("chats-problem").hidden = !text;
  if (!text) told = "";
  else if (save && text !== told) {
    told = text;
    tell(text, "Export this chat", save);
  }
}

export async function refresh() {
  try {
    heads = await chats.list();
  } catch (error) {
    warn(chats.problem(error));
  }
  render();
}

const named = ({ title }) => (typeof title === "string" && title ? title : UNREADABLE);

function when({ updated }) {
  const date = new Date(updated);
  if (Number.isNaN(date.getTime())) return "";
  const today = date.toDateString() === new Date().toDateString();
  return today ? date.toLocaleTimeString([], { timeStyle: "short" }) : date.toLocaleDateString([], { dateStyle: "medium" });
}

function item(head) {
  const open = element("button", { type: "button", className: "open" }, element("span", { dir: "auto" }, named(head)), element("small", {}, when(head)));
  open.addEventListener("click", () => actions.open(head.id));
  if (head.id === shown) open.setAttribute("aria-current", "true");
  const more = button("⋯", () => showMenu(head.id, more), "more", { "aria-label": `More for ${named(head)}`, "aria-haspopup": "menu" });
  const entry = element("li", {}, open, more);
  entry.dataset.id = head.id;
  return entry;
}

const entryOf = (id) => [...$("chats").children].find(({ dataset }) => dataset.id === id);

function render() {
  const focused = document.activeElement;
  if ($("chats").contains(focused) && focused.matches("input")) return; // the user is renaming a chat
  const found = chats.search(heads, $("chats-search").value);
  const { id } = focused.closest?.("#chats li")?.dataset ?? {};
  $("chats").replaceChildren(...found.map(item));
  if (id) entryOf(id)?.querySelector(`.${focused.className}`)?.focus();
  $("chats-none").textContent = heads.length ? "No chats match." : "Your chats are saved in this browser.";
  $("chats-none").hidden = found.length > 0;
  $("chats-all").hidden = heads.length === 0;
}

// -- the menu of a chat ------------------------------------------------------------------------------------------

function showMenu(id, beside) {
  chosen = id;
  const menu = $("chat-menu");
  menu.showPopover();
  const { right, bottom, top } = beside.getBoundingClientRect();
  const below = bottom + menu.offsetHeight < innerHeight;
  menu.style.left = `${Math.max(4, Math.min(right - menu.offsetWidth, innerWidth - menu.offsetWidth - 4))}px`;
  menu.style.top = `${below ? bottom : top - menu.offsetHeight}px`;
  menu.querySelector("button").focus();
}

/** Run an action on the chosen chat or on all chats, and show its error. */
function onClick(name, act) {
  $(name).addEventListener("click", async () => {
    if ($("chat-menu").contains($(name))) $("chat-menu").hidePopover();
    try {
      await act(chosen);
    } catch (error) {
      tell(error instanceof DOMException ? chats.problem(error) : error.message);
    }
  });
}

function renameInPlace(id) {
  const entry = entryOf(id);
  const head = heads.find((one) => one.id === id);
  if (!entry || !head) return;
  const field = element("input", { type: "text", value: named(head), maxLength: 200, "aria-label": "Name of the chat" });
  let left = false;
  const leave = async (keep) => {
    if (left) return;
    left = true;
    const title = field.value.trim();
    if (keep && title && title !== head.title) {
      const kept = await actions.rename(id, title).catch((error) => tell(chats.problem(error)));
      if (kept === null) tell("An unreadable chat cannot be renamed.");
    }
    field.remove();
    await refresh();
    entryOf(id)?.querySelector(".open").focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    leave(event.key === "Enter");
  });
  field.addEventListener("blur", () => leave(true));
  entry.replaceChildren(field);
  field.select();
}

/** Delete chats immediately. Undoing saves them again. */
async function remove(ids, text) {
  const back = ids.includes(shown) ? shown : null;
  if (back) actions.open(null);
  const gone = await chats.remove(ids);
  await refresh();
  tell(text, "Undo", async () => {
    await chats.restore(gone).catch((error) => tell(chats.problem(error)));
    await refresh();
    if (back) actions.open(back);
  });
}

const titleOf = (id) => named(heads.find((head) => head.id === id) ?? {});

onClick("chat-rename", renameInPlace);
onClick("chat-curl", (id) => actions.copy(id, "curl"));
onClick("chat-python", (id) => actions.copy(id, "openai"));
onClick("chat-json", async (id) => chats.exportJson(titleOf(id), [await chats.load(id)]));
onClick("chat-markdown", async (id) => chats.exportMarkdown(chats.checked(await chats.load(id))));
onClick("chat-delete", (id) => remove([id], `Deleted “${titleOf(id)}”.`));

onClick("chats-json", async () => {
  const all = await Promise.all(heads.map(({ id }) => chats.load(id)));
  chats.exportJson("chats", all.filter(Boolean));
});
onClick("chats-delete", () => remove(heads.map(({ id }) => id), heads.length === 1 ? "Deleted the chat." : `Deleted ${heads.length} chats.`));
$("chats-search").addEventListener("input", render);
