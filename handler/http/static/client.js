// The client of the server: the API key, streamed responses, and error messages.

/** The route for chats. It may be any route that accepts `messages` and responds as LMI, TGI or OpenAI does. */
export const CHAT_ROUTE = "v1/chat/completions";

const MAX_REASON = 1000; // maximum characters of an error's body to show, since a proxy may send a page
const KEY = "lmi-api-key"; // in sessionStorage: deleted with the tab, and sent to this server only

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function keep(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** An error response of the server, or a broken connection. `message` is shown to the user. */
export class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Send a request with the key. Throws Refusal unless the response is a success. */
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

/** Return the message in an error's body of any dialect, or the start of the body. */
export function reason(text) {
  const words = messageIn(text) ?? text.trim();
  return words.length > MAX_REASON ? `${words.slice(0, MAX_REASON)} …` : words;
}

function messageIn(text) {
  try {
    const { error, message } = JSON.parse(text.replace(/^data:/, "")); // the error may be an event of a stream
    return [error?.message, error, message].find((value) => value && typeof value === "string");
  } catch {
    return undefined;
  }
}

/** Matches lines of a stream without a value: empty lines, comments, other fields, the end. */
const WITHOUT_VALUE = /^(?:$|:|event|id|retry|\[DONE\])/;

/** Yield the values in a body that is a JSON document, JSON lines, or server-sent events. */
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

/** Yield the pieces of a chat's answer, each `{text, reasoning, calls, tokens, finish}`. Aborting `signal` also stops the server. */
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
      if (!choice) continue; // OpenAI's last chunk has only the usage
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
