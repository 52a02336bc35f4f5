// The page of a server: what it holds and does, from /stats, and a chat by /v1/chat/completions.
// Whatever comes from models is set as text, never as HTML.
"use strict";

const POLL_MS = 1000;
const at = (id) => document.getElementById(id);
let key = "";             // of the server, for as long as the page is open
let conversation = [];    // messages as the interface has them
let running = null;       // AbortController of the answer that comes
let models = [];

function headers() {
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

function made(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit++; }
  return `${number < 10 && unit ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `status ${answer.status}`;
  }
}

// ---- what the server holds and does ----

async function poll() {
  try {
    const answer = await fetch("stats", { headers: headers(), cache: "no-store" });
    at("key-form").hidden = answer.status !== 401;
    if (answer.ok) {
      show(await answer.json());
    } else {
      at("state").textContent = answer.status === 401 ? "needs an API key" : await errorOf(answer);
    }
  } catch {
    at("state").textContent = "the server does not answer";
  }
  if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  setTimeout(poll, POLL_MS);
}

function show(found) {
  at("state").textContent = `ready, version ${found.version}`;
  models = found.models;
  at("models").replaceChildren(...models.map((model) => {
    const row = made("tr");
    const usage = `${Math.round(100 * model.cache_usage)} %`;
    const cells = [model.name, model.status, model.size_bytes ? bytes(model.size_bytes) : "", model.num_running, model.num_waiting, model.tokens_per_s, usage];
    row.append(...cells.map((cell) => made("td", String(cell))));
    return row;
  }));
  at("memory").textContent = bytes(found.memory.process_bytes);
  at("free").textContent = `${bytes(found.memory.available_bytes)} of ${bytes(found.memory.total_bytes)}`;
  at("requests").textContent = String(found.num_requests);
  const sum = (name) => models.reduce((total, model) => total + model[name], 0);
  const prompts = sum("num_prompt_tokens");
  at("hits").textContent = prompts ? `${Math.round(100 * sum("num_hit_tokens") / prompts)} %` : "none yet";
  choose();
}

// Names that can chat, as far as is known: of a model that is not loaded it is not.
function choose() {
  const names = models.filter((model) => !model.tasks || model.tasks.includes("chat")).map((model) => model.name);
  const select = at("model");
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    const before = select.value;
    select.replaceChildren(...names.map((name) => made("option", name)));
    if (names.includes(before)) select.value = before;
  }
  const model = models.find((each) => each.name === select.value);
  at("images-label").hidden = !(model && model.takes_images !== false);
  at("send").disabled = running !== null || names.length === 0;
}

// ---- the chat ----

function addMessage(role, who) {
  const element = made("article", "", `message ${role}`);
  element.append(made("div", who, "who"));
  at("messages").append(element);
  return element;
}

function scroll() {
  at("messages").scrollTop = at("messages").scrollHeight;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function userMessage(text, files) {
  const shown = addMessage("user", "you");
  shown.append(made("div", text, "content"));
  if (files.length === 0) return { role: "user", content: text };
  const parts = [];
  for (const file of files) {
    const url = await dataUrl(file);
    const image = made("img");
    image.src = url;
    image.alt = file.name;
    shown.append(image);
    parts.push({ type: "image_url", image_url: { url } });
  }
  parts.push({ type: "text", text });
  return { role: "user", content: parts };
}

// Yields the objects of an event stream.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

// An answer on the page: reasoning folded, then the text.
class Answer {
  constructor(name) {
    this.element = addMessage("assistant", name);
    this.content = made("div", "", "content");
    this.reasoning = null;
    this.text = "";
    this.element.append(this.content);
  }
  add(delta) {
    const thought = delta.reasoning || delta.reasoning_content;
    if (thought) {
      if (this.reasoning === null) {
        const details = made("details");
        this.reasoning = made("pre");
        details.append(made("summary", "reasoning"), this.reasoning);
        this.element.insertBefore(details, this.content);
      }
      this.reasoning.append(thought);
    }
    if (delta.content) {
      this.text += delta.content;
      this.content.append(delta.content);
    }
  }
  end(usage, seconds, reason) {
    if (!usage) return;
    const speed = seconds > 0 ? `, ${(usage.completion_tokens / seconds).toFixed(1)} tokens/s` : "";
    const cut = reason === "length" ? ", cut at the most tokens" : "";
    this.element.append(made("div", `${usage.completion_tokens} tokens${speed}${cut}`, "speed"));
  }
}

function body() {
  const asked = { model: at("model").value, messages: conversation, stream: true, stream_options: { include_usage: true } };
  if (at("max-tokens").value) asked.max_tokens = Number(at("max-tokens").value);
  if (at("temperature").value) asked.temperature = Number(at("temperature").value);
  return JSON.stringify(asked);
}

async function send() {
  const text = at("text").value.trim();
  const files = at("images-label").hidden ? [] : [...at("images").files];
  if (running !== null || (!text && files.length === 0)) return;
  running = new AbortController();
  at("stop").disabled = false;
  at("send").disabled = true;
  at("text").value = "";
  at("images").value = "";
  at("chosen").textContent = "";
  const asked = await userMessage(text, files);
  conversation.push(asked);
  scroll();
  let answer = null;
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: body(), signal: running.signal });
    if (!response.ok) throw new Error(await errorOf(response));
    answer = new Answer(at("model").value);
    let usage = null, reason = null, first = 0, last = 0;
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const choice = event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason || reason;
      last = performance.now();
      first = first || last;
      answer.add(choice.delta);
      scroll();
    }
    answer.end(usage, (last - first) / 1000, reason);
  } catch (error) {
    if (error.name === "AbortError") {
      addMessage("note", "stopped");
    } else {
      addMessage("error", "error").append(made("div", error.message, "content"));
    }
  }
  if (answer !== null && answer.text) {
    conversation.push({ role: "assistant", content: answer.text });
  } else {
    conversation.pop(); // what was not answered is not asked again with the next message
  }
  running = null;
  at("stop").disabled = true;
  choose();
  scroll();
  at("text").focus();
}

at("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => running && running.abort());
at("clear").addEventListener("click", () => {
  if (running) running.abort();
  conversation = [];
  at("messages").replaceChildren();
  at("text").focus();
});
at("model").addEventListener("change", choose);
at("images").addEventListener("change", () => {
  const number = at("images").files.length;
  at("chosen").textContent = number ? `${number} chosen` : "";
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  at("key").value = "";
  at("text").focus();
});
poll();
