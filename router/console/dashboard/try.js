// Try it: a chat or a completion whose tokens show when they came.
import { ask, el, ms, setText, Refused } from './base.js';
import { members } from './store.js';

export const title = 'Try it';
let model, kind, prompt, most, temperature, key, out, beats, facts, go, stop, running;

export function make() {
  model = el('select', { id: 'model' });
  kind = el('select', { id: 'kind-of' }, el('option', { value: 'completions' }, 'completion'), el('option', { value: 'chat' }, 'chat'));
  prompt = el('textarea', { id: 'prompt', required: true });
  prompt.value = 'Once upon a time, there was a little girl named Lily. She loved to';
  prompt.addEventListener('keydown', e => { if (e.key === 'Enter' && (e.ctrlKey || e.metaKey)) { e.preventDefault(); form.requestSubmit(); } });
  most = el('input', { id: 'most', type: 'number', min: 1, max: 100000, value: '120' });
  temperature = el('input', { id: 'temperature', type: 'number', min: 0, max: 2, step: 'any', value: '0.8' });
  key = el('input', { id: 'api-key', type: 'password', autocomplete: 'off', placeholder: 'if the router has keys' });
  out = el('div', { class: 'tokens', role: 'region', 'aria-label': 'Answer', tabindex: '0' });
  beats = el('div', { class: 'beats', role: 'img', 'aria-label': 'Time before each token' });
  facts = el('div', { class: 'dim num', role: 'status' }, 'Nothing is sent yet.');
  go = el('button', { type: 'submit' }, 'Send');
  stop = el('button', { type: 'button', class: 'quiet', disabled: true, onclick: () => running && running.abort() }, 'Stop');
  const form = el('form', { class: 'card', 'aria-label': 'Request', onsubmit: send }, el('label', { for: 'prompt' }, 'Prompt'), prompt,
    el('div', { class: 'form-row' }, field('Model', model, 'model'), field('As a', kind, 'kind-of'), field('Tokens at most', most, 'most'), field('Temperature', temperature, 'temperature'), field('API key', key, 'api-key')), el('div', { class: 'does' }, go, stop));
  return [el('div', { class: 'head' }, el('h1', {}, 'Try it'), el('span', { class: 'dim' }, 'a request like any client’s; Ctrl+Enter sends')),
    form, el('section', { class: 'card', 'aria-label': 'Answer with times' }, facts, out, beats, el('div', { class: 'legend' }, el('span', {}, 'Each bar is the time before a token. The first is to the first token; those twice the median or more are marked, and underlined twice in the text.')))];
}
const field = (name, input, id) => el('div', {}, el('label', { for: id }, name), input);

export function update() {
  const names = [...new Set(members().filter(m => m.state === 'live' && !m.embeds_only).map(m => m.model))].sort();
  if (names.join() !== [...model.options].map(o => o.value).join()) {
    const was = model.value;
    model.replaceChildren(...names.map(n => el('option', { value: n }, n)));
    if (names.includes(was)) model.value = was;
  }
}

async function send(e) {
  e.preventDefault();
  if (running) return;
  running = new AbortController();
  go.disabled = true; stop.disabled = false;
  out.replaceChildren(); beats.replaceChildren();
  out.setAttribute('aria-busy', 'true');
  const chat = kind.value === 'chat', body = { model: model.value, stream: true, max_tokens: Number(most.value) || 100, temperature: Number(temperature.value), stream_options: { include_usage: true } };
  if (chat) body.messages = [{ role: 'user', content: prompt.value }]; else body.prompt = prompt.value;
  const began = performance.now(), tokens = [];
  let previous = began, why = '', usage, id = '', drawing = 0;
  setText(facts, 'Sent; waiting for the first token …');
  const draw = () => {
    drawing = 0;
    const gaps = tokens.slice(1).map(t => t.gap).sort((a, b) => a - b), median = gaps[gaps.length >> 1] || 0, tallest = Math.max(1, ...tokens.slice(-150).map(t => t.gap));
    for (const t of tokens.slice(out.childElementCount)) out.append(el('span', { title: `${t.at.toFixed(1)} ms, ${t.gap.toFixed(1)} ms after the one before` }, t.text));
    tokens.forEach((t, i) => { out.children[i].className = i === 0 ? 'first' : t.gap > 2 * median && t.gap > 5 ? 'late' : ''; });
    beats.replaceChildren(...tokens.slice(-150).map((t, i, all) => { const b = el('i', { class: t === tokens[0] ? 'first' : t.gap > 2 * median && t.gap > 5 ? 'late' : '' }); b.style.height = Math.max(2, 84 * t.gap / tallest) + 'px'; return b; }));
    const total = performance.now() - began, mean = tokens.length > 1 ? (tokens[tokens.length - 1].at - tokens[0].at) / (tokens.length - 1) : 0;
    const words = [tokens.length ? 'first token ' + ms(tokens[0].at) : 'no token yet', tokens.length > 1 && `${tokens.length} events, ${ms(mean)} each, median ${ms(median)}`, usage && `${usage.prompt_tokens} tokens in${usage.prompt_tokens_details && usage.prompt_tokens_details.cached_tokens ? ` (${usage.prompt_tokens_details.cached_tokens} cached)` : ''}, ${usage.completion_tokens} out`, ms(total) + ' in all', why].filter(Boolean).join(' · ');
    facts.replaceChildren(words + (id ? ' · ' : ''), ...(id ? [el('a', { href: '#requests' }, id)] : []));
    beats.setAttribute('aria-label', 'Time before each token: ' + words);
  };
  try {
    const r = await ask('/admin/v1/try/' + (chat ? 'chat/completions' : 'completions'), { method: 'POST', body, raw: true, signal: running.signal, headers: { 'X-Xpyd-Explain': '1', ...(key.value ? { 'X-Xpyd-Api-Key': key.value } : {}) } });
    id = r.headers.get('x-request-id') || '';
    let rest = '';
    const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const now = performance.now(), came = [], events = (rest + value).split('\n\n');
      rest = events.pop();
      for (const event of events) {
        const line = event.split('\n').find(l => l.startsWith('data: '));
        if (!line || line === 'data: [DONE]') continue;
        const d = JSON.parse(line.slice(6));
        if (d.error) { why = 'it broke off: ' + d.error.message; continue; }
        if (d.usage) usage = d.usage;
        const c = d.choices && d.choices[0], text = c && (chat ? (c.delta.content || c.delta.reasoning_content || '') : c.text);
        if (c && c.finish_reason) why = 'ended: ' + c.finish_reason;
        if (!text) continue;
        came.push(text);
      }
      came.forEach((text, i) => { // those that come at once share the time
        const gap = (now - previous) / came.length;
        tokens.push({ text, at: previous + (i + 1) * gap - began, gap });
      });
      if (came.length) previous = now;
      drawing ||= requestAnimationFrame(draw);
    }
  } catch (e) { why = e.name === 'AbortError' ? 'stopped' : e instanceof Refused ? e.message : 'the connection broke'; }
  cancelAnimationFrame(drawing);
  draw();
  out.removeAttribute('aria-busy');
  running = undefined;
  go.disabled = false; stop.disabled = true;
}
export function leave() { if (running) running.abort(); }
