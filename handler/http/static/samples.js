// The same request as code: pure functions of the server's address, the route and the body.

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`; // for a shell

/** JSON as Python writes it. */
export function python(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = indent + "    ";
  const many = Array.isArray(value);
  const items = many
    ? value.map((item) => python(item, deeper))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, deeper)}`);
  const line = items.join(", ");
  const [open, close] = many ? "[]" : "{}";
  if (line.length < 72 && !line.includes("\n")) return open + line + close;
  return `${open}\n${items.map((item) => `${deeper}${item},\n`).join("")}${indent}${close}`;
}

const curl = ({ base, route, locked, body }) =>
  [
    `curl -${body.stream ? "N" : ""}s ${quoted(`${base}/${route}`)} \\`,
    `  -H 'Content-Type: application/json' \\`,
    ...(locked ? [`  -H "Authorization: Bearer \${LMI_API_KEY%%,*}" \\`] : []),
    `  -d ${quoted(JSON.stringify(body, null, 2))}`,
  ].join("\n");

const boto3 = ({ route, body }) => {
  const call = body.stream ? "invoke_endpoint_with_response_stream" : "invoke_endpoint";
  return [
    "import json",
    "",
    "import boto3",
    "",
    `body = ${python(body)}`,
    `client = boto3.client("sagemaker-runtime")`,
    `response = client.${call}(`,
    `    EndpointName="my-endpoint",`,
    `    ContentType="application/json",`,
    `    Body=json.dumps(body),`,
    `    CustomAttributes="route=/${route}",`,
    ")",
    ...(body.stream
      ? [
          `for event in response["Body"]:`,
          `    print(event["PayloadPart"]["Bytes"].decode(errors="replace"), end="", flush=True)`,
        ]
      : [`print(json.load(response["Body"])["choices"][0]["message"]["content"])`]),
  ].join("\n");
};

const openai = ({ base, locked, body }) => {
  const { model, messages, ...others } = body;
  const named = Object.entries({ model: model ?? "", messages, ...others });
  return [
    ...(locked ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${base}/v1", api_key=${locked ? `os.environ["LMI_API_KEY"].split(",")[0]` : `"none"`})`,
    `${body.stream ? "stream" : "answer"} = client.chat.completions.create(`,
    ...named.map(([name, value]) => `    ${name}=${python(value, "    ")},`),
    ")",
    ...(body.stream
      ? [
          "for chunk in stream:",
          "    if chunk.choices:",
          `        print(chunk.choices[0].delta.content or "", end="", flush=True)`,
        ]
      : ["print(answer.choices[0].message.content)"]),
  ].join("\n");
};

/** By the name of the tab that shows it. */
export const SAMPLES = { curl, boto3, openai };
