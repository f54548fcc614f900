// Prints the stream of a SageMaker endpoint: npm install @aws-sdk/client-sagemaker-runtime, then node stream.mjs.
import { SageMakerRuntimeClient, InvokeEndpointWithResponseStreamCommand } from "@aws-sdk/client-sagemaker-runtime";

// maxAttempts 1: a second attempt would be a second generation.
const client = new SageMakerRuntimeClient({ region: "us-east-1", maxAttempts: 1 });
const { Body } = await client.send(new InvokeEndpointWithResponseStreamCommand({
  EndpointName: "my-endpoint",
  ContentType: "application/json",
  Body: JSON.stringify({ inputs: "The capital of France is", parameters: { max_new_tokens: 32 }, stream: true }),
}));

const decoder = new TextDecoder();
let rest = "";
const show = (line) => {
  if (!line.trim()) return;
  const value = JSON.parse(line);                       // {token: {id, text, log_prob}, generated_text?, details?, error?}
  if (value.error) throw new Error(value.error);        // the status was sent before the model failed
  process.stdout.write(value.token.text);
};
for await (const event of Body) {
  if (event.ModelStreamError) throw event.ModelStreamError;            // over 8 min, or the container hung up
  if (event.InternalStreamFailure) throw event.InternalStreamFailure;
  rest += decoder.decode(event.PayloadPart.Bytes, { stream: true });
  const lines = rest.split("\n");
  rest = lines.pop();
  lines.forEach(show);
}
show(rest + decoder.decode());
