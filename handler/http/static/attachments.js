// Images and audio clips of a message: chosen, dropped or pasted, if the model accepts them.

import { $, button, element } from "./dom.js";
import { tell } from "./history.js";
import { server } from "./server.js";

const MAX_BYTES = 6 * 2 ** 20; // the server's limit for a message
const TYPES = {
  image: ["image/jpeg", "image/png", "image/webp", "image/gif"],
  audio: ["audio/wav", "audio/x-wav", "audio/mpeg", "audio/flac", "audio/x-flac", "audio/ogg", "audio/opus"],
};
const SEVERAL = { image: "images", audio: "audio clips" };
const SIZE = 72; // pixels of a thumbnail's longer side

let attached = []; // {kind, name, type, data}, as in saved chats

/** Return the parts of a message's content. */
export const parts = (media) =>
  media.map(({ kind, type, data }) =>
    kind === "image" ? { type: "image_url", image_url: { url: `data:${type};base64,${data}` } } : { type: "input_audio", input_audio: { data } },
  );

const bytes = (data) => Uint8Array.from(atob(data), (character) => character.charCodeAt(0));

/** A thumbnail of an image, drawn on a canvas because the page's policy loads no other images. A clip is shown by name. */
export function thumbnail({ kind, name, type, data }) {
  if (kind !== "image") return element("span", { className: "clip" }, `♪ ${name}`);
  const canvas = element("canvas", { className: "thumbnail", width: SIZE, height: SIZE, title: name, role: "img", "aria-label": name });
  draw(canvas, type, data).catch(() => canvas.replaceWith(element("span", { className: "clip" }, name)));
  return canvas;
}

async function draw(canvas, type, data) {
  const image = await createImageBitmap(new Blob([bytes(data)], { type }));
  const scale = Math.min(1, (SIZE * devicePixelRatio) / Math.max(image.width, image.height));
  canvas.width = Math.max(1, image.width * scale);
  canvas.height = Math.max(1, image.height * scale);
  canvas.style.width = `${canvas.width / devicePixelRatio}px`;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
}

/** Remove and return the attached files. */
export function taken() {
  const media = attached;
  attached = [];
  render();
  return media;
}

/** Attach files again that were removed. */
export function give(media) {
  attached = [...media, ...attached];
  render();
}

export const waiting = () => attached.length > 0;

/** Enable the button and dropping only if the model accepts some kind of file. */
export function offer() {
  const kinds = Object.keys(TYPES).filter((kind) => server.takes.includes(kind));
  $("attach").hidden = kinds.length === 0;
  $("attach").title = `Attach ${kinds.map((kind) => SEVERAL[kind]).join(" or ")}`;
  $("files").accept = kinds.flatMap((kind) => TYPES[kind]).join(",");
}

function render() {
  $("attached").hidden = attached.length === 0;
  $("attached").replaceChildren(
    ...attached.map((medium) => {
      const remove = () => {
        attached = attached.filter((other) => other !== medium);
        render();
        $("prompt").focus();
      };
      return element("li", {}, thumbnail(medium), button("✕", remove, "quiet", { "aria-label": `Remove ${medium.name}` }));
    }),
  );
}

function refusal(file) {
  const kind = file.type.split("/")[0];
  if (!server.takes.includes(kind)) {
    const kinds = server.takes.map((taken) => SEVERAL[taken] ?? taken);
    return `${file.name}: the model accepts only ${kinds.join(" and ")}.`;
  }
  if (!TYPES[kind].includes(file.type)) return `${file.name}: ${file.type} is not supported. Supported types: ${TYPES[kind].join(", ")}.`;
  return file.size > MAX_BYTES ? `${file.name} is larger than ${MAX_BYTES / 2 ** 20} MiB.` : "";
}

function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function attach(files) {
  const problems = [];
  for (const file of files) {
    const problem = refusal(file);
    if (problem) problems.push(problem);
    else attached.push({ kind: file.type.split("/")[0], name: file.name, type: file.type, data: await base64(file) });
  }
  render();
  if (problems.length) tell(problems.join(" "));
}

$("attach").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", async () => {
  await attach([...$("files").files]);
  $("files").value = "";
});
$("prompt").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length || event.clipboardData.types.includes("text/plain")) return; // office programs add an image of copied text
  event.preventDefault();
  attach(files);
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // otherwise the browser would open the file instead of the page
    document.body.classList.toggle("dropping", name === "dragover" && server.takes.length > 1);
    if (name === "drop") attach([...event.dataTransfer.files]);
  });
}
document.addEventListener("dragleave", ({ relatedTarget }) => relatedTarget ?? document.body.classList.remove("dropping"));
