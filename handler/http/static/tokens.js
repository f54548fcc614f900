// The tokens of an answer, tinted by their probability, with the alternatives.

import { element } from "./dom.js";

/** Probabilities below which a token is tinted, with a stronger tint for each. */
const LEVELS = [0.9, 0.5, 0.1];

const quoted = (text) => `“${text.replaceAll("\n", "↵")}”`;

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value < 0.1) return "under 0.1 %";
  return `${value > 99.9 ? "100" : value.toFixed(1)} %`;
}

function described({ token, logprob, others }) {
  const instead = others.filter((other) => other.token !== token).map((other) => `${quoted(other.token)} ${percent(other.logprob)}`);
  return `${quoted(token)} ${percent(logprob)}${instead.length ? `; alternatives: ${instead.join(", ")}` : ""}`;
}

/** Show tokens, each `{token, logprob, others}`. The pointer or the arrow keys choose the token that is described below. */
export function tokenView(tokens) {
  const words = tokens.map(({ token, logprob }) => {
    const level = LEVELS.filter((limit) => Math.exp(logprob) < limit).length;
    return element("span", { className: "token", "data-level": level }, token.replaceAll("\n", "↵\n"));
  });
  const about = element("p", { className: "hint", role: "status" }, "Point at a token, or press the arrow keys.");
  let at = -1;
  const choose = (index) => {
    if (!words[index] || index === at) return;
    words[at]?.classList.remove("chosen");
    words[(at = index)].classList.add("chosen");
    about.textContent = described(tokens[index]);
  };
  const text = element("div", { className: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens", dir: "auto" }, ...words);
  for (const name of ["pointerover", "click"]) text.addEventListener(name, ({ target }) => choose(words.indexOf(target)));
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(at + step);
  });
  return element("div", {}, text, about);
}
