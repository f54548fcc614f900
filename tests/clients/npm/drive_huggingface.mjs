// Calls with @huggingface/inference on an endpoint of one's own. Options: `task` (chat, text), `tools`, and parameters.
import { InferenceClient } from "@huggingface/inference";
import { main } from "./common.mjs";

const asked = (prompt, { task, ...options }) =>
  task === "chat"
    ? { messages: [{ role: "user", content: prompt }], ...options }
    : { inputs: prompt, parameters: options };

main({
  async generate(url, prompt, options) {
    const client = new InferenceClient(undefined, { endpointUrl: url });
    if (options.task !== "chat") return client.textGeneration(asked(prompt, options));
    const { model, usage, choices } = await client.chatCompletion(asked(prompt, options));
    return { model, usage, ...choices[0] };
  },
  async *stream(url, prompt, options) {
    const client = new InferenceClient(undefined, { endpointUrl: url });
    if (options.task !== "chat") yield* client.textGenerationStream(asked(prompt, options));
    else yield* client.chatCompletionStream(asked(prompt, options));
  },
});
