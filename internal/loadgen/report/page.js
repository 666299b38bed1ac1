'use strict';
// Draws the report that stands in #data. No library; text only ever goes into
// text nodes.
const report = JSON.parse(document.getElementById('data').textContent);
const NS = 'http://www.w3.org/2000/svg';

function el(tag, attrs, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) e.setAttribute(k, v);
  e.append(...children);
  return e;
}
function sv(tag, attrs, text) {
  const e = document.createElementNS(NS, tag);
  for (const [k, v] of Object.entries(attrs)) e.setAttribute(k, v);
  if (text !== undefined) e.textContent = text;
  return e;
}
function num(x) {
  if (Number.isInteger(x)) return x.toLocaleString('en');
  const a = Math.abs(x);
  if (a >= 10000) return Math.round(x).toLocaleString('en');
  return a >= 1000 ? x.toFixed(0) : a >= 100 ? x.toFixed(1) : a >= 1 ? x.toFixed(2) : x.toPrecision(2);
}
function tick(x) { return Math.abs(x) >= 10000 ? (x / 1000).toLocaleString('en') + 'k' : String(Math.round(x * 1e6) / 1e6); }

const tip = document.getElementById('tip');
function hover(node, text) {
  node.addEventListener('pointermove', e => {
    tip.textContent = typeof text === 'function' ? text(e) : text;
    tip.style.left = Math.min(e.clientX + 12, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = (e.clientY + 14) + 'px';
    tip.style.opacity = 1;
  });
  node.addEventListener('pointerleave', () => { tip.style.opacity = 0; });
}

// ticks are about n round numbers from lo to hi.
function ticks(lo, hi, n) {
  const raw = (hi - lo) / n || 1, p = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(m => m * p >= raw) * p, out = [];
  for (let v = Math.ceil(lo / step) * step; v <= hi + step / 1e6; v += step) out.push(v);
  return out;
}

const L = 52, R = 12, T = 8, B = 34;
// plot makes an svg with axes and returns it with its scales.
function plot({ x0, x1, y1, width: W = 520, height = 190, xlabel }) {
  if (x1 <= x0) x1 = x0 + 1;
  if (!(y1 > 0)) y1 = 1;
  const H = height, svg = sv('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img' });
  const x = v => L + (v - x0) / (x1 - x0) * (W - L - R), y = v => H - B - v / y1 * (H - B - T);
  for (const t of ticks(0, y1, 4)) {
    svg.append(sv('line', { x1: L, x2: W - R, y1: y(t), y2: y(t), stroke: 'var(--grid)' }));
    svg.append(sv('text', { x: L - 6, y: y(t) + 4, 'text-anchor': 'end' }, tick(t)));
  }
  for (const t of ticks(x0, x1, W / 75)) svg.append(sv('text', { x: x(t), y: H - B + 15, 'text-anchor': 'middle' }, tick(t)));
  svg.append(sv('line', { x1: L, x2: W - R, y1: H - B, y2: H - B, stroke: 'var(--line)' }));
  svg.append(sv('text', { x: W - R, y: H - 4, 'text-anchor': 'end' }, xlabel));
  return { svg, x, y, W, H };
}

function card(title, ...children) { return el('section', {}, el('h2', {}, title), ...children); }
function wide(title, ...children) {
  const c = card(title, ...children);
  c.className = 'wide';
  return c;
}
function legend(...items) {
  const d = el('div', { class: 'legend' });
  for (const [color, name] of items) {
    const i = el('i'); i.style.background = `var(--${color})`;
    d.append(el('span', {}, i, name));
  }
  return d;
}

function histogram(title, v) {
  if (!v || !v.count || !v.bins) return null;
  const n = v.bins.length, w = (v.bins_to - v.bins_from) / n;
  const p = plot({ x0: v.bins_from, x1: v.bins_to, y1: Math.max(...v.bins) * 1.06, xlabel: 'ms', height: 170 });
  v.bins.forEach((c, i) => {
    const a = v.bins_from + i * w;
    const r = sv('rect', { x: p.x(a) + .5, width: Math.max(.5, p.x(a + w) - p.x(a) - 1), y: p.y(c), height: Math.max(0, p.H - B - p.y(c)), fill: 'var(--a)' });
    hover(r, `${num(a)} to ${i === n - 1 ? num(v.max) : num(a + w)} ms\n${num(c)} of ${num(v.count)} (${(100 * c / v.count).toFixed(1)} %)`);
    p.svg.append(r);
  });
  for (const [name, val] of [['p50', v.p50], ['p99', v.p99]]) {
    if (val > v.bins_to) continue;
    const right = p.x(val) > p.W - 80;
    p.svg.append(sv('line', { x1: p.x(val), x2: p.x(val), y1: T, y2: p.H - B, stroke: 'var(--b)', 'stroke-dasharray': '4 3' }));
    p.svg.append(sv('text', { x: p.x(val) + (right ? -4 : 4), y: T + (name === 'p50' ? 8 : 21), 'text-anchor': right ? 'end' : 'start', style: 'fill:var(--b)' }, `${name} ${num(val)}`));
  }
  return card(title, p.svg);
}

// coarse merges a timeline's bins so that at most 60 are drawn.
function coarse(t) {
  const k = Math.ceil(t.started.length / 60) || 1, out = { bin_s: t.bin_s * k };
  for (const name of ['started', 'completed', 'failed', 'output_tokens', 'in_flight']) {
    out[name] = [];
    for (let i = 0; i < t[name].length; i += k) {
      const part = t[name].slice(i, i + k);
      out[name].push(name === 'in_flight' ? part[part.length - 1] : part.reduce((a, b) => a + b, 0));
    }
  }
  return out;
}

// lines draws series over time: [{color, name, data}], a value a bin.
function lines(title, t, unit, series) {
  const n = t.started.length, end = n * t.bin_s;
  const p = plot({ x0: 0, x1: end, y1: Math.max(...series.map(s => Math.max(...s.data))) * 1.08, xlabel: 's', height: 170 });
  for (const s of series) {
    const pts = s.data.map((v, i) => `${p.x((i + .5) * t.bin_s).toFixed(1)},${p.y(v).toFixed(1)}`);
    if (s.area && n) p.svg.append(sv('polygon', { points: `${p.x(t.bin_s / 2)},${p.y(0)} ${pts.join(' ')} ${p.x((n - .5) * t.bin_s)},${p.y(0)}`, fill: 'var(--fill)' }));
    p.svg.append(sv('polyline', { points: pts.join(' '), fill: 'none', stroke: `var(--${s.color})`, 'stroke-width': 1.6 }));
  }
  const cover = sv('rect', { x: L, y: T, width: p.W - L - R, height: p.H - B - T, fill: 'transparent' });
  hover(cover, e => {
    const box = p.svg.getBoundingClientRect(), vx = (e.clientX - box.left) * p.W / box.width;
    const i = Math.max(0, Math.min(n - 1, Math.floor((vx - L) / (p.W - L - R) * n)));
    return `${num(i * t.bin_s)} s\n` + series.map(s => `${s.name} ${num(s.data[i])}${unit}`).join('\n');
  });
  p.svg.append(cover);
  return card(title, series.length > 1 ? legend(...series.map(s => [s.color, s.name])) : '', p.svg);
}

const axes = { start_s: 'start, s', input_tokens: 'input tokens', output_tokens: 'output tokens', ttft_ms: 'TTFT, ms', tpot_ms: 'TPOT, ms', e2e_ms: 'E2E, ms', turn: 'turn' };
function scatter(ph) {
  const col = Object.fromEntries(ph.sample_columns.map((c, i) => [c, i]));
  const pick = (keys, chosen) => {
    const s = el('select');
    for (const k of keys) { const o = el('option', { value: k }, axes[k]); if (k === chosen) o.selected = true; s.append(o); }
    return s;
  };
  const xs = ['start_s', 'input_tokens', 'output_tokens'];
  if (ph.turns && ph.turns.length) xs.push('turn');
  const xsel = pick(xs, 'start_s'), ysel = pick(['ttft_ms', 'tpot_ms', 'e2e_ms'], ph.latency.ttft_ms.count ? 'ttft_ms' : 'e2e_ms');
  const holder = el('div');
  const draw = () => {
    const xi = col[xsel.value], yi = col[ysel.value], bad = col.failed;
    const rows = ph.sample.filter(r => r[bad] || r[yi] > 0);
    const p = plot({ x0: Math.min(0, ...rows.map(r => r[xi])), x1: Math.max(1e-9, ...rows.map(r => r[xi])) * 1.02, y1: Math.max(1e-9, ...rows.map(r => r[yi])) * 1.05, xlabel: axes[xsel.value], width: 1080, height: 300 });
    for (const r of rows) {
      const c = sv('circle', { cx: p.x(r[xi]).toFixed(1), cy: p.y(r[yi]).toFixed(1), r: 2.4, fill: r[bad] ? 'var(--bad)' : 'var(--a)', 'fill-opacity': .55 });
      hover(c, ph.sample_columns.filter(k => axes[k] && (k !== 'turn' || r[col.turn])).map(k => `${axes[k]}: ${num(r[col[k]])}`).join('\n') + (r[bad] ? '\nfailed' : ''));
      p.svg.append(c);
    }
    holder.replaceChildren(p.svg);
  };
  xsel.onchange = ysel.onchange = draw;
  draw();
  const all = ph.requests.completed + ph.requests.failed;
  return wide('Requests' + (ph.sample.length < all ? ` (${num(ph.sample.length)} of ${num(all)}, at random)` : ''), el('div', { class: 'legend' }, ysel, ' over ', xsel), holder);
}

function table(head, rows) {
  const t = el('table'), tr = el('tr');
  head.forEach(h => tr.append(el('th', {}, h)));
  t.append(el('thead', {}, tr));
  const body = el('tbody');
  for (const r of rows) {
    const tr = el('tr');
    r.forEach(c => tr.append(typeof c === 'string' ? el('td', { class: 'text' }, c) : el('td', {}, num(c))));
    body.append(tr);
  }
  t.append(body);
  return t;
}

function load(ph) {
  if (ph.mode === 'closed') return `closed loop, ${ph.concurrency} in flight`;
  return ph.rate_asked ? `open loop, ${ph.arrival}, ${num(ph.rate_asked)} requests/s` : 'open loop, at the times of the trace';
}

function show(ph) {
  const main = document.getElementById('main'), l = ph.latency, out = [];
  const tiles = el('div', { class: 'tiles' });
  const tile = (v, what, cls) => tiles.append(el('div', { class: 'tile' }, el('b', cls ? { class: cls } : {}, v), el('span', {}, what)));
  tile(num(ph.throughput.requests_per_s), 'requests/s');
  tile(num(ph.throughput.output_tokens_per_s), 'output tokens/s');
  tile(num(ph.throughput.input_tokens_per_s), 'input tokens/s');
  for (const [name, v] of [['TTFT', l.ttft_ms], ['ITL', l.itl_ms], ['E2E', l.e2e_ms]]) if (v.count) tile(num(v.p50), `${name} p50, ms; p99 ${num(v.p99)}`);
  if (ph.goodput) tile((100 * ph.goodput.fraction).toFixed(1) + ' %', `goodput, ${num(ph.goodput.requests_per_s)} requests/s`);
  tile(num(ph.requests.failed), `failed of ${num(ph.requests.completed + ph.requests.failed)}`, ph.requests.failed ? 'bad' : '');
  out.push(tiles);

  const rows = [['TTFT', l.ttft_ms], ['ITL', l.itl_ms], ['TPOT', l.tpot_ms], ['E2E', l.e2e_ms], ['TTFT from schedule', l.scheduled_ttft_ms], ['E2E from schedule', l.scheduled_e2e_ms], ['started late by', l.late_ms]];
  const lat = el('section', { class: 'wide' }, el('h2', {}, `${ph.name}: ${load(ph)}, ${num(ph.window_s)} s`),
    table(['ms', 'count', 'mean', 'stddev', 'min', 'p50', 'p90', 'p95', 'p99', 'max'], rows.filter(r => r[1] && r[1].count).map(([n, v]) => [n, v.count, v.mean, v.stddev, v.min, v.p50, v.p90, v.p95, v.p99, v.max])));
  out.push(lat);
  if (ph.errors.length) out.push(el('section', { class: 'wide' }, el('h2', { class: 'bad' }, 'Failures'), table(['kind', 'example', 'count'], ph.errors.map(e => [e.kind, e.example, e.count]))));

  const grid = el('div', { class: 'grid' }), t = coarse(ph.timeline), per = a => a.map(v => v / t.bin_s);
  for (const h of [histogram('Time to first token', l.ttft_ms), histogram('Between chunks (ITL)', l.itl_ms), histogram('Time per output token (TPOT)', l.tpot_ms), histogram('Whole request (E2E)', l.e2e_ms)]) if (h) grid.append(h);
  if (t.started.length) {
    const rates = [{ color: 'a', name: 'started', data: per(t.started) }, { color: 'c', name: 'completed', data: per(t.completed) }];
    if (ph.requests.failed) rates.push({ color: 'bad', name: 'failed', data: per(t.failed) });
    grid.append(lines('Requests a second', t, '/s', rates), lines('Output tokens a second', t, '/s', [{ color: 'a', name: '', area: true, data: per(t.output_tokens) }]), lines('In flight', t, '', [{ color: 'a', name: '', area: true, data: t.in_flight }]));
  }
  out.push(grid);
  if (ph.sample.length) out.push(scatter(ph));
  if (ph.turns && ph.turns.length) {
    out.push(el('section', { class: 'wide' }, el('h2', {}, 'Turns'), table(['turn', 'requests', 'input tokens', 'cached, %', 'TTFT p50', 'TTFT p99', 'E2E p50', 'E2E p99'],
      ph.turns.map(r => [String(r.turn), r.e2e_ms.count, r.mean_input_tokens, 100 * r.cached_fraction, r.ttft_ms.p50, r.ttft_ms.p99, r.e2e_ms.p50, r.e2e_ms.p99]))));
  }
  out.push(...report.notes.map(n => el('p', { class: 'note' }, n)));
  main.replaceChildren(...out);
}

// sweep compares the phases when there are several.
function sweep(phases) {
  const row = ph => [ph.name, ph.throughput.requests_per_s, ph.throughput.output_tokens_per_s, ph.latency.ttft_ms.p50, ph.latency.ttft_ms.p99, ph.latency.tpot_ms.p50, ph.latency.tpot_ms.p99, ph.latency.e2e_ms.p50, ph.latency.e2e_ms.p99, ph.goodput ? 100 * ph.goodput.fraction : 0, ph.requests.failed];
  const main = document.getElementById('main'), grid = el('div', { class: 'grid' });
  const curve = (title, get) => {
    const pts = phases.map(ph => ({ ph, x: ph.throughput.requests_per_s, v: get(ph) })).sort((a, b) => a.x - b.x);
    const p = plot({ x0: 0, x1: Math.max(...pts.map(q => q.x)) * 1.05, y1: Math.max(...pts.flatMap(q => q.v)) * 1.08, xlabel: 'requests/s reached', height: 220 });
    ['a', 'b'].forEach((color, k) => {
      p.svg.append(sv('polyline', { points: pts.map(q => `${p.x(q.x)},${p.y(q.v[k])}`).join(' '), fill: 'none', stroke: `var(--${color})`, 'stroke-width': 1.6 }));
      for (const q of pts) {
        const c = sv('circle', { cx: p.x(q.x), cy: p.y(q.v[k]), r: 3.5, fill: `var(--${color})` });
        hover(c, `${q.ph.name}\n${num(q.x)} requests/s\np50 ${num(q.v[0])} ms\np99 ${num(q.v[1])} ms`);
        p.svg.append(c);
      }
    });
    return card(title, legend(['a', 'p50'], ['b', 'p99']), p.svg);
  };
  if (phases.some(ph => ph.latency.ttft_ms.count)) grid.append(curve('TTFT, ms', ph => [ph.latency.ttft_ms.p50, ph.latency.ttft_ms.p99]), curve('TPOT, ms', ph => [ph.latency.tpot_ms.p50, ph.latency.tpot_ms.p99]));
  grid.append(curve('E2E, ms', ph => [ph.latency.e2e_ms.p50, ph.latency.e2e_ms.p99]));
  main.replaceChildren(el('section', { class: 'wide' }, el('h2', {}, 'Phases'), table(['', 'requests/s', 'output tokens/s', 'TTFT p50', 'p99', 'TPOT p50', 'p99', 'E2E p50', 'p99', 'goodput, %', 'failed'], phases.map(row))), grid, ...report.notes.map(n => el('p', { class: 'note' }, n)));
}

document.getElementById('what').textContent = `${report.target.model} at ${report.target.urls.join(', ')} (${report.target.endpoint}${report.target.stream ? ', streamed' : ''}), ${report.workload.kind}, ${new Date(report.started).toLocaleString()} · ${report.command.join(' ')}`;
document.title = `xpyd bench: ${report.target.model}`;
document.getElementById('theme').onclick = () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
};
const measured = report.phases.filter(p => p.measured), nav = document.getElementById('phases'), views = measured.map(p => [p.name, () => show(p)]);
if (measured.length > 1) views.unshift(['all phases', () => sweep(measured)]);
for (const [name, draw] of views) {
  const b = el('button', { type: 'button', 'aria-pressed': 'false' }, name);
  b.onclick = () => {
    for (const o of nav.children) o.setAttribute('aria-pressed', o === b);
    draw();
  };
  if (views.length > 1) nav.append(b);
}
if (views.length) { views[0][1](); if (nav.firstChild) nav.firstChild.setAttribute('aria-pressed', 'true'); }
