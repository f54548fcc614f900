// Colours code with CSS highlights, which are ranges over its text. The text stays a single node that may grow.

import { tokenizer } from "./vendor/highlight/tokenize.js";

const MAX_CODE = 10_000; // characters
// The time of the languages' patterns grows with the square of longer runs.
const LONG_RUN = /\w{250}|\s{250}|.{1000}/;
const MAX_TIME = 100; // milliseconds; a block that takes longer twice in a row is not coloured again

/** Aliases of languages in fences. */
const ALIASES = {
  bash: ["sh", "shell", "zsh", "console"], c: ["c++", "cpp", "cc", "h", "hpp", "cs", "csharp", "c#"], css: ["scss", "less"],
  diff: ["patch"], docker: ["dockerfile"], go: ["golang"], html: ["htm", "vue", "svelte"], ini: ["cfg", "conf", "properties"],
  java: ["kotlin", "kt", "scala"], js: ["javascript", "jsx", "mjs"], json: ["jsonl", "json5", "jsonc"], make: ["makefile"],
  md: ["markdown"], pl: ["perl"], py: ["python", "python3", "pycon"], rs: ["rust"], ts: ["typescript", "tsx"], xml: ["svg"],
  yaml: ["yml"], http: [], lua: [], sql: [], toml: [],
};
const LANGUAGES = new Map(Object.entries(ALIASES).flatMap(([own, names]) => [own, ...names].map((name) => [name, own])));

/** Colours in style.css by the tokenizer's types. */
const KINDS = {
  kwd: "keyword", section: "keyword", str: "string", insert: "string", cmnt: "comment", num: "number", bool: "number",
  func: "function", class: "function", type: "function", var: "variable", deleted: "variable", err: "variable",
};

const supported = "highlights" in (globalThis.CSS ?? {}) && "StaticRange" in globalThis;
const loaded = new Map(); // patterns of languages by name; null if there are none
const painted = new Map(); // ranges and their highlights, by the code's element
const slow = new WeakMap(); // number of consecutive times that colouring took too long, by the code's element

function highlight(kind) {
  const found = CSS.highlights.get(kind) ?? new Highlight();
  CSS.highlights.set(kind, found);
  return found;
}

function clear(code) {
  for (const [kind, range] of painted.get(code) ?? []) kind.delete(range);
  painted.delete(code);
}

/** Return the patterns of a language. `again` is called when they have been loaded. */
function patterns(name, again) {
  if (!loaded.has(name)) {
    loaded.set(name, null);
    import(`./vendor/highlight/${name}.js`).then(({ default: found }) => loaded.set(name, found), () => {}).then(again);
  }
  return loaded.get(name) ?? [];
}

/** Colour the text of an element, which is a single node. `language` is taken from the fence. */
export function colour(code, language) {
  const name = LANGUAGES.get((language ?? "").toLowerCase());
  const node = code.firstChild;
  if (!supported || !name || !node || slow.get(code) > 1) return;
  clear(code);
  for (const other of painted.keys()) if (!other.isConnected && other !== code) clear(other);
  if (node.length > MAX_CODE || LONG_RUN.test(node.data)) return;
  const began = performance.now();
  const again = () => colour(code, language);
  const ranges = [];
  let start = 0;
  const running = tokenizer(node.data, name, (text, type) => {
    const end = start + text.length;
    if (KINDS[type]) ranges.push([highlight(KINDS[type]), new StaticRange({ startContainer: node, startOffset: start, endContainer: node, endOffset: end })]);
    start = end;
  });
  for (let step = running.next(); !step.done; ) step = running.next(patterns(step.value, again));
  for (const [kind, range] of ranges) kind.add(range);
  painted.set(code, ranges);
  slow.set(code, performance.now() - began > MAX_TIME ? (slow.get(code) ?? 0) + 1 : 0);
}
