// OpenAI's client for Node against a server; no test of pytest, since it needs packages of its own.
//
//     npm install --prefix node-client openai
//     NODE_PATH=node-client/node_modules node tests/reliability/node_client.mjs http://127.0.0.1:8000 MODEL
//
// MODEL needs a chat template with tools. Each check prints a line; the exit status is the number of those that failed.

import assert from "node:assert/strict";
import { createServer } from "node:http";
import { createRequire } from "node:module";

// Packages are found by NODE_PATH, which `import` does not read.
const OpenAI = createRequire(import.meta.url)("openai").default;
const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is 3 plus 4?" }];
const chat = { model, messages, temperature: 0, max_tokens: 40 };
const SCHEMA = {
  type: "object",
  properties: { color: { enum: ["red", "blue"] }, good: { type: "boolean" } },
  required: ["color", "good"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "judge", parameters: SCHEMA, strict: true } };

async function rejected(promise, kind, code) {
  await assert.rejects(promise, (error) => {
    assert(error instanceof kind, `${error.constructor.name}: ${error.message}`);
    assert.equal(error.code, code);
    assert.match(error.requestID, /^req-/);
    return true;
  });
}

const checks = {
  async models() {
    const found = [];
    for await (const each of client.models.list()) found.push(each.id);
    assert(found.includes(model));
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async chats() {
    const whole = await client.chat.completions.create(chat);
    assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
    let text = "";
    let usage;
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create({ ...chat, ...options })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual([usage.prompt_tokens, usage.completion_tokens], [whole.usage.prompt_tokens, whole.usage.completion_tokens]);
    const events = client.chat.completions.stream(chat);
    assert.equal(await events.finalContent(), text);
  },

  async completions() {
    const fields = { model, prompt: "Once upon a time", max_tokens: 12, temperature: 0, logprobs: 2 };
    const whole = await client.completions.create(fields);
    assert.equal(whole.choices[0].logprobs.tokens.length, whole.usage.completion_tokens);
    let text = "";
    for await (const chunk of await client.completions.create({ ...fields, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, whole.choices[0].text);
  },

  async embeddings() {
    // The client asks for base64 and decodes it.
    const fields = { model, input: ["a", "b"], pooling: "mean" };
    const found = await client.embeddings.create(fields);
    const floats = await client.embeddings.create({ ...fields, encoding_format: "float" });
    assert.equal(found.data.length, 2);
    found.data[0].embedding.forEach((value, index) => assert(Math.abs(value - floats.data[0].embedding[index]) < 1e-6));
  },

  async tools() {
    const fields = { ...chat, max_tokens: 200, tools: [tool], tool_choice: "required" };
    const [call] = (await client.chat.completions.create(fields)).choices[0].message.tool_calls;
    const found = JSON.parse(call.function.arguments);
    assert(["red", "blue"].includes(found.color) && typeof found.good === "boolean");
    const final = await client.chat.completions.stream(fields).finalMessage();
    assert.deepEqual(JSON.parse(final.tool_calls[0].function.arguments), found);
    let called = 0;
    const judge = { ...tool.function, parse: JSON.parse, function: () => `call ${++called}` };
    const runner = client.chat.completions.runTools(
      { ...fields, tools: [{ type: "function", function: judge }] }, { maxChatCompletions: 3 });
    await runner.done();
    assert.equal(called, 3);
  },

  async structured() {
    const format = { type: "json_schema", json_schema: { name: "verdict", strict: true, schema: SCHEMA } };
    const answer = await client.chat.completions.parse({ ...chat, response_format: format });
    assert.deepEqual(Object.keys(answer.choices[0].message.parsed).sort(), ["color", "good"]);
  },

  async errors() {
    await rejected(client.chat.completions.create({ ...chat, model: "none" }), OpenAI.NotFoundError, "model_not_found");
    await rejected(client.chat.completions.create({ ...chat, top_p: 7 }), OpenAI.BadRequestError, "invalid_value");
    await rejected(client.chat.completions.create({ ...chat, what: 1 }), OpenAI.BadRequestError, "unknown_parameter");
    await rejected(client.get("/nothing"), OpenAI.NotFoundError, "unknown_url");
    const gone = client.withOptions({ baseURL: "http://127.0.0.1:9/v1" });
    await assert.rejects(gone.models.list(), OpenAI.APIConnectionError);
    await assert.rejects(client.chat.completions.create(chat, { timeout: 1 }), OpenAI.APIConnectionTimeoutError);
  },

  async leaves() {
    const controller = new AbortController();
    const fields = { ...chat, max_tokens: 400, stream: true, ignore_eos: true };
    const stream = await client.chat.completions.create(fields, { signal: controller.signal });
    for await (const chunk of stream) controller.abort();
    assert.equal((await client.chat.completions.create(chat)).object, "chat.completion");
  },

  async retries() {
    // Two refusals with Retry-After in front of the server: the client waits and asks again.
    let asked = 0;
    const refusing = createServer(async (request, response) => {
      if (++asked < 3) return response.writeHead(503, { "Retry-After": "1" }).end("{}");
      const answer = await fetch(`${url}${request.url}`);
      response.writeHead(answer.status, { "Content-Type": "application/json" }).end(await answer.text());
    });
    await new Promise((resolve) => refusing.listen(0, "127.0.0.1", resolve));
    const patient = client.withOptions({ baseURL: `http://127.0.0.1:${refusing.address().port}/v1`, maxRetries: 2 });
    assert.equal((await patient.models.retrieve(model)).id, model);
    assert.equal(asked, 3);
    refusing.closeAllConnections();
    refusing.close();
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`${name}: ok`);
  } catch (error) {
    failed += 1;
    console.log(`${name}: failed\n${error.stack}`);
  }
}
process.exit(failed);
