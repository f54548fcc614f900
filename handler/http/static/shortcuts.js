// The keyboard shortcuts and their list.

import { $, element } from "./dom.js";

const MOD = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘ " : "Ctrl+";

/** Return the pressed keys as the list names them. Shift is named for letters only, as signs may need it on some keyboards. */
function pressed({ key, ctrlKey, metaKey, shiftKey }) {
  const name = key.length === 1 ? key.toUpperCase() : key;
  return `${ctrlKey || metaKey ? MOD : ""}${shiftKey && /^[A-Z]$/.test(name) ? "Shift+" : ""}${name}`;
}

const isField = (target) => target.matches("input, textarea, select");

/** Handle shortcuts outside of dialogs: `newChat`, `search`, and `fold` for the side with the chats. */
export function shortcuts({ newChat, search, fold }) {
  const list = $("keys");
  const show = () => list.showModal();
  const rows = [
    ["Enter", "Send the message; queue it while an answer is coming"],
    ["Shift+Enter", "Start a new line"],
    ["↑", "Edit your last message, from an empty field"],
    ["Esc", "Stop the answer; close what is open"],
    [`${MOD}Shift+O`, "Start a new chat", newChat],
    [`${MOD}K`, "Search chats", search],
    [`${MOD}B`, "Show or hide the chats", fold],
    [`${MOD}/`, "Show these shortcuts", show],
    ["?", "The same, outside a text field", show],
  ];
  $("keys-list").append(...rows.map(([keys, text]) => element("div", {}, element("dt", {}, element("kbd", {}, keys)), element("dd", {}, text))));
  $("keys-button").addEventListener("click", show);
  document.addEventListener("keydown", (event) => {
    const keys = pressed(event);
    const act = rows.find(([name]) => name === keys)?.[2];
    if (!act || event.altKey || document.querySelector("dialog[open]") || (keys === "?" && isField(event.target))) return;
    event.preventDefault();
    act();
  });
}
