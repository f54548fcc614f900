// Sets the theme (light, dark or the system's) before the page is drawn, so that it does not flash.
"use strict";

{
  const KEY = "lmi-theme"; // in localStorage, after the user has chosen a theme
  const THEMES = ["light", "dark"];

  const kept = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // the browser does not allow storage
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
      // The choice lasts until the page is closed.
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
