// Fleet: the picture, all workers in a table, and what can be done to them.
import { Table, ask, bytes, count, el, inOrder, many, session, setText, share, show, span, speed, sure } from './base.js';
import { members, store } from './store.js';

export const title = 'Fleet';
const mostDrawn = 8; // of a role
let table, frame, summary, scaleForm, logForm, pressed = false; // while a button is down, what is under it stays

const trouble = m => m.state === 'dead' || m.state === 'suspect' ? 2 : m.state !== 'live' || m.draining || !m.probed || m.breaker && m.breaker.state !== 'closed' ? 1 : 0;
export function stateOf(m) {
  const more = [];
  if (m.draining) more.push('draining');
  if ((m.state === 'live' || m.state === 'unheard') && !m.probed) more.push('unprobed');
  if (m.breaker && m.breaker.state && m.breaker.state !== 'closed') more.push(m.breaker.state);
  return ['●', '▲', '✕'][trouble(m)] + ' ' + [m.state, ...more].join(', ');
}
const look = m => ['good', 'warn', 'bad'][trouble(m)];

// pool is what a worker's KV pool holds: what it says itself, or the share that it announces.
function pool(m) {
  const c = store.cache[m.id];
  if (c && c.pool && c.pool.blocks) return c.pool;
  const held = Math.round(m.load.kv_used * (m.blocks || 0));
  return { blocks: m.blocks || 0, held, cached: 0, free: (m.blocks || 0) - held, quarantined: 0, guess: true };
}
const poolWords = p => p.blocks ? `${count(p.held)} held, ${p.guess ? '' : count(p.cached) + ' cached, '}${count(p.free)} free${p.quarantined ? ', ' + count(p.quarantined) + ' quarantined' : ''}` : 'pool unknown';
function poolBar(m) {
  const p = pool(m), part = (n, cls) => n ? el('i', { class: cls, style: { width: 100 * n / p.blocks + '%' } }) : null;
  const bar = el('div', { class: 'bar', role: 'img', 'aria-label': poolWords(p) }, part(p.held, 'b-held'), part(p.cached, 'b-cached'), part(p.quarantined, 'b-quarantined'));
  bar.title = poolWords(p);
  return bar;
}
const rateOf = m => { const r = store.rates[m.id]; return r ? m.role === 'prefill' ? r.sent : r.stored : 0; };
// edgeRate is how much KV comes to a decode worker from a prefill worker, bytes a second.
const edgeRate = (d, p) => ((store.rates[d.id] || {}).from || {})[p.id] || 0;
// wayOf is the transport between a prefill and a decode worker, as the latter says.
function wayOf(d, p) {
  for (const part of (d.kv_paths || '').split(',')) {
    const [id, ...way] = part.trim().split(' ');
    if (id === p.id && way.length) return way.join(' ');
  }
  return '';
}

export function make() {
  frame = el('div', { class: 'picture-frame', onpointerdown: () => { pressed = true; addEventListener('pointerup', () => setTimeout(() => { pressed = false; }), { once: true }); } });
  summary = el('span', { class: 'dim' });
  table = new Table('Workers', [
    { name: 'worker', of: m => m.id, size: 'minmax(5.5rem,1.2fr)' },
    { name: 'role', of: m => m.role, size: '4.5rem' },
    { name: 'state', of: stateOf, look, size: 'minmax(5rem,1.2fr)' },
    { name: 'running', of: m => count(m.load.running), cls: 'right mid', size: '4.5rem' },
    { name: 'waiting', of: m => count(m.load.waiting), cls: 'right mid', size: '4.5rem' },
    { name: 'pool', of: poolBar, cls: 'mid', size: 'minmax(5rem,1fr)' },
    { name: 'KV', of: m => speed(rateOf(m)), cls: 'right wide', size: '6rem' },
    { name: 'model', of: m => m.model, cls: 'wide', size: 'minmax(6rem,1fr)' },
    { name: 'device', of: m => (m.devices || []).map(d => d.name || d.pci).join(', ') || m.numerics, cls: 'wide', size: 'minmax(6rem,1fr)' },
  ], m => detail(m.id));
  scaleForm = session.as === 'admin' ? scale() : null;
  logForm = session.as === 'admin' ? logs() : null;
  return [el('div', { class: 'head' }, el('h1', {}, 'Fleet'), summary, el('a', { href: '#try' }, 'Send it a request')),
    el('section', { class: 'card', 'aria-label': 'Picture of the fleet' }, frame, el('div', { class: 'legend' },
      ...[['held', 'held by requests'], ['cached', 'cached, may go'], ['free', 'free'], ['quarantined', 'quarantined']].map(([k, what]) => el('span', {}, el('svg', { viewBox: '0 0 14 14', 'aria-hidden': 'true' }, el('rect', { width: 14, height: 14, rx: 3, class: 'f-' + k }), k === 'quarantined' && el('path', { d: 'M0 14L14 0M-3 8L8 -3M6 17L17 6', stroke: 'var(--card)', 'stroke-width': 2 })), what)),
      el('span', {}, el('svg', { viewBox: '0 0 14 14', 'aria-hidden': 'true' }, el('path', { d: 'M0 7h14', stroke: 'var(--held)', 'stroke-width': 2, 'stroke-dasharray': '5 3' })), 'requests run between the two'))),
    scaleForm, logForm, el('section', { class: 'card', 'aria-label': 'All workers' }, table.element)];
}

export function update() {
  if (!store.fleet) return;
  const list = members(), at = Date.parse(store.fleet.at);
  setText(summary, `${many(list.length, 'member')}, version ${store.fleet.version}${store.fleet.planner ? '; ' + store.fleet.planner : ''}${store.fleet.doing ? '; ' + store.fleet.doing : ''}`);
  table.set(list);
  if (logForm) logForm.offer(list.filter(m => m.dialect === 'native' && m.state !== 'dead').map(m => m.id).sort(inOrder));
  picture(list, at);
}
// The picture is made again each second, so what has the focus is found again by its worker.
function picture(list, at) {
  if (pressed) return;
  const pickFew = role => {
    const all = list.filter(m => m.role === role).sort((a, b) => trouble(b) - trouble(a) || (b.load.running + b.load.waiting) - (a.load.running + a.load.waiting) || inOrder(a.id, b.id));
    return { few: all.slice(0, mostDrawn).sort((a, b) => inOrder(a.id, b.id)), more: Math.max(0, all.length - mostDrawn) };
  };
  const P = pickFew('prefill'), D = pickFew('decode'), W = 940, H = 108, rows = Math.max(P.few.length, D.few.length, 1);
  const height = 46 + rows * H + (P.more || D.more ? 28 : 0), nodeW = 300, xs = { prefill: 10, decode: W - nodeW - 10 };
  const place = (few, i) => 42 + (i + (rows - few.length) / 2) * H;
  const live = new Map();
  for (const r of store.requests.values()) if (!r.over || at - Date.parse(r.over) < 2500) { const k = r.prefill + ' ' + r.decode; const n = live.get(k) || { run: 0, lately: 0 }; n[r.over ? 'lately' : 'run']++; live.set(k, n); }
  const parts = [el('text', { x: xs.prefill, y: 20, class: 'sub' }, 'PREFILL reads prompts'), el('text', { x: xs.decode, y: 20, class: 'sub' }, 'DECODE writes answers'), el('text', { x: W / 2, y: 20, class: 'sub', 'text-anchor': 'middle' }, 'KV')];
  const labels = [];
  P.few.forEach((p, i) => D.few.forEach((d, j) => {
    if (p.model !== d.model || trouble(p) === 2 || trouble(d) === 2) return;
    const n = live.get(p.id + ' ' + d.id), way = wayOf(d, p), y1 = place(P.few, i) + 46, y2 = place(D.few, j) + 46;
    if (!n && !way && P.few.length * D.few.length > 16) return;
    const e = el('path', { class: 'edge' + (n ? ' alive' : ''), d: `M${xs.prefill + nodeW} ${y1}C${W / 2} ${y1} ${W / 2} ${y2} ${xs.decode} ${y2}`, 'stroke-width': n ? Math.min(6, 1.8 + .35 * n.run) : 1.5 }, el('title', {}, `${p.id} to ${d.id}${way ? ' by ' + way : ''}, ${speed(edgeRate(d, p))}${n ? ', ' + many(n.run, 'request') + ' now' : ''}`));
    parts.push(e);
    if (way && P.few.length * D.few.length <= 16) labels.push(el('text', { class: 'sub way', x: xs.decode - 8, y: y2 - 12 - 14 * labels.filter(l => l.dataset.to === d.id).length, 'text-anchor': 'end', 'data-to': d.id }, `${p.id} ${way}${edgeRate(d, p) ? ' ' + speed(edgeRate(d, p)) : ''}${n && n.run ? ' · ' + n.run : ''}`));
  }));
  const nodes = [...P.few.map((m, i) => node(m, xs.prefill, place(P.few, i))), ...D.few.map((m, i) => node(m, xs.decode, place(D.few, i)))];
  for (const [few, role] of [[P, 'prefill'], [D, 'decode']]) {
    if (few.more) parts.push(el('text', { x: xs[role], y: height - 8, class: 'sub' }, `and ${few.more} more ${role}: see the table`));
    if (!few.few.length) parts.push(el('text', { x: xs[role], y: 80, class: 'sub' }, `no ${role} worker`));
  }
  const had = document.activeElement && document.activeElement.dataset && document.activeElement.dataset.worker, inside = frame.contains(document.activeElement);
  const svg = el('svg', { class: 'picture', viewBox: `0 0 ${W} ${height}`, role: 'group', 'aria-label': 'Prefill workers on the left, decode workers on the right' }, parts, labels, nodes);
  svg.style.minWidth = '640px';
  svg.style.maxWidth = '1400px';
  svg.style.margin = '0 auto';
  frame.replaceChildren(svg);
  if (inside && had) { const n = nodes.find(n => n.dataset.worker === had); if (n) n.focus({ preventScroll: true }); }
}

function node(m, x, y) {
  const p = pool(m), w = 300, inner = w - 28, open = () => detail(m.id);
  let at = x + 14;
  const fill = (n, cls) => { const r = n > 0 && p.blocks ? el('rect', { x: at, y: y + 60, width: inner * n / p.blocks, height: 10, class: cls }) : null; if (r) at += inner * n / p.blocks; return r; };
  return el('g', { role: 'button', tabindex: '0', 'data-worker': m.id, class: ['', 'resting', 'trouble'][trouble(m)],
    onclick: open, onkeydown: e => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); open(); } } },
  el('rect', { x, y, width: w, height: 92, rx: 10, class: 'box' }), el('rect', { x, y: y + 12, width: 4, height: 68, rx: 2, class: m.role + '-mark' }),
  el('text', { x: x + 14, y: y + 24, class: 'name' }, (m.id.length > 24 ? m.id.slice(0, 23) + '…' : m.id) + ' '),
  el('text', { x: x + w - 14, y: y + 24, class: 'sub', 'text-anchor': 'end' }, stateOf(m) + ' '),
  el('text', { x: x + 14, y: y + 46, class: 'sub' }, `${m.load.running} running, ${m.load.waiting} waiting `),
  el('text', { x: x + w - 14, y: y + 46, class: 'sub', 'text-anchor': 'end' }, (m.role === 'prefill' ? 'sends ' : 'gets ') + speed(rateOf(m)) + ' '),
  el('rect', { x: x + 14, y: y + 60, width: inner, height: 10, class: 'f-free' }), fill(p.held, 'f-held'), fill(p.cached, 'f-cached'), fill(p.quarantined, 'f-quarantined'),
  el('text', { x: x + 14, y: y + 85, class: 'sub' }, poolWords(p)));
}

function detail(id) {
  const m = members().find(x => x.id === id);
  if (!m) return;
  const at = Date.parse(store.fleet.at), b = m.breaker || {}, g = m.load.gpu, p = pool(m), c = store.cache[id], fact = (k, v) => v ? [el('dt', {}, k), el('dd', {}, v)] : [];
  const facts = el('dl', { class: 'facts' }, fact('State', `${stateOf(m)} for ${span((at - Date.parse(m.since)) / 1000)}${m.reason ? ': ' + m.reason : ''}`), fact('Probe', m.probed ? '' : m.probe_error || 'not yet'),
    fact('Breaker', b.state && b.state !== 'closed' ? b.state + (b.why ? ': ' + b.why : '') : ''), fact('Model', m.model), fact('Address', m.url),
    fact('Load', `${m.load.running} running, ${m.load.waiting} waiting, ${count(m.load.queued_tokens)} prompt tokens queued; ${m.in_flight.legs} legs from here`),
    fact('KV pool', poolWords(p) + (m.kv_bytes ? ', ' + bytes(m.kv_bytes) : '')), fact('KV moved', c && c.moved ? `${bytes(c.moved.sent_bytes)} sent, ${bytes(c.moved.stored_bytes)} received` : ''), fact('KV from', m.kv_paths),
    fact('Device', (m.devices || []).map(d => [d.name, d.model].filter(Boolean).join(' ')).join(', ') || m.numerics),
    fact('GPU', g ? `${share(g.busy)} busy, ${bytes(g.memory_used)} of ${bytes(g.memory_total)}, ${Math.round(g.watts)} W, ${Math.round(g.celsius)} °C` : ''), fact('Dialect', m.dialect), fact('Build', m.build), fact('Process', `${m.pid}, epoch ${m.epoch}`), fact('Topology', m.topology));
  const other = m.role === 'prefill' ? 'decode' : 'prefill', path = '/admin/v1/instances/' + encodeURIComponent(id);
  const order = (label, text, go, danger) => el('button', { type: 'button', class: danger ? 'danger' : 'quiet', onclick: () => sure(`${label} ${id}`, text, label, go, danger) }, label);
  const does = session.as === 'admin' && m.state !== 'dead' ? el('div', { class: 'does' },
    m.draining ? order('Undrain', `${id} gets new work again.`, () => ask(path + '/undrain', { method: 'POST' })) : order('Drain', `${id} gets no new work, and its streams go on at other workers.`, () => ask(path + '/drain', { method: 'POST' }), true),
    m.dialect === 'native' && order('Make it ' + other, `${id} becomes a ${other} worker, once its streams go on elsewhere.`, () => ask(path + '/role', { method: 'POST', body: { role: other } }), true),
    order('Take out', `${id} is taken out of the fleet as this router knows it. A worker that announces itself comes back with its next start.`, () => ask(path, { method: 'DELETE' }), true)) : null;
  show(`${id}, ${m.role}`, el('div', {}, facts, does));
}

// scale asks for other numbers of workers.
function scale() {
  const field = role => el('input', { type: 'number', id: 'scale-' + role, min: 1, max: 999, inputMode: 'numeric', placeholder: 'as is' });
  const P = field('prefill'), D = field('decode');
  return el('form', { class: 'card', 'aria-label': 'Scale', onsubmit: e => {
    e.preventDefault();
    const body = {};
    if (P.value) body.prefill = Number(P.value);
    if (D.value) body.decode = Number(D.value);
    if (!Object.keys(body).length) return;
    sure('Scale', 'Have ' + Object.entries(body).map(([r, n]) => many(n, r + ' worker')).join(' and ') + '? Those too many are drained, and end.', 'Scale', () => ask('/admin/v1/scale', { method: 'POST', body }).then(() => { P.value = D.value = ''; return 'Ordered. Workers come and go in the events.'; }), false);
  } }, el('h2', {}, 'How many workers'), el('div', { class: 'form-row' }, el('div', {}, el('label', { for: 'scale-prefill' }, 'Prefill'), P), el('div', {}, el('label', { for: 'scale-decode' }, 'Decode'), D), el('button', { type: 'submit' }, 'Scale …')));
}

// logs changes the level of a log: the router's, or a worker's.
function logs() {
  const whose = el('select', { id: 'log-of' }, el('option', { value: '' }, 'this router')), level = el('select', { id: 'log-level' }, ['debug', 'info', 'warn', 'error'].map(v => el('option', { value: v, selected: v === 'info' }, v)));
  const form = el('form', { class: 'card', 'aria-label': 'Log level', onsubmit: e => {
    e.preventDefault();
    const id = whose.value, of = id || 'this router', path = id ? `/admin/v1/instances/${encodeURIComponent(id)}/log` : '/admin/v1/log';
    sure('Log level', `Have ${of} log at level ${level.value}, until it starts again?` + (level.value === 'debug' ? ' That is many lines.' : level.value === 'error' ? ' Changes are then in the audit file alone.' : ''), 'Set it', () => ask(path, { method: 'POST', body: { level: level.value } }).then(r => `${of} logs at level ${r.level}`), false);
  } }, el('h2', {}, 'Log level'), el('div', { class: 'form-row' }, el('div', {}, el('label', { for: 'log-of' }, 'Of'), whose), el('div', {}, el('label', { for: 'log-level' }, 'Level'), level), el('button', { type: 'submit' }, 'Set …')));
  let offered = '';
  form.offer = ids => {
    if (ids.join() === offered) return;
    offered = ids.join();
    const chosen = whose.value;
    whose.replaceChildren(el('option', { value: '' }, 'this router'), ...ids.map(id => el('option', { value: id, selected: id === chosen }, id)));
  };
  return form;
}
