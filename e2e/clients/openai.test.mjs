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

test('logprobs and echo', async () => {
  const r = await client.completions.create({ model, prompt, max_tokens: 4, temperature: 0, logprobs: 3, echo: true });
  const lp = r.choices[0].logprobs;
  assert.ok(r.choices[0].text.startsWith(prompt + ','));
  assert.equal(lp.tokens.length, 9);
  assert.equal(lp.token_logprobs[0], null);
  assert.ok(lp.token_logprobs.slice(1).every((x) => x <= 0));
  assert.ok(lp.top_logprobs.slice(1).every((t) => Object.keys(t).length >= 3));
});

test('streamed choices are told apart, and drawn by the seed', async () => {
  const draw = async () => {
    const texts = ['', '', ''], ends = [];
    const s = await client.completions.create({ model, prompt, max_tokens: 20, n: 3, seed: 7, temperature: 1, stream: true });
    for await (const c of s) for (const choice of c.choices) {
      texts[choice.index] += choice.text;
      if (choice.finish_reason) ends.push(choice.finish_reason);
    }
    assert.deepEqual(ends, ['length', 'length', 'length']);
    return texts;
  };
  const texts = await draw();
  assert.equal(new Set(texts).size, 3);
  assert.deepEqual(await draw(), texts);
});

test('the request id comes back', async () => {
  const { data, response } = await client.completions.create({ model, prompt, max_tokens: 1 }, { headers: { 'x-request-id': 'node-1' } }).withResponse();
  assert.equal(response.headers.get('x-request-id'), 'node-1');
  assert.equal(data._request_id, 'node-1');
});

test('a deadline is retried as often as asked, then raised', async () => {
  let tries = 0;
  const counted = new OpenAI({ baseURL: process.env.XPYD_URL + '/v1', apiKey: 'x', maxRetries: 2, timeout: 30_000, fetch: (...a) => { tries++; return fetch(...a); } });
  await assert.rejects(counted.completions.create({ model, prompt, max_tokens: 500, ignore_eos: true }, { headers: { 'x-request-timeout-ms': '1' } }),
    (e) => e instanceof OpenAI.InternalServerError && e.status === 504);
  assert.equal(tries, 3);
});

test('abort of a request that does not stream', async () => {
  const gone = new AbortController();
  const p = client.completions.create({ model, prompt, max_tokens: 450 }, { signal: gone.signal });
  setTimeout(() => gone.abort(), 10);
  await assert.rejects(p, OpenAI.APIUserAbortError);
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
