// The official Node library, unmodified, against a model that thinks and calls tools (caller.py).
// Run by scripts/clients, which makes the model, starts xpyd and sets XPYD_URL.
import test from 'node:test';
import assert from 'node:assert/strict';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.env.XPYD_URL + '/v1', apiKey: 'unused', maxRetries: 0, timeout: 30_000 });
const model = process.env.XPYD_MODEL;
const messages = [{ role: 'user', content: 'How warm is it?' }];
const run = { weather: ({ city, days }) => `${city} ${days}: 21`, clock: () => 'noon' };
const schema = { type: 'object', properties: { city: { type: 'string' }, days: { type: 'integer' } } };

test('an agent: the library runs the tools and asks again', async () => {
  const seen = [];
  const tools = Object.entries(run).map(([name, f]) => ({
    type: 'function',
    function: { name, parameters: schema, parse: JSON.parse, function: (args) => { seen.push([name, args]); return f(args); } },
  }));
  for (const stream of [false, true]) {
    seen.length = 0;
    const runner = client.chat.completions.runTools({ model, messages, tools, stream });
    assert.equal(await runner.finalContent(), 'It is 21 degrees.');
    assert.deepEqual(seen, [['weather', { city: 'Oslo', days: 2 }], ['clock', {}]]);
  }
});

test('streamed calls', async () => {
  const tools = Object.keys(run).map((name) => ({ type: 'function', function: { name, parameters: schema } }));
  const stream = client.chat.completions.stream({ model, messages, tools });
  const message = (await stream.finalChatCompletion()).choices[0].message;
  assert.deepEqual(message.tool_calls.map((c) => [c.function.name, JSON.parse(c.function.arguments)]), [['weather', { city: 'Oslo', days: 2 }], ['clock', {}]]);
});
