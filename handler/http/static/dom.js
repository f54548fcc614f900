// Helpers that find elements by id and create them.

export const $ = (id) => document.getElementById(id);

/** Create an element with children and properties. A name with a dash is an attribute. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-")) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

export const button = (text, action, className = "quiet", properties = {}) =>
  element("button", { type: "button", className, textContent: text, onclick: action, ...properties });
