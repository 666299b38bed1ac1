// The official Node libraries of OpenAI (responses, and its agents on top) and Anthropic (messages), and the
// AI SDK, which has clients of its own, unmodified, against a model that thinks and calls tools.
//
// Run by scripts/clients, which makes the model (caller.py), starts xpyd and sets XPYD_URL.
import assert from 'node:assert/strict';
import test from 'node:test';

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import Anthropic from '@anthropic-ai/sdk';
import { Agent, Runner, OpenAIProvider, tool, setTracingDisabled } from '@openai/agents';
import { generateObject, generateText, stepCountIs, streamText, tool as aiTool } from 'ai';
import OpenAI from 'openai';
import { z } from 'zod';

const url = process.env.XPYD_URL, model = process.env.XPYD_MODEL;
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'unused', maxRetries: 0, timeout: 30_000 });
const claude = new Anthropic({ baseURL: url, apiKey: 'unused', maxRetries: 0, timeout: 30_000 });
const schema = { type: 'object', properties: { city: { type: 'string' } } };
const functions = ['weather', 'clock'].map((name) => ({ type: 'function', name, parameters: schema, strict: false }));
const tools = ['weather', 'clock'].map((name) => ({ name, input_schema: schema }));
const input = 'How warm is it?', thought = '\nOslo it is.\n', answer = 'It is 21 degrees.';
const calls = [["weather", '{"city": "Oslo", "days": 2}'], ["clock", "{}"]];
// No free text in it: the model would never end that.
const weather = z.object({ city: z.enum(['Oslo', 'Rome']), rain: z.boolean() });
setTracingDisabled(true);

test('responses: text, and what it goes on with', async () => {
  const first = await openai.responses.create({ model, input });
  assert.deepEqual([first.status, first.output_text], ['completed', answer]);
  const next = await openai.responses.create({ model, input: 'And now?', previous_response_id: first.id });
  assert.ok(next.usage.input_tokens > first.usage.input_tokens);
  assert.equal((await openai.responses.retrieve(next.id)).previous_response_id, first.id);
});

test('responses: a stream with calls', async () => {
  const types = [];
  const stream = openai.responses.stream({ model, input, tools: functions });
  for await (const event of stream) types.push(event.type);
  const last = await stream.finalResponse();
  assert.deepEqual(last.output.filter((o) => o.type === 'function_call').map((c) => [c.name, c.arguments]), calls);
  assert.equal(last.output[0].content[0].text, thought);
  assert.deepEqual([types[0], types.at(-1)], ['response.created', 'response.completed']);
});

test('messages: a stream with calls, and the loop', async () => {
  const messages = [{ role: 'user', content: input }];
  const first = await claude.messages.stream({ model, max_tokens: 100, messages, tools }).finalMessage();
  const uses = first.content.filter((b) => b.type === 'tool_use');
  assert.deepEqual([first.stop_reason, uses.map((b) => b.name)], ['tool_use', ['weather', 'clock']]);
  assert.deepEqual(uses[0].input, { city: 'Oslo', days: 2 });
  messages.push({ role: 'assistant', content: first.content },
    { role: 'user', content: uses.map((b) => ({ type: 'tool_result', tool_use_id: b.id, content: '21' })) });
  const last = await claude.messages.create({ model, max_tokens: 100, messages, tools });
  assert.deepEqual([last.stop_reason, last.content[0].text], ['end_turn', answer]);
});

test('messages: errors have their classes', async () => {
  await assert.rejects(claude.messages.create({ model: 'none', max_tokens: 1, messages: [{ role: 'user', content: input }] }), Anthropic.NotFoundError);
  await assert.rejects(claude.messages.create({ model, max_tokens: 1, messages: [] }), Anthropic.BadRequestError);
});

for (const [api, stream] of [['responses', false], ['responses', true], ['chat', false], ['chat', true]]) {
  test(`agents: the loop runs tools, by ${api}, ${stream ? 'streamed' : 'whole'}`, async () => {
    const ran = [];
    // Not strict: the model's second call has no arguments, and strict ones would have to have them all.
    const parameters = { type: 'object', properties: { city: { type: 'string' }, days: { type: 'number' } }, required: [], additionalProperties: true };
    const make = (name) => tool({ name, description: 'It tells.', parameters, strict: false,
      execute: async (args) => { ran.push([name, args.city ?? null]); return '21'; } });
    const agent = new Agent({ name: 'a', instructions: 'Be brief.', model, tools: ['weather', 'clock'].map(make) });
    const runner = new Runner({ modelProvider: new OpenAIProvider({ openAIClient: openai, useResponses: api === 'responses' }), tracingDisabled: true });
    const result = await runner.run(agent, input, { stream });
    if (stream) await result.completed;
    assert.deepEqual(ran, [['weather', 'Oslo'], ['clock', null]]);
    assert.equal(result.finalOutput, answer);
  });

  test(`agents: an output of a type, by ${api}, ${stream ? 'streamed' : 'whole'}`, async () => {
    const agent = new Agent({ name: 'a', instructions: 'Be brief.', model, modelSettings: { temperature: 0 }, outputType: weather });
    const runner = new Runner({ modelProvider: new OpenAIProvider({ openAIClient: openai, useResponses: api === 'responses' }), tracingDisabled: true });
    const result = await runner.run(agent, input, { stream });
    if (stream) await result.completed;
    assert.ok(weather.safeParse(result.finalOutput).success, JSON.stringify(result.finalOutput));
  });
}

const vercel = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'unused' });
for (const [name, of] of [['responses', vercel], ['chat', vercel.chat], ['messages', createAnthropic({ baseURL: `${url}/v1`, apiKey: 'unused' })]]) {
  test(`ai: the loop runs tools, by ${name}`, async () => {
    const ran = [];
    const make = (name) => aiTool({ description: 'It tells.', inputSchema: z.object({ city: z.string().optional(), days: z.number().optional() }),
      execute: async (args) => { ran.push([name, args.city ?? null]); return '21'; } });
    const ask = { model: of(model), maxOutputTokens: 200, maxRetries: 0, prompt: input, tools: { weather: make('weather'), clock: make('clock') }, stopWhen: stepCountIs(3) };
    const whole = await generateText(ask);
    const stream = streamText(ask);
    let text = '';
    for await (const piece of stream.textStream) text += piece;
    assert.deepEqual([whole.text, text, (await stream.steps).length], [answer, answer, 2]);
    assert.deepEqual(ran, [['weather', 'Oslo'], ['clock', null], ['weather', 'Oslo'], ['clock', null]]);
  });

  test(`ai: an object, by ${name}`, async () => {
    const { object } = await generateObject({ model: of(model), maxOutputTokens: 400, temperature: 0, maxRetries: 0, prompt: input, schema: weather });
    assert.ok(weather.safeParse(object).success, JSON.stringify(object));
  });
}
