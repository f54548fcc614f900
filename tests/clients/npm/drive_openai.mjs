// A connection of openai's client to Responses or Realtime. The prompt `responses` or `realtime` opens it; without it,
// the call before's is used. Realtime is always encrypted; the certificate is not checked.
// Options: `calls` (pairs of a type of event and its fields), `until` (types of events), `times` (how many end the call).
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";
import { ResponsesWS } from "openai/resources/responses/ws";
import { on, once } from "node:events";
import { main } from "./common.mjs";

let connection;
let received;

function open(url, resource) {
  connection?.close();
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  if (resource === "responses") {
    connection = new ResponsesWS(client);
    received = connection.stream();
  } else {
    connection = new OpenAIRealtimeWS({ model: "model", options: { rejectUnauthorized: false } }, client);
    received = eventsOf(connection);
  }
}

async function* eventsOf(realtime) {
  realtime.on("error", () => {}); // else an error event ends the process
  const opened = once(realtime.socket, "open");
  const messages = on(realtime.socket, "message", { close: ["close"] });
  await opened;
  for await (const [data] of messages) yield { message: JSON.parse(data) };
}

main({
  async generate(url, prompt, { calls = [], until = [], times = 1 }) {
    if (prompt) open(url, prompt);
    for (const [type, fields] of calls) connection.send({ type, ...fields });
    const events = [];
    let left = until.length ? times : 0;
    while (left) {
      const { done, value } = await received.next();
      if (done) throw new Error("the connection is closed");
      const event = value.type === "error" ? value.error.error : value.message;
      if (value.type === "error" && !event) throw value.error;
      if (!event) continue; // the connection has opened
      events.push(event);
      if (until.includes(event.type)) left--;
    }
    return events;
  },
});
