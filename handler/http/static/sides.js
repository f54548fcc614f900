// The two sides of the chat, which can be folded: saved chats, and parameters with code and server.

import { $ } from "./dom.js";

const NARROW = matchMedia("(max-width: 56rem)"); // on narrow screens, a side covers the chat
const WIDE = matchMedia("(min-width: 80rem)");

const SIDES = ["history", "settings"];
const isOpen = (name) => !$(name).hidden;

function set(name, open) {
  $(name).hidden = !open;
  $(`${name}-toggle`).setAttribute("aria-expanded", String(open));
}

/** Fold a side that covers the chat. Return whether one did. */
export function uncover() {
  const over = NARROW.matches ? SIDES.filter(isOpen) : [];
  for (const name of over) {
    const focused = $(name).contains(document.activeElement);
    set(name, false);
    if (focused) $(`${name}-toggle`).focus();
  }
  return over.length > 0;
}

export const reveal = (name) => set(name, true);

export function toggle(name) {
  const open = !isOpen(name);
  if (open) uncover();
  set(name, open);
  if (open && NARROW.matches) $(name).querySelector("button, input, summary").focus();
}

function arrange() {
  (NARROW.matches ? $("settings") : document.querySelector("header")).insertBefore($("links"), NARROW.matches ? null : $("settings-toggle"));
  document.documentElement.style.setProperty("--top", `${document.querySelector("header").offsetHeight}px`);
  set("history", WIDE.matches);
  set("settings", !NARROW.matches);
}

for (const name of SIDES) {
  $(`${name}-toggle`).addEventListener("click", () => toggle(name));
}
$("log").addEventListener("pointerdown", uncover);
for (const query of [NARROW, WIDE]) query.addEventListener("change", arrange);
arrange();
