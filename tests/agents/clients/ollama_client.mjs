// Ollama's client for Node: `NODE_PATH=.../node_modules node ollama_client.mjs http://127.0.0.1:8000`.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

// Packages are found by NODE_PATH, which `import` does not read.
const { Ollama } = createRequire(import.meta.url)("ollama");
const client = new Ollama({ host: process.argv[2] });
const model = "scripted";
const line = "I have no line for this.";
const messages = [{ role: "user", content: "Hi" }];

const listed = await client.list();
assert(listed.models.some((each) => each.name === model));
const whole = await client.chat({ model, messages });
assert.equal(whole.message.content, line);
assert(whole.eval_count > 3 && whole.done);
let text = "";
for await (const part of await client.chat({ model, messages, stream: true })) text += part.message.content;
assert.equal(text, line);

const clock = { type: "function", function: { name: "clock", description: "Tells the time", parameters: { type: "object", properties: {} } } };
const days = { days: { type: "integer" } };
const weather = { type: "function", function: { name: "weather", description: "Tells the weather", parameters: { type: "object", properties: days, required: ["days"] } } };
const question = { role: "user", content: "Please answer by both tools" };
const called = await client.chat({ model, messages: [question], tools: [clock, weather] });
assert.deepEqual(called.message.tool_calls.map((each) => each.function.name), ["clock", "weather"]);
assert.deepEqual(called.message.tool_calls[1].function.arguments, { days: 3 });
const results = [
  { role: "tool", tool_name: "clock", content: "noon" },
  { role: "tool", tool_name: "weather", content: "It is sunny" },
];
const final = await client.chat({ model, messages: [question, called.message, ...results], tools: [clock, weather] });
assert.equal(final.message.content, "It is noon, and sunny.");

let completed = "";
for await (const part of await client.generate({ model, prompt: "Hi", stream: true })) completed += part.response;
assert.equal(completed, line);
// A model of text has no pooling of its own: refused by name.
await assert.rejects(client.embed({ model, input: ["a", "b"] }), /pooling/);
assert((await client.show({ model })).capabilities.includes("completion"));
assert.equal((await client.ps()).models.length, 1);
await assert.rejects(client.chat({ model: "none", messages }), /none/);
console.log("ok");
