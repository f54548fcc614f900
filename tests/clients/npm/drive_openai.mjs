// A connection of openai's client to Responses. The prompt `responses` opens it; without it, the call before's is used.
// Options: `calls` (pairs of a type of event and its fields), `until` (types of events), `times` (how many end the call).
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";
import { main } from "./common.mjs";

let connection;
let received;

function open(url) {
  connection?.close();
  connection = new ResponsesWS(new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" }));
  received = connection.stream();
}

main({
  async generate(url, prompt, { calls = [], until = [], times = 1 }) {
    if (prompt) open(url);
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
