// The API page: it shows the server's OpenAPI document, with a form to try each route.

import { keep, key, reason, request } from "./client.js";
import { $, element as el } from "./dom.js";

let api = null;
let model = "";
const GIVEN = { version: () => "1", model: () => model, id: () => model }; // initial values of the parameters in a path

const resolve = (schema) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : (schema ?? {}));
const nameOf = (schema) => schema.$ref?.split("/").pop();

/** Describe a schema in a few words. */
function type(schema) {
  if (schema.$ref) return nameOf(schema);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(type).join(" | ");
  const kinds = [schema.type ?? "any"].flat().map((kind) => (kind === "array" ? `array of ${type(schema.items ?? {})}` : kind));
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  const range = [
    ...(low !== undefined ? [`${schema.minimum === undefined ? ">" : "≥"} ${low}`] : []),
    ...(high !== undefined && high < 2 ** 31 - 1 ? [`${schema.maximum === undefined ? "<" : "≤"} ${high}`] : []),
  ];
  return kinds.join(" | ") + (range.length ? ` ${range.join(", ")}` : "");
}

function fields(schema) {
  const found = resolve(schema);
  const rows = Object.entries(found.properties ?? {}).map(([name, field]) => {
    const inner = resolve(field).properties ? [el("details", {}, el("summary", {}, "fields"), fields(field))] : [];
    const marks = found.required?.includes(name) ? " (required)" : "";
    return el("tr", {}, el("th", { scope: "row" }, el("code", {}, name), marks), el("td", {}, type(field), ...inner),
      el("td", {}, field.description ?? ""));
  });
  if (!rows.length) return el("p", {}, type(found));
  const head = el("tr", {}, ...["Name", "Type", "Notes"].map((text) => el("th", { scope: "col" }, text)));
  const scroll = { className: "scroll", tabIndex: 0, role: "group", "aria-label": "Fields" };
  return el("div", scroll, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

/** The schemas that a body may have, by name. */
function shapes(schema) {
  if (!schema || !Object.keys(schema).length) return [];
  return (schema.anyOf ?? [schema]).map((one) =>
    el("details", {}, el("summary", {}, el("code", {}, nameOf(one) ?? type(one))), fields(one)),
  );
}

const pretty = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

function answers(operation) {
  return Object.entries(operation.responses).map(([status, response]) => {
    const contents = Object.entries(response.content ?? {}).flatMap(([kind, content]) => {
      const examples = Object.values(content.examples ?? {}).map(({ value }) => value);
      if (content.example !== undefined) examples.push(content.example);
      return [el("p", {}, el("code", {}, kind)), ...shapes(content.schema),
        ...examples.map((value) => el("pre", { tabIndex: 0 }, pretty(value)))];
    });
    return el("details", {}, el("summary", {}, el("strong", {}, status), ` ${response.description}`), ...contents);
  });
}

/** Return a form that sends the request and shows the response while it is received. */
function trial(path, method, item, operation) {
  const id = operation.operationId;
  const contents = operation.requestBody?.content ?? {};
  const media = contents["application/json"];
  const { properties = {}, required = [] } = media ? {} : resolve(contents["multipart/form-data"]?.schema);
  const examples = Object.entries(media?.examples ?? {});
  const example = examples[0]?.[1].value ?? media?.schema.example;
  const names = [...(item.parameters ?? []), ...(operation.parameters ?? [])];
  const inputs = names.map(({ name }) => el("input", { id: `${id}-${name}`, name, value: GIVEN[name]?.() ?? "" }));
  const parts = Object.entries(properties).map(([name, part]) => {
    const type = part.format === "binary" ? "file" : "text";
    const field = el("input", { id: `${id}-${name}`, name, type });
    if (required.includes(name) && part.const) field.value = part.const;
    return field;
  });
  const body = media && el("textarea", { id: `${id}-body`, rows: 8, spellcheck: false, value: example ? pretty(example) : "" });
  const choice = el("select", { id: `${id}-example` }, ...examples.map(([name]) => el("option", {}, name)));
  choice.addEventListener("change", () => (body.value = pretty(media.examples[choice.value].value)));
  const output = el("pre", { tabIndex: 0, hidden: true, "aria-live": "polite", "aria-label": "Answer" });
  const send = async () => {
    const values = new Map(names.map((parameter, index) => [parameter, inputs[index].value]));
    const query = new URLSearchParams();
    let where = path.slice(1);
    for (const [parameter, value] of values) {
      if (parameter.in === "path") where = where.replace(`{${parameter.name}}`, encodeURIComponent(value));
      else if (value) query.set(parameter.name, value);
    }
    if (query.size) where += `?${query}`;
    const options = { method, headers: body?.value ? { "Content-Type": "application/json" } : {} };
    if (body?.value) options.body = body.value;
    const given = parts.filter((field) => field.value);
    if (given.length) options.body = new FormData();
    for (const field of given) options.body.append(field.name, field.files?.[0] ?? field.value);
    output.hidden = false;
    output.textContent = "…";
    try {
      const response = await request(where || ".", options);
      output.textContent = `${response.status} ${response.headers.get("content-type") ?? ""}\n\n`;
      const head = output.textContent;
      let all = "";
      for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
        all += text;
        output.append(text);
      }
      if ((response.headers.get("content-type") ?? "") === "application/json") output.textContent = head + pretty(JSON.parse(all));
    } catch (error) {
      output.textContent = `${error.status || ""} ${error.message}`.trim();
    }
  };
  const form = el("form", {},
    ...[...inputs, ...parts].flatMap((input) => [el("label", { htmlFor: input.id }, input.name), input]),
    ...(examples.length > 1 ? [el("label", { htmlFor: choice.id }, "Example"), choice] : []),
    ...(body ? [el("label", { htmlFor: body.id }, "Body"), body] : []),
    el("button", { className: "main" }, "Send"),
  );
  form.className = "body";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  return [form, output];
}

function render(path, method, item) {
  const operation = item[method];
  const badge = el("span", { className: `method ${method}` }, method.toUpperCase());
  const panel = el("details", { className: "panel operation", id: operation.operationId },
    el("summary", {}, badge, el("code", {}, path), el("span", {}, operation.summary)));
  panel.dataset.words = words(path, method, item);
  panel.addEventListener("toggle", () => {
    if (!panel.open || panel.childElementCount > 1) return; // it is created when the panel is first opened
    const request = shapes(Object.values(operation.requestBody?.content ?? {})[0]?.schema);
    panel.append(el("div", { className: "body" },
      ...(operation.description ? [el("p", {}, operation.description)] : []),
      ...(request.length ? [el("h3", {}, "Body"), ...request] : []),
      el("h3", {}, "Answers"), ...answers(operation),
      el("h3", {}, "Try it"), ...trial(path, method.toUpperCase(), item, operation)));
  });
  return panel;
}

async function load() {
  $("error").hidden = true;
  try {
    api = await (await request("api-doc/openapi.json")).json();
    model = (await (await request("models")).json()).models[0].modelName;
  } catch (error) {
    $("key-form").hidden = error.status !== 401;
    $("error").textContent = error.status === 401 && !key() ? "This server needs an API key." : reason(error.message);
    $("error").hidden = false;
    return;
  } finally {
    $("api").setAttribute("aria-busy", "false");
  }
  $("key-form").hidden = true;
  $("raw").hidden = Boolean(api.security); // a browser opens links without the key
  $("version").textContent = `version ${api.info.version}`;
  $("description").textContent = api.info.description;
  const groups = new Map(api.tags.map(({ name }) => [name, []])); // in the document's order
  for (const [path, item] of Object.entries(api.paths)) {
    for (const method of ["get", "post", "delete"].filter((name) => item[name])) {
      groups.get(item[method].tags[0]).push(render(path, method, item));
    }
  }
  for (const { name, description } of api.tags) {
    const id = `group-${name.toLowerCase().replace(/\W+/g, "-")}`;
    $("groups").append(el("a", { href: `#${id}` }, name), " ");
    $("api").append(el("section", { "aria-labelledby": id }, el("h2", { id }, name), el("p", {}, description), ...groups.get(name)));
  }
  $("find").hidden = false;
  search();
}

/** The text that a search for a route covers: its path, summary and group, its parameters and the fields of its body. */
function words(path, method, item) {
  const operation = item[method];
  const parameters = [...(item.parameters ?? []), ...(operation.parameters ?? [])].map(({ name }) => name);
  const body = operation.requestBody?.content["application/json"]?.schema;
  const inBody = (body?.anyOf ?? (body ? [body] : [])).flatMap((shape) => Object.keys(resolve(shape).properties ?? {}));
  const names = [...parameters, ...inBody];
  return [method, path, operation.summary, operation.description ?? "", ...operation.tags, ...names].join(" ").toLowerCase();
}

/** Show the routes that contain all words, and the groups with such a route. */
function search() {
  const wanted = $("query").value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const section of document.querySelectorAll("#api section")) {
    const panels = [...section.querySelectorAll("details.operation")];
    for (const panel of panels) {
      panel.hidden = !wanted.every((word) => panel.dataset.words.includes(word));
      found += !panel.hidden;
    }
    section.hidden = panels.every((panel) => panel.hidden);
  }
  $("count").textContent = wanted.length ? `${found} route${found === 1 ? "" : "s"}` : "";
}

$("query").addEventListener("input", search);

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep($("key-input").value.trim());
  load();
});
load();
