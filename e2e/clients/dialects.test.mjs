// The official Node library, unmodified, against a router in front of mock
// engines of every dialect. Run by scripts/clients; see test_dialects.py, which
// also says what a mock cannot show.
import test from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import OpenAI from 'openai';

const prompt = 'Once upon a time';
const baseURL = process.env.XPYD_URL + '/v1';
const client = new OpenAI({ baseURL, apiKey: 'unused', maxRetries: 0, timeout: 30_000 });

// Each check returns what to show of it, if it is more than "ok".
const checks = {
  async plain(model) {
    const r = await client.completions.create({ model, prompt, max_tokens: 12 });
    assert.equal(r.choices[0].finish_reason, 'length');
    assert.equal(r.choices[0].text.trim().split(' ').length, 12);
    assert.deepEqual([r.usage.prompt_tokens, r.usage.completion_tokens], [9, 12]);
  },
  async stream(model) {
    const body = { model, prompt, max_tokens: 8 };
    const want = (await client.completions.create(body)).choices[0].text;
    let text = '', usage;
    for await (const c of await client.completions.create({ ...body, stream: true, stream_options: { include_usage: true } })) {
      text += c.choices[0]?.text ?? '';
      usage = c.usage ?? usage;
    }
    assert.equal(text, want);
    assert.deepEqual([usage.prompt_tokens, usage.completion_tokens], [9, 8]);
  },
  async chat(model) {
    const body = { model, messages: [{ role: 'user', content: prompt }], max_tokens: 8 };
    const r = await client.chat.completions.create(body);
    assert.equal(await client.chat.completions.stream(body).finalContent(), r.choices[0].message.content);
  },
  async headers(model, want) {
    const { data, response } = await client.completions.create({ model, prompt, max_tokens: 1 }, { headers: { 'x-request-id': 'node-1' } }).withResponse();
    assert.equal(data._request_id, 'node-1');
    assert.equal(response.headers.has('x-xpyd-prefill'), want.split);
    assert.ok(response.headers.has('x-xpyd-decode'));
  },
  async n(model, want) {
    const ask = { model, prompt, max_tokens: 8, n: 3, stream: true };
    if (want.n === 'refused') {
      await assert.rejects(client.completions.create(ask), (e) => e instanceof OpenAI.BadRequestError && e.param === 'n');
      return want.n;
    }
    const { data, response } = await client.completions.create(ask).withResponse();
    const ends = [];
    for await (const c of data) for (const choice of c.choices) if (choice.finish_reason) ends.push(choice.index);
    assert.deepEqual(ends.sort(), [0, 1, 2]);
    assert.equal(response.headers.get('x-xpyd-fallback'), want.n === 'decode' ? 'n' : null);
    return want.n;
  },
  async errors(model) {
    await assert.rejects(client.completions.create({ model: 'nope', prompt }), OpenAI.NotFoundError);
    await assert.rejects(client.completions.create({ model, prompt, kv_transfer_params: {} }), (e) => e instanceof OpenAI.BadRequestError && e.param === 'kv_transfer_params');
    await assert.rejects(client.embeddings.create({ model, input: 'x' }), OpenAI.NotFoundError);
  },
  async deadline(model) {
    let tries = 0;
    const counted = new OpenAI({ baseURL, apiKey: 'x', maxRetries: 1, timeout: 30_000, fetch: (...a) => { tries++; return fetch(...a); } });
    await assert.rejects(counted.completions.create({ model, prompt, max_tokens: 500 }, { headers: { 'x-request-timeout-ms': '1' } }),
      (e) => e instanceof OpenAI.InternalServerError && e.status === 504);
    assert.equal(tries, 2);
  },
  async abort(model) {
    const gone = new AbortController();
    const p = client.completions.create({ model, prompt, max_tokens: 450 }, { signal: gone.signal });
    setTimeout(() => gone.abort(), 10);
    await assert.rejects(p, OpenAI.APIUserAbortError);
    for (let i = 0; i < 3; i++) {
      const s = await client.completions.create({ model, prompt, max_tokens: 400, stream: true });
      for await (const _ of s) { s.controller.abort(); break; }
    }
    assert.equal((await client.completions.create({ model, prompt, max_tokens: 4 })).usage.completion_tokens, 4);
  },
  async models(model) {
    const ids = [];
    for await (const m of client.models.list()) ids.push(m.id);
    assert.ok(ids.includes(model));
  },
};

const dialects = JSON.parse(readFileSync(new URL('dialects.json', import.meta.url)));
const lines = {};
test('dialects', { concurrency: 4 }, async (t) => {
  await Promise.all(Object.entries(dialects).map(([dialect, want]) => t.test(dialect, async () => {
    lines[dialect] = [];
    for (const [name, check] of Object.entries(checks)) {
      lines[dialect].push(name + ' FAILED');
      const shown = await check(dialect, want);
      lines[dialect].splice(-1, 1, `${name} ${shown ?? 'ok'}`);
    }
  })));
});
test.after(() => {
  for (const dialect of Object.keys(dialects)) console.log(`node    ${dialect.padEnd(24)} ${(lines[dialect] ?? ['not run']).join(', ')}`);
});
