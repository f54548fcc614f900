// Light, dark, or the system's: before the page is drawn, so that it does not flash.
"use strict";

{
  const KEY = "lmi-theme"; // in localStorage, once one was chosen
  const THEMES = ["light", "dark"];

  const kept = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // the browser keeps nothing
    }
  };

  const show = (theme) => {
    if (THEMES.includes(theme)) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };

  const choose = (theme) => {
    show(theme);
    try {
      if (THEMES.includes(theme)) localStorage.setItem(KEY, theme);
      else localStorage.removeItem(KEY);
    } catch {
      // It holds until the page is closed.
    }
  };

  show(kept());
  addEventListener("storage", ({ key, newValue }) => key === KEY && show(newValue)); // chosen in another tab
  addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    if (!choice) return;
    choice.value = document.documentElement.dataset.theme ?? "";
    choice.addEventListener("change", () => choose(choice.value));
  });
}
