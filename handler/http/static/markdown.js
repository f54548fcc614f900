// Renders the Markdown of a streaming answer: complete blocks once, the last block again for each frame.

import { element } from "./dom.js";
import { extensions, formulas } from "./formulas.js";
import { colour } from "./syntax.js";
import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;

// Characters. Longer blocks stay plain text, because marked's time for emphasis and nesting grows with their square.
const MAX_BLOCK = 20_000;
const MAX_CODE = 200_000;
const MAX_TIME = 2_000; // maximum milliseconds for which the page may block, for megabytes of text or input that is slow to parse

/** Matches a text's first block if it is fenced code, up to the closing fence or the end. */
const FENCED = /^ {0,3}(`{3,}(?=[^`\n]*(?:\n|$))|~{3,})[^]*?(?:\n {0,3}\1[~`]* *(?=\n|$)|$)/;

const escape = (text) => text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text), // HTML in an answer is shown as text
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
  ADD_URI_SAFE_ATTR: ["start", "align", "type"], // these are not URLs
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Add a bar above a `pre` with the language and a copy button (`.copy`), which the page handles. */
function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "text";
  colour(code, language);
  const copy = element("button", { type: "button", className: "quiet copy", "aria-label": "Copy code" }, "Copy");
  const block = element("div", { className: "code-block", dir: "ltr" }, element("div", { className: "bar" }, element("span", {}, language), copy));
  pre.replaceWith(block);
  Object.assign(pre, { tabIndex: 0, role: "group", ariaLabel: "Code" }); // so that the keyboard can scroll it
  block.append(pre);
}

function scrolled(table) {
  const box = element("div", { className: "scroll", tabIndex: 0, role: "group", "aria-label": "Table" });
  table.replaceWith(box);
  box.append(table);
}

/** Return the end of the first blank line at or after `from`, or the end of the text. */
function blankLine(text, from) {
  const blank = /\n[ \t]*\n/g;
  blank.lastIndex = from;
  return blank.test(text) ? blank.lastIndex : text.length;
}

const plain = (text) => element("div", { className: "plain" }, text);

/** Convert marked's tokens to DOM nodes with only the elements and attributes in `ALLOWED`. */
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

/** Shows a growing text in `element`. `text` is the complete text, which `render` shows. */
export class MarkdownView {
  #element;
  #text = "";
  #source = ""; // the text without carriage returns, as marked counts positions
  #start = 0; // start of the last block in the source
  #last = []; // nodes of the last block
  #language = null; // language of the last block, if it is code

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

  /** Render the text after the last complete block. Return true if there was not enough time for all of it. */
  render() {
    const began = performance.now();
    let more = true;
    while (more && performance.now() - began < MAX_TIME) more = this.#renderPart();
    return more;
  }

  /** Render at most `MAX_BLOCK` characters and a block of code. Return true if blocks were completed and more text follows. */
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
      tokens.splice(0, more ? tokens.length : finished.length); // the next part starts with the last block
      if (grown && finished.length) {
        this.#last = []; // the block is complete
        finished.shift();
      }
      if (!grown || length) this.#replace(nodes(finished), nodes(tokens), tokens[0]?.lang);
      this.#start += length;
      return more;
    } catch {
      return this.#renderPlain(rest, blankLine(rest, code)); // nested too deeply for the parser
    }
  }

  /** Show the complete text. Render it again if it defines links that earlier blocks use. */
  finish() {
    if (this.render()) this.#replace([], [plain(this.#source.slice(this.#start))]);
    if (this.#start && /^ {0,3}\[[^\]\n]+\]:/m.test(this.#source) && this.#source.length <= MAX_BLOCK) {
      this.#start = 0;
      this.#element.replaceChildren();
      this.#last = [];
      this.render();
    }
  }

  /** Append to a growing code block, keeping its nodes so that a selection and the button's focus survive. */
  #growCode(token) {
    const [block] = this.#last;
    const shown = block?.querySelector?.(":scope > pre > code")?.firstChild;
    if (!shown || this.#last.length > 1 || token?.type !== "code" || token.lang !== this.#language) return false;
    const before = shown.data.slice(0, -1); // without the line end
    if (!token.text.startsWith(before)) return false;
    shown.replaceData(before.length, 1, `${token.text.slice(before.length)}\n`);
    colour(shown.parentNode, token.lang);
    return true;
  }

  /** The length of the growing plain text, if it is too long to be parsed again. */
  get #longPlain() {
    const [block] = this.#last;
    return block?.className === "plain" && block.firstChild.length > MAX_BLOCK ? block.firstChild.length : 0;
  }

  /** Show a block that ends at `end` as plain text. Return true if more text follows; otherwise the block may grow. */
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
