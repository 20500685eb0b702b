// The npm client against a running server: node openai_npm.mjs URL KEY
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const OpenAI = createRequire(import.meta.url)("openai");
const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const SAID = "uó猫y😀z!";
const messages = [{ role: "user", content: "say Q" }];

const ids = [];
for await (const model of client.models.list()) ids.push(model.id);
assert(ids.includes("primary@step-1"), ids.join());
assert.equal((await client.models.retrieve("run@step-1")).owned_by, "shardb");

const whole = await client.chat.completions.create({ model: "primary", messages, temperature: 0 });
assert.equal(whole.choices[0].message.content, SAID);
assert.equal(whole.choices[0].finish_reason, "stop");
assert.match(whole._request_id, /^req_/);

const stream = await client.chat.completions.create({
  model: "primary", messages, temperature: 0, stream: true, stop: ["y"], logprobs: true,
  stream_options: { include_usage: true },
});
let text = "";
let usage = null;
const finishes = [];
for await (const event of stream) {
  assert.equal(event.object, "chat.completion.chunk");
  text += event.choices[0]?.delta.content ?? "";
  if (event.choices[0]?.finish_reason) finishes.push(event.choices[0].finish_reason);
  usage = event.usage ?? usage;
}
assert.equal(text, SAID.split("y")[0]);
assert.deepEqual(finishes, ["stop"]);
assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);

const gathered = client.chat.completions.stream({ model: "primary", messages, temperature: 0 });
assert.equal(await gathered.finalContent(), SAID);

const completion = await client.completions.create({ model: "step-2", prompt: "Q", top_p: 0, logprobs: 1 });
assert.equal(completion.choices[0].text, SAID);
assert.equal(completion.choices[0].logprobs.tokens[0], "u");

const left = await client.completions.create({ model: "primary", prompt: "Q", stream: true, max_tokens: 200 });
for await (const event of left) {
  assert.equal(event.object, "text_completion");
  break;
}

const failures = [
  [() => client.models.retrieve("nope"), 404, "model_not_found"],
  [() => client.completions.create({ model: "primary", prompt: "x".repeat(500) }), 400, "context_length_exceeded"],
  [() => client.chat.completions.create({ model: "primary", messages: [{ role: "king", content: "" }] }), 400, "invalid_value"],
  [() => client.images.generate({ prompt: "a cat" }), 404, "unknown_url"],
  [() => new OpenAI({ baseURL: `${url}/v1`, apiKey: "no" }).models.list(), 401, "invalid_api_key"],
];
for (const [call, status, code] of failures) {
  await assert.rejects(call(), (error) => error.status === status && error.code === code && error.requestID !== null);
}
console.log(`${failures.length + 7} cases hold`);
