// The form for a request's fields, with their descriptions and presets.

import { $, button, element } from "./dom.js";

const number = (placeholder, min, max, step = "any") => ({ type: "number", placeholder, min, max, step });

/** Input and description of each field, by name. */
const FIELDS = {
  max_tokens: [number("all that fits", 1, "", 1), "The maximum length of the answer. A token is about three quarters of an English word."],
  temperature: [number("1", 0, 2), "0 always picks the most likely token. Higher values give more varied answers, with more mistakes."],
  top_p: [number("1", 0, 1), "Samples only from the most likely tokens whose probabilities add up to this value. 1 allows all tokens."],
  seed: [number("random", 0, "", 1), "The same request with the same seed gives the same answer."],
  presence_penalty: [number("0", -2, 2), "Above 0, tokens already in the answer become less likely, which favours new words."],
  frequency_penalty: [number("0", -2, 2), "Above 0, tokens become less likely each time they are used, which reduces repetition."],
  top_logprobs: [number("off", 0, 20, 1), "Adds a Tokens button to answers. It shows the probability of each token and of this many alternatives."],
  stop: [{ type: "text", placeholder: "none", autocomplete: "off" }, "The answer stops before this text.", "(one string)"],
};

/** Label and description of the other fields, by id. */
const OTHERS = {
  "p-system": ["System message", "Comes before the chat and tells the model how to answer."],
  "p-more": ["More fields", "Other fields of the request, such as tools or response_format, as a JSON object."],
  "p-stream": ["streaming", "Shows the answer while it is generated instead of all at once at the end."],
};

/** Values of each preset, by name. The other fields in `PRESET` are emptied. */
const PRESETS = {
  Balanced: { temperature: "0.7", top_p: "0.9" },
  Precise: { temperature: "0" },
  Creative: { temperature: "1", top_p: "0.95", presence_penalty: "0.5" },
  "Server defaults": {},
};
const PRESET = ["temperature", "top_p", "presence_penalty", "frequency_penalty"];
const OWN = "Custom";

/** Return a button that shows a field's description on hover, focus or touch. */
export function help(id, name, text) {
  const tip = element("span", { id, className: "tip", role: "tooltip" }, text);
  const labels = { "aria-label": `About ${name}`, "aria-describedby": id };
  const about = button("?", () => about.focus(), "about", labels); // Safari does not focus clicked buttons
  about.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    about.blur();
  });
  return [about, tip];
}

function field([name, [properties, text, remark]]) {
  const input = element("input", { id: `p-${name}`, name, ...properties, "aria-describedby": `t-${name}` });
  const label = element("label", { htmlFor: input.id }, name, ...(remark ? [" ", element("small", {}, remark)] : []));
  const box = element("div", {}, element("div", { className: "name" }, label, ...help(`t-${name}`, name, text)), input);
  box.classList.toggle("wide", properties.type === "text");
  return box;
}

let unserved = new Set(); // fields that the engine refuses

/** Hide the fields that the engine refuses. Every engine gives the probability of the chosen token, which 0 and 1 ask for. */
export function offer(served) {
  unserved = new Set(served ? Object.keys(FIELDS).filter((name) => !served.includes(name)) : []);
  const tops = $("p-top_logprobs");
  tops.max = unserved.delete("top_logprobs") ? 1 : 20;
  if (Number(tops.value) > Number(tops.max)) tops.value = tops.max; // kept from another engine
  const preset = $("p-preset").value;
  for (const name of Object.keys(FIELDS)) {
    $(`p-${name}`).parentElement.hidden = unserved.has(name);
    if (unserved.has(name)) $(`p-${name}`).value = "";
  }
  if (preset in PRESETS) take(PRESETS[preset]);
  showPreset();
}

const valueIn = (preset, name) => (unserved.has(name) ? "" : (preset[name] ?? ""));
const values = () => Object.fromEntries(PRESET.map((name) => [name, $(`p-${name}`).value]));
const same = (preset) => PRESET.every((name) => values()[name] === valueIn(preset, name));

function take(preset) {
  for (const name of PRESET) $(`p-${name}`).value = valueIn(preset, name);
}

/** Select the preset that the fields match. */
function showPreset() {
  $("p-preset").value = Object.keys(PRESETS).find((name) => same(PRESETS[name])) ?? OWN;
}

/** Return the fields that the user has entered as JSON. Anything but an object is not sent. */
function moreFields() {
  const field = $("p-more");
  let value = {};
  try {
    value = JSON.parse(field.value || "{}");
  } catch (error) {
    field.setCustomValidity(`This is not JSON: ${error.message}`);
    return {};
  }
  const isObject = typeof value === "object" && value !== null && !Array.isArray(value);
  field.setCustomValidity(isObject ? "" : "This must be a JSON object.");
  return isObject ? value : {};
}

/** Return the fields of the request. Empty fields are not sent. */
export function parameters() {
  const found = {};
  for (const field of $("parameters").elements) {
    if (!field.name || field.value === "") continue;
    if (field.type === "number") found[field.name] = field.valueAsNumber;
    else if (field.type !== "checkbox") found[field.name] = field.value;
    else if (field.checked) found[field.name] = true;
  }
  return { ...found, ...("top_logprobs" in found ? { logprobs: true } : {}), ...moreFields() };
}

for (const [id, [name, text]] of Object.entries(OTHERS)) {
  $(id).setAttribute("aria-describedby", `t-${id}`);
  document.querySelector(`label[for=${id}]`).after(...help(`t-${id}`, name, text));
}
$("fields").replaceWith(...Object.entries(FIELDS).map(field));
$("p-preset").append(...[...Object.keys(PRESETS), OWN].map((name) => element("option", {}, name)));
$("p-preset").lastChild.hidden = true; // "Custom" stands for all other values, and cannot be chosen
$("p-preset").addEventListener("change", () => take(PRESETS[$("p-preset").value] ?? values()));
$("parameters").addEventListener("input", ({ target }) => target !== $("p-preset") && showPreset());
$("parameters").addEventListener("submit", (event) => event.preventDefault());
take(PRESETS.Balanced);
showPreset();
