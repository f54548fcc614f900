// Renders an answer's Markdown as it grows: finished blocks once, the last block again for each frame.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;

// Characters. A longer block stays plain text: marked's time for emphasis and nesting grows with the square of a block.
const MAX_BLOCK = 20_000;
const MAX_CODE = 200_000;

const escape = (text) => text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text), // an answer's own HTML is shown, never interpreted
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(`[image: ${text || href}]`)}</a>`, // never fetched
  },
});

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
  const block = document.createElement("div");
  block.className = "code-block";
  block.dir = "ltr";
  const bar = document.createElement("div");
  bar.className = "bar";
  const language = document.createElement("span");
  language.textContent = /language-(\S+)/.exec(code.className)?.[1] ?? "text";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy code");
  bar.append(language, button);
  pre.replaceWith(block);
  pre.tabIndex = 0; // scrolls sideways by the keyboard too
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", "Code");
  block.append(bar, pre);
}

function scrolled(table) {
  const box = document.createElement("div");
  box.className = "scroll";
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table");
  table.replaceWith(box);
  box.append(table);
}

function plain(text) {
  const block = document.createElement("div");
  block.className = "plain";
  block.textContent = text;
  return block;
}

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
  for (const table of fragment.querySelectorAll("table")) scrolled(table);
  for (const block of fragment.querySelectorAll("p, ul, ol, li, blockquote, table, h1, h2, h3, h4, h5, h6")) block.dir = "auto";
  for (const pre of fragment.querySelectorAll("pre")) codeBlock(pre);
  return [...fragment.childNodes].filter((node) => node.textContent.trim() || node.nodeType === Node.ELEMENT_NODE);
}

/** Shows a text that grows in `element`. `text` is all of it; what is shown follows by `render`. */
export class MarkdownView {
  #element;
  #text = "";
  #start = 0; // of the last block in the text
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
  }

  /** Costs what the text since the last finished block costs. */
  render() {
    const rest = this.#text.slice(this.#start);
    if (rest.length > (/^ {0,3}(```|~~~)/.test(rest) ? MAX_CODE : MAX_BLOCK)) return this.#renderPlain(rest);
    let tokens;
    try {
      tokens = marked.lexer(rest);
      const last = tokens.findLastIndex((token) => token.type !== "space");
      const finished = tokens.slice(0, Math.max(last, 0));
      const length = finished.reduce((sum, token) => sum + token.raw.length, 0);
      const grown = this.#growCode(tokens[0]);
      tokens.splice(0, finished.length);
      if (grown && finished.length) {
        this.#last = []; // it stays as it is
        finished.shift();
      }
      if (!grown || length) this.#replace(nodes(finished), nodes(tokens), tokens[0]?.lang);
      this.#start += length;
    } catch {
      this.#replace([], [plain(rest)]); // nested deeper than the parser can go
    }
  }

  /** Render a whole text once more, if it defines links that earlier blocks use. */
  finish() {
    this.render();
    if (this.#start && /^ {0,3}\[[^\]\n]+\]:/m.test(this.#text) && this.#text.length <= MAX_BLOCK) {
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
    return true;
  }

  #renderPlain(rest) {
    const [block] = this.#last;
    if (block?.className !== "plain") return this.#replace([], [plain(rest)]);
    block.firstChild.appendData(rest.slice(block.firstChild.length));
  }

  #replace(finished, last, language = null) {
    for (const node of this.#last) node.remove();
    this.#element.append(...finished, ...last);
    this.#last = last;
    this.#language = language;
  }
}
