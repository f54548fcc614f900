// Formulas in an answer's Markdown: TeX between dollars or in LaTeX's brackets, shown as MathML by Temml.

const MAX_TEX = 2000; // characters
const LONG = 60; // characters; longer inline formulas may be wider than a phone

const ANY = `{1,${MAX_TEX}}?`;
const DISPLAYED = String.raw`(?:\$\$([^$]${ANY})\$\$|\\\[([^]${ANY})\\\])`;
// To exclude prices, a formula has no space next to its dollars, and no letter or digit after them.
const WITHIN = String.raw`(?:\$(?![\s$])((?:\\.|[^\\$\n])${ANY})(?<!\s)\$(?![\w$])|\\\(([^]${ANY})\\\))`;

const BLOCK_DISPLAYED = new RegExp(String.raw`^ {0,3}${DISPLAYED}[ \t]*(?=\n|$)`);
const INLINE_DISPLAYED = new RegExp(`^${DISPLAYED}`);
const INLINE = new RegExp(`^${WITHIN}`);

const OPTIONS = { throwOnError: true, trust: false, strict: false, maxExpand: 100, maxSize: [30, 400] };
const MATHML = "http://www.w3.org/1998/Math/MathML";
const SAFE = /^(?!on|id$|name$|href$|src$|action|xlink)[a-z-]+$/i;

let waiting = []; // elements rendered before Temml was loaded

function token(type, found, display) {
  return found && { type, raw: found[0], text: (found[1] ?? found[2]).trim(), display };
}

const shown = (escape) => ({ text, display }) => `<code class="${display ? "tex display" : "tex"}">${escape(text)}</code>`;

/** Extensions of marked. `escape` escapes text for HTML. */
export const extensions = (escape) => [
  {
    name: "formulaBlock",
    level: "block",
    start: (text) => /(?<=\n) {0,3}(?:\$\$|\\\[)/.exec(text)?.index,
    tokenizer: (text) => token("formulaBlock", BLOCK_DISPLAYED.exec(text), true),
    renderer: (found) => `<p>${shown(escape)(found)}</p>`,
  },
  {
    name: "formula",
    level: "inline",
    start: (text) => /\$|\\[([]/.exec(text)?.index,
    tokenizer: (text) => token("formula", INLINE_DISPLAYED.exec(text), true) ?? token("formula", INLINE.exec(text), false),
    renderer: shown(escape),
  },
];

/** Convert TeX to MathML. Return null if it is invalid, or would create other elements. */
function mathml(tex, displayMode) {
  const made = document.createElement("span");
  try {
    globalThis.temml.render(tex, made, { ...OPTIONS, displayMode });
  } catch {
    return null; // invalid TeX, or it expands too much
  }
  const all = [...made.querySelectorAll("*")];
  const safe = all.every((node) => node.namespaceURI === MATHML && [...node.attributes].every(({ name }) => SAFE.test(name)));
  return safe && all.length ? made : null;
}

function typeset(code) {
  const display = code.classList.contains("display");
  const made = mathml(code.textContent, display);
  if (!made) return;
  made.className = display ? "formula display" : "formula";
  made.classList.toggle("long", display || code.textContent.length > LONG);
  if (display) made.tabIndex = 0; // so that the keyboard can scroll it
  if (display) Object.entries({ role: "group", "aria-label": "Formula" }).forEach((pair) => made.setAttribute(...pair));
  code.replaceWith(made);
}

/** Render the formulas in a part of an answer. */
export function formulas(fragment) {
  const found = [...fragment.querySelectorAll("code.tex")];
  if (globalThis.temml) found.forEach(typeset);
  else waiting.push(...found);
}

document.getElementById("temml")?.addEventListener("load", () => {
  waiting.filter((code) => code.isConnected).forEach(typeset);
  waiting = [];
});
