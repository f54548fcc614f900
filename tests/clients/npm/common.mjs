// What every client script does: read a call a line, make it, write a line of JSON with what came of it.
import { createInterface } from "node:readline";

console.info = console.log = console.error; // some libraries write to stdout of their own

// `library` has generate(url, prompt, options), and stream, which yields events.
export async function main(library) {
  for await (const line of createInterface({ input: process.stdin })) {
    const { how, url, prompt, options } = JSON.parse(line);
    const found = { answer: null, events: [], error: null, message: "" };
    try {
      if (how === "generate") found.answer = await library.generate(url, prompt, options);
      else for await (const event of library.stream(url, prompt, options)) found.events.push(event);
    } catch (error) { // which one it is, is what the test wants to know
      const body = error.httpResponse?.body; // @huggingface/inference's: the answer itself
      const message = body ? `${error.message} ${JSON.stringify(body)}` : error.message;
      Object.assign(found, { error: error.name, message });
    }
    process.stdout.write(`${JSON.stringify(found)}\n`);
  }
}
