// Calls with Vercel's ai. Options: `dialect` (chat, responses, messages, compatible), `tools`, `stop`, `max_tokens`, and
// `result` (the `text` that a tool found, for another turn, whose options are in `then`).
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";
import { main } from "./common.mjs";

const models = {
  chat: (given) => createOpenAI(given).chat("model"),
  responses: (given) => createOpenAI(given).responses("model"),
  messages: (given) => createAnthropic(given)("model"),
  compatible: (given) => createOpenAICompatible({ ...given, name: "own", includeUsage: true }).chatModel("model"),
};

const asked = (url, { dialect, tools = [], stop, max_tokens, temperature }) => ({
  model: models[dialect]({ baseURL: `${url}/v1`, apiKey: "none" }),
  tools: Object.fromEntries(tools.map(({ name, description, parameters }) =>
    [name, tool({ description, inputSchema: jsonSchema(parameters) })])),
  stopSequences: stop,
  maxOutputTokens: max_tokens,
  maxRetries: 0,
  temperature,
  providerOptions: { openai: { store: false } }, // else it refers to items that OpenAI keeps
});

// A piece as [kind, text, name]; of a call, the text is that of its arguments.
const kinds = { reasoning: "reasoning", "reasoning-delta": "reasoning", text: "text", "text-delta": "text" };
const piece = ({ type, text, toolName, input }) =>
  type === "tool-call" ? ["call", JSON.stringify(input), toolName] : kinds[type] && [kinds[type], text, null];

const ended = (finishReason, { inputTokens, outputTokens }) =>
  ({ finish_reason: finishReason, prompt_tokens: inputTokens, tokens: outputTokens });

main({
  async generate(url, prompt, options) {
    const given = asked(url, options);
    const messages = [{ role: "user", content: prompt }];
    let answer = await generateText({ ...given, messages });
    if (options.result !== undefined) {
      const content = answer.toolCalls.map(({ toolCallId, toolName }) =>
        ({ type: "tool-result", toolCallId, toolName, output: { type: "text", value: options.result.text } }));
      messages.push(...answer.response.messages, { role: "tool", content });
      answer = await generateText({ ...asked(url, { ...options, ...options.result.then }), messages });
    }
    const { content, finishReason, usage } = answer;
    return { parts: content.map(piece).filter(Boolean), ...ended(finishReason, usage) };
  },
  async *stream(url, prompt, options) {
    for await (const event of streamText({ ...asked(url, options), prompt, onError: () => {} }).fullStream) {
      if (event.type === "error") throw event.error;
      const part = piece(event);
      if (part) yield { parts: [part] };
      if (event.type === "finish") yield { parts: [], ...ended(event.finishReason, event.totalUsage) };
    }
  },
});
