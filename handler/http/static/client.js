// Talks to the server: the key, one answer as it comes, and what went wrong in words.

/** Where chats are asked for: any route that takes `messages`, in LMI's, TGI's or OpenAI's form of answer. */
export const CHAT_ROUTE = "v1/chat/completions";

const MAX_REASON = 1000; // characters of an error's body that are shown: a proxy's may be a page
const KEY = "lmi-api-key"; // in sessionStorage: gone with the tab, and never sent anywhere but here

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function keep(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** What the server refused, or what broke; `message` is for people. */
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** A request with the key, whose answer is a success. */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key()) headers.set("Authorization", `Bearer ${key()}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  throw new Refusal(reason(await response.text()) || response.statusText || "Refused", response.status);
}

/** The message in an error's body, in whatever dialect it is, else the body's text; only the beginning of a long one. */
export function reason(text) {
  const words = messageIn(text) ?? text.trim();
  return words.length > MAX_REASON ? `${words.slice(0, MAX_REASON)} …` : words;
}

function messageIn(text) {
  try {
    const { error, message } = JSON.parse(text.replace(/^data:/, "")); // the event of a stream
    return [error?.message, error, message].find((value) => value && typeof value === "string");
  } catch {
    return undefined;
  }
}

/** Lines of a stream that hold no value: empty ones, comments, other fields, the end. */
const WITHOUT_VALUE = /^(?:$|:|event|id|retry|\[DONE\])/;

/** The values of a body that is one JSON document, JSON lines, or server-sent events. */
export async function* values(response) {
  const kind = response.headers.get("content-type") ?? "";
  if (kind.startsWith("application/json") && !kind.startsWith("application/jsonlines")) {
    yield await response.json();
    return;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + (value ?? "")).split("\n");
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      const text = line.replace(/^data: ?/, "").trim();
      if (!WITHOUT_VALUE.test(text)) yield JSON.parse(text);
    }
    if (done) return;
  }
}

const likelihood = ({ token, logprob }) => ({ token, logprob });

/** The pieces of a chat's answer: `{text, reasoning, calls, tokens, finish}` each. Aborting `signal` makes the server stop too. */
export async function* stream(body, signal) {
  const response = await request(CHAT_ROUTE, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let finish = null;
  try {
    for await (const value of values(response)) {
      if (value.error) throw new Refusal(reason(JSON.stringify(value)), value.code ?? 0);
      const choice = value.choices?.[0];
      if (!choice) continue; // OpenAI's last chunk holds the usage alone
      const { content, reasoning, reasoning_content, tool_calls } = choice.delta ?? choice.message;
      finish ??= choice.finish_reason;
      const tokens = (choice.logprobs?.content ?? []).map((each) => ({ ...likelihood(each), others: (each.top_logprobs ?? []).map(likelihood) }));
      yield { text: content ?? "", reasoning: reasoning ?? reasoning_content ?? "", calls: tool_calls ?? [], tokens, finish };
    }
  } catch (error) {
    if (error instanceof Refusal || error.name === "AbortError") throw error;
    throw new Refusal("The connection broke before the answer was complete.");
  }
  if (!finish) throw new Refusal("The connection ended before the answer was complete.");
}
