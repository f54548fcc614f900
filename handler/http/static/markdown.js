// Renders an answer's Markdown as it grows: finished blocks once, the last block again for each frame.

import { element } from "./dom.js";
import { extensions, formulas } from "./formulas.js";
import { colour } from "./syntax.js";
import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;

// Characters. A longer block stays plain text: marked's time for emphasis and nesting grows with the square of a block.
const MAX_BLOCK = 20_000;
const MAX_CODE = 200_000;
const MAX_TIME = 2_000; // milliseconds that the page may stand still, for several megabytes or what is made to be slow

/** A text's first block, if it is code between fences: to the closing fence, or to the end. */
const FENCED = /^ {0,3}(`{3,}(?=[^`\n]*(?:\n|$))|~{3,})[^]*?(?:\n {0,3}\1[~`]* *(?=\n|$)|$)/;

const escape = (text) => text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text), // an answer's own HTML is shown, never interpreted
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(`[image: ${text || href}]`)}</a>`, // never fetched
  },
});

marked.use({ extensions: extensions(escape) });

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "input", "blockquote", "pre", "code",
    "em", "strong", "del", "a", "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "type", "checked", "disabled"],
  ADD_URI_SAFE_ATTR: ["start", "align", "type"], // no addresses
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Put a bar with the language above a `pre`, and a button: `.copy`, to which the page listens. */
function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "text";
  colour(code, language);
  const copy = element("button", { type: "button", className: "quiet copy", "aria-label": "Copy code" }, "Copy");
  const block = element("div", { className: "code-block", dir: "ltr" }, element("div", { className: "bar" }, element("span", {}, language), copy));
  pre.replaceWith(block);
  Object.assign(pre, { tabIndex: 0, role: "group", ariaLabel: "Code" }); // scrolls sideways by the keyboard too
  block.append(pre);
}

function scrolled(table) {
  const box = element("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": "Table" });
  table.replaceWith(box);
  box.append(table);
}

/** Where the first blank line at or after `from` ends; the end of the text, if there is none. */
function blankLine(text, from) {
  const blank = /\n[ \t]*\n/g;
  blank.lastIndex = from;
  return blank.test(text) ? blank.lastIndex : text.length;
}

const plain = (text) => element("div", { className: "plain" }, text);

/** Marked's tokens as DOM nodes that hold nothing but the elements and attributes of `ALLOWED`. */
function nodes(tokens) {
  const fragment = DOMPurify.sanitize(marked.parser(tokens), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const box of fragment.querySelectorAll("input")) {
    if (box.type === "checkbox") box.setAttribute("aria-label", box.checked ? "done" : "to do");
    else box.remove();
  }
  formulas(fragment);
  for (const table of fragment.querySelectorAll("table")) scrolled(table);
  for (const block of fragment.querySelectorAll("p, ul, ol, li, blockquote, table, h1, h2, h3, h4, h5, h6")) block.dir = "auto";
  for (const pre of fragment.querySelectorAll("pre")) codeBlock(pre);
  return [...fragment.childNodes].filter((node) => node.textContent.trim() || node.nodeType === Node.ELEMENT_NODE);
}

/** Shows a text that grows in `element`. `text` is all of it; what is shown follows by `render`. */
export class MarkdownView {
  #element;
  #text = "";
  #source = ""; // the text without carriage returns, which marked does not count
  #start = 0; // of the last block in the source
  #last = []; // the last block's nodes
  #language = null; // the last block's, if it is code

  constructor(element) {
    this.#element = element;
  }

  get text() {
    return this.#text;
  }

  append(text) {
    this.#text += text;
    this.#source += text.replaceAll("\r", "");
  }

  /** Costs what the text since the last finished block costs. True if the time was too short for all of it. */
  render() {
    const began = performance.now();
    let more = true;
    while (more && performance.now() - began < MAX_TIME) more = this.#renderPart();
    return more;
  }

  /** Read no more than `MAX_BLOCK` characters and a block of code. True if it finished some, and there are more. */
  #renderPart() {
    const rest = this.#source.slice(this.#start);
    const code = FENCED.exec(rest)?.[0].length ?? 0;
    if (code > MAX_CODE) return this.#renderPlain(rest, code);
    const long = this.#longPlain;
    if (long) return this.#renderPlain(rest, blankLine(rest, rest.slice(0, long).trimEnd().length));
    const part = rest.slice(0, code + MAX_BLOCK);
    const more = part.length < rest.length;
    try {
      const tokens = marked.lexer(part);
      const last = tokens.findLastIndex((token) => token.type !== "space");
      const finished = tokens.slice(0, more && last < 0 ? tokens.length : Math.max(last, 0));
      const length = finished.reduce((sum, token) => sum + token.raw.length, 0);
      if (more && !length) return this.#renderPlain(rest, blankLine(rest, tokens[0].raw.trimEnd().length));
      const grown = this.#growCode(tokens[0]);
      tokens.splice(0, more ? tokens.length : finished.length); // the next part begins with the last block
      if (grown && finished.length) {
        this.#last = []; // it stays as it is
        finished.shift();
      }
      if (!grown || length) this.#replace(nodes(finished), nodes(tokens), tokens[0]?.lang);
      this.#start += length;
      return more;
    } catch {
      return this.#renderPlain(rest, blankLine(rest, code)); // nested deeper than the parser can go
    }
  }

  /** Show all of the text. Render it once more, if it defines links that earlier blocks use. */
  finish() {
    if (this.render()) this.#replace([], [plain(this.#source.slice(this.#start))]);
    if (this.#start && /^ {0,3}\[[^\]\n]+\]:/m.test(this.#source) && this.#source.length <= MAX_BLOCK) {
      this.#start = 0;
      this.#element.replaceChildren();
      this.#last = [];
      this.render();
    }
  }

  /** A code block that grows keeps its nodes: a selection in it lasts, and so does the focus on its button. */
  #growCode(token) {
    const [block] = this.#last;
    const shown = block?.querySelector?.(":scope > pre > code")?.firstChild;
    if (!shown || this.#last.length > 1 || token?.type !== "code" || token.lang !== this.#language) return false;
    const before = shown.data.slice(0, -1); // without its line end
    if (!token.text.startsWith(before)) return false;
    shown.replaceData(before.length, 1, `${token.text.slice(before.length)}\n`);
    colour(shown.parentNode, token.lang);
    return true;
  }

  /** The length of the plain text that grows, if it is too long to read again. */
  get #longPlain() {
    const [block] = this.#last;
    return block?.className === "plain" && block.firstChild.length > MAX_BLOCK ? block.firstChild.length : 0;
  }

  /** Show a block that ends at `end` as it is. True if more follows; else it may grow. */
  #renderPlain(rest, end) {
    const [block] = this.#last;
    if (end < rest.length) {
      this.#replace([plain(rest.slice(0, end).trimEnd())], []);
      this.#start += end;
    } else if (block?.className === "plain") block.firstChild.appendData(rest.slice(block.firstChild.length));
    else this.#replace([], [plain(rest)]);
    return end < rest.length;
  }

  #replace(finished, last, language = null) {
    for (const node of this.#last) node.remove();
    this.#element.append(...finished, ...last);
    this.#last = last;
    this.#language = language;
  }
}
