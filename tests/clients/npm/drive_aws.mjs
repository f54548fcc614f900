// Calls with AWS's SDK for JavaScript: InvokeEndpoint, and InvokeEndpointWithResponseStream read by lines.
import {
  InvokeEndpointCommand,
  InvokeEndpointWithResponseStreamCommand,
  SageMakerRuntimeClient,
} from "@aws-sdk/client-sagemaker-runtime";
import { main } from "./common.mjs";

const credentials = { accessKeyId: "x", secretAccessKey: "x" };
const runtime = (endpoint) => new SageMakerRuntimeClient({ region: "us-east-1", maxAttempts: 1, endpoint, credentials });

const asked = ({ endpoint = "local", ...body }) => ({
  EndpointName: endpoint,
  ContentType: "application/json",
  Body: JSON.stringify(body),
});

main({
  async generate(url, prompt, options) {
    const { Body } = await runtime(url).send(new InvokeEndpointCommand(asked({ inputs: prompt, ...options })));
    return JSON.parse(new TextDecoder().decode(Body));
  },
  async *stream(url, prompt, options) {
    const given = asked({ inputs: prompt, stream: true, ...options });
    const { Body } = await runtime(url).send(new InvokeEndpointWithResponseStreamCommand(given));
    const decoder = new TextDecoder();
    let rest = "";
    for await (const event of Body) {
      if (event.ModelStreamError) throw event.ModelStreamError;
      rest += decoder.decode(event.PayloadPart.Bytes, { stream: true });
      const lines = rest.split("\n");
      rest = lines.pop();
      yield* lines.map((line) => JSON.parse(line));
    }
  },
});
