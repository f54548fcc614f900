// Elements: found by id, and made.

export const $ = (id) => document.getElementById(id);

/** Make an element with properties, attributes where a name has a dash, and children. */
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
