// The same request as code: pure functions of the server's address, the route and the body.

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`; // for a shell

/** Convert a JSON value to a Python literal. */
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

const boto3 = ({ route, body }) =>
  [
    "# SageMaker Runtime; `lmi deploy local` has the same API on this machine.",
    "import json",
    "",
    "import boto3",
    "",
    `body = ${python(body)}`,
    `client = boto3.client("sagemaker-runtime")`,
    `response = client.${body.stream ? "invoke_endpoint_with_response_stream" : "invoke_endpoint"}(`,
    `    EndpointName="my-endpoint",`,
    `    ContentType="application/json",`,
    `    Body=json.dumps(body),`,
    `    CustomAttributes="route=/${route}",`,
    ")",
    ...(body.stream
      ? [
          `rest = b""`,
          `for event in response["Body"]:`,
          `    *lines, rest = (rest + event["PayloadPart"]["Bytes"]).split(b"\\n")`,
          `    for line in lines:`,
          `        if line.startswith(b"data: {"):`,
          `            chunk = json.loads(line[6:])`,
          `            print(chunk["choices"][0]["delta"].get("content") or "", end="", flush=True)`,
        ]
      : [`print(json.load(response["Body"])["choices"][0]["message"]["content"])`]),
  ].join("\n");

/** Format the body as arguments of a Python call. Fields that the client's method does not have go into `extra_body`. */
function keywords(body, known) {
  const entries = Object.entries(body);
  const extra = Object.fromEntries(entries.filter(([name]) => !known.includes(name)));
  const named = entries.filter(([name]) => known.includes(name));
  if (Object.keys(extra).length) named.push(["extra_body", extra]);
  return named.map(([name, value]) => `    ${name}=${python(value, "    ")},`);
}

const printed = (body) =>
  body.stream
    ? [
        "for chunk in answer:",
        "    if chunk.choices:",
        `        print(chunk.choices[0].delta.content or "", end="", flush=True)`,
      ]
    : ["print(answer.choices[0].message.content)"];

const key = (locked) => (locked ? `os.environ["LMI_API_KEY"].split(",")[0]` : `"none"`);

const HUGGING_FACE = [
  "model", "messages", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "response_format", "seed",
  "stop", "stream", "stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p",
];
const OPENAI = [...HUGGING_FACE, "max_completion_tokens", "parallel_tool_calls", "reasoning_effort"];

const openai = ({ base, locked, body }) =>
  [
    ...(locked ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${base}/v1", api_key=${key(locked)})`,
    "answer = client.chat.completions.create(",
    ...keywords({ model: "", ...body }, OPENAI),
    ")",
    ...printed(body),
  ].join("\n");

const huggingface = ({ base, locked, body }) =>
  [
    ...(locked ? ["import os", ""] : []),
    "from huggingface_hub import InferenceClient",
    "",
    `client = InferenceClient(base_url="${base}/v1", api_key=${key(locked)})`,
    "answer = client.chat_completion(",
    ...keywords(typeof body.stop === "string" ? { ...body, stop: [body.stop] } : body, HUGGING_FACE),
    ")",
    ...printed(body),
  ].join("\n");

const javascript = ({ base, route, locked, body }) =>
  [
    "// Node 18 or later, as a file with the ending .mjs",
    `const response = await fetch(${JSON.stringify(`${base}/${route}`)}, {`,
    `  method: "POST",`,
    "  headers: {",
    `    "Content-Type": "application/json",`,
    ...(locked ? ["    Authorization: `Bearer ${process.env.LMI_API_KEY.split(\",\")[0]}`,"] : []),
    "  },",
    `  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),`,
    "});",
    "if (!response.ok) throw new Error(await response.text());",
    ...(body.stream
      ? [
          `let rest = "";`,
          "for await (const text of response.body.pipeThrough(new TextDecoderStream())) {",
          `  const lines = (rest + text).split("\\n");`,
          "  rest = lines.pop();",
          `  for (const line of lines.filter((line) => line.startsWith("data: {"))) {`,
          `    process.stdout.write(JSON.parse(line.slice(6)).choices[0].delta.content ?? "");`,
          "  }",
          "}",
        ]
      : ["console.log((await response.json()).choices[0].message.content);"]),
  ].join("\n");

/** Functions that create the code, by the suffix of the tab's id. */
export const SAMPLES = { curl, boto3, openai, huggingface, javascript };
