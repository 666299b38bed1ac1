// The official Node library, unmodified, against a running xpyd.
// Run by scripts/clients, which starts xpyd and sets XPYD_URL.
import test from 'node:test';
import assert from 'node:assert/strict';
import OpenAI from 'openai';

const model = process.env.XPYD_MODEL ?? 'stories260k';
const prompt = 'Once upon a time';
const client = new OpenAI({ baseURL: process.env.XPYD_URL + '/v1', apiKey: 'unused', maxRetries: 0, timeout: 30_000 });

test('completion, usage, finish reason', async () => {
  const r = await client.completions.create({ model, prompt, max_tokens: 64, temperature: 0 });
  assert.ok(r.choices[0].text.startsWith(', there was a little girl named Lily.'));
  assert.equal(r.choices[0].finish_reason, 'length');
  assert.deepEqual([r.usage.prompt_tokens, r.usage.completion_tokens], [5, 64]);
});

test('stream equals plain, with usage', async () => {
  const body = { model, prompt, max_tokens: 40, temperature: 0 };
  const want = (await client.completions.create(body)).choices[0].text;
  let text = '', usage;
  for await (const c of await client.completions.create({ ...body, stream: true, stream_options: { include_usage: true } })) {
    text += c.choices[0]?.text ?? '';
    usage = c.usage ?? usage;
  }
  assert.equal(text, want);
  assert.equal(usage.completion_tokens, 40);
});

test('chat, plain and streamed, with logprobs', async () => {
  const body = { model, messages: [{ role: 'user', content: prompt }], max_tokens: 16, temperature: 0, logprobs: true, top_logprobs: 2 };
  const r = await client.chat.completions.create(body);
  assert.equal(r.choices[0].logprobs.content.length, 16);
  const s = client.chat.completions.stream(body);
  assert.equal(await s.finalContent(), r.choices[0].message.content);
});

test('n choices and stop', async () => {
  const r = await client.completions.create({ model, prompt, max_tokens: 64, temperature: 0, n: 2, stop: ['park'] });
  assert.equal(r.choices.length, 2);
  for (const c of r.choices) {
    assert.equal(c.finish_reason, 'stop');
    assert.ok(!c.text.includes('park'));
  }
});

test('errors have their classes', async () => {
  await assert.rejects(client.completions.create({ model: 'nope', prompt }), OpenAI.NotFoundError);
  await assert.rejects(client.completions.create({ model, prompt, top_p: 7 }), (e) => e instanceof OpenAI.BadRequestError && e.param === 'top_p');
});

test('abort mid-stream leaves the server well', async () => {
  for (let i = 0; i < 5; i++) {
    const s = await client.completions.create({ model, prompt, max_tokens: 400, stream: true });
    for await (const _ of s) { s.controller.abort(); break; }
  }
  const r = await client.completions.create({ model, prompt, max_tokens: 4, temperature: 0 });
  assert.equal(r.usage.completion_tokens, 4);
});

test('models', async () => {
  const ids = [];
  for await (const m of client.models.list()) ids.push(m.id);
  assert.ok(ids.includes(model));
});
