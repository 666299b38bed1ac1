// Overview: what comes in and goes out, how fast, and whether it keeps the promise.
import { count, el, many, setText, share, time } from './base.js';
import { column, goodput, hitRate, last, members, problems, store } from './store.js';

export const title = 'Overview';
const color = name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();

const tiles = {
  out: ['Tokens out', () => count(last('output_tokens')), () => 'a second'],
  in: ['Tokens in', () => count(last('prompt_tokens')), () => 'a second, as estimated'],
  ttft: ['First token', () => time(last('ttft_p50')), () => 'p95 ' + time(last('ttft_p95'))],
  tpot: ['A token', () => time(last('tpot_p50')), () => 'p95 ' + time(last('tpot_p95'))],
  queue: ['In flight', () => count(last('running')), () => many(last('waiting'), 'request') + ' waiting'],
  good: ['Goodput', () => share(goodput().rate), () => store.promise.ttft || store.promise.tpot ? 'kept the promise, last minute' : 'nothing is promised (planner.ttft)'],
  hit: ['Prefix hits', () => share(hitRate().rate), () => hitRate().of],
  fleet: ['Workers', () => count(members().filter(m => m.state === 'live').length), () => ['prefill', 'decode'].map(r => members().filter(m => m.role === r && m.state === 'live').length + ' ' + r).join(', ')],
};
const ticks = format => (_, values) => values.map(format);
const charts = [
  { name: 'Tokens a second', axis: count, lines: [['out', 'output_tokens', 'decode-mark', count], ['in', 'prompt_tokens', 'prefill', count, [6, 4]]] },
  { name: 'Time to the first token', axis: time, promise: 'ttft', lines: [['p50', 'ttft_p50', 'prefill', time], ['p95', 'ttft_p95', 'purple', time, [6, 4]]] },
  { name: 'Time a token', axis: time, promise: 'tpot', lines: [['p50', 'tpot_p50', 'prefill', time], ['p95', 'tpot_p95', 'purple', time, [6, 4]]] },
  { name: 'Requests', axis: count, lines: [['in flight', 'running', 'good-mark', count], ['waiting', 'waiting', 'bad-mark', count, [6, 4]]] },
  { name: 'Goodput against the promise', axis: share, top: 1, lines: [['kept', 'goodput', 'good-mark', share]] },
  { name: 'Prefix hit rate', axis: share, top: 1, lines: [['hits', 'hits', 'prefill', share]] },
];
let made = [], shown = {}, well;

function values(name) {
  if (name === 'goodput') { const j = column('judged'); return column('good').map((g, i) => j[i] ? g / j[i] : null); }
  const v = column(name);
  return /^(ttft|tpot)/.test(name) ? v.map(x => x || null) : v;
}

function data(chart) {
  if (chart.lines[0][1] === 'hits') {
    const h = store.hits || [], x = column('at_ms').map(t => t / 1000);
    let from = 0, to = 0, asked = 0, hit = 0; // of the 15 s before each point
    return [x, x.map(t => {
      for (; to < h.length && h[to].at <= t; to++) { asked += h[to].asked; hit += h[to].hit; }
      for (; from < to && h[from].at < t - 15; from++) { asked -= h[from].asked; hit -= h[from].hit; }
      return asked ? hit / asked : null;
    })];
  }
  const x = column('at_ms').map(t => t / 1000), out = [x, ...chart.lines.map(l => values(l[1]))];
  if (chart.promise) out.push(x.map(() => store.promise[chart.promise] || null));
  return out;
}

function plot(chart, at) {
  const axis = { stroke: color('dim'), grid: { stroke: color('soft'), width: 1 }, ticks: { show: false }, font: '11px system-ui' };
  const line = (name, c, dash, width = 2) => ({ label: name, stroke: color(c), width, dash, points: { show: false }, spanGaps: false });
  const now = Date.now() / 1000;
  return new uPlot({
    width: Math.max(200, at.clientWidth), height: 170, cursor: { y: false }, legend: { show: false }, padding: [8, 26, 0, 0],
    scales: { x: { time: true, range: (_, min, max) => [Math.min(min ?? now, (max ?? now) - 60), max ?? now] }, y: { range: (_, min, max) => [0, chart.top || (max > 0 ? max * 1.1 : 1)] } },
    axes: [{ ...axis, values: (_, t) => t.map(x => new Date(x * 1000).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', second: '2-digit', hour12: false })), space: 90, size: 26 }, { ...axis, size: 62, values: ticks(v => v ? chart.axis(v) : '0') }],
    series: [{}, ...chart.lines.map(l => line(l[0], l[2], l[4])), ...(chart.promise ? [line('promise', 'bad-mark', [2, 4], 1.5)] : [])],
  }, data(chart), at);
}

export function make() {
  shown = {};
  const dl = el('dl', { class: 'tiles', style: { margin: 0 } }, Object.entries(tiles).map(([k, [name]]) => {
    const dd = el('dd', {}, el('span', {}, '–'), el('small', {}));
    shown[k] = dd;
    return el('div', { class: 'tile' }, el('dt', {}, name), dd);
  }));
  made = charts.map(chart => {
    const at = el('div', { class: 'plot', role: 'img', 'aria-label': chart.name });
    const keys = chart.lines.map(l => el('span', { class: 'key' }, el('i', { class: l[4] ? 'dash' : '', 'aria-hidden': 'true', 'data-color': l[2] }), el('span', {}, l[0])));
    if (chart.promise) keys.push(el('span', { class: 'key' }, el('i', { class: 'dash', 'aria-hidden': 'true', 'data-color': 'bad-mark' }), el('span', {}, 'promise')));
    return { chart, at, keys, figure: el('figure', { class: 'card' }, el('figcaption', {}, el('b', {}, chart.name), keys), at) };
  });
  well = el('span', { class: 'dim' });
  watch = new ResizeObserver(() => { for (const m of made) if (m.plot) m.plot.setSize({ width: Math.max(200, m.at.clientWidth), height: 170 }); });
  for (const m of made) watch.observe(m.at);
  return [el('div', { class: 'head' }, el('h1', {}, 'Overview'), well), dl, el('div', { class: 'plots' }, made.map(m => m.figure))];
}
let watch;

export function update() {
  if (!store.columns.length) return;
  const n = members().filter(m => m.state === 'live').length;
  setText(well, problems().length ? 'The last quarter of an hour, a point a second.' : `All is well: ${many(n, 'worker')} serve. The last quarter of an hour, a point a second.`);
  for (const [k, [, value, more]] of Object.entries(tiles)) { setText(shown[k].firstChild, value()); setText(shown[k].lastChild, more()); }
  for (const m of made) {
    if (!m.plot) { m.plot = plot(m.chart, m.at); for (const i of m.figure.querySelectorAll('i[data-color]')) i.style.borderColor = color(i.dataset.color); } else m.plot.setData(data(m.chart));
    const d = data(m.chart);
    m.chart.lines.forEach((l, i) => { const v = d[i + 1][d[i + 1].length - 1]; setText(m.keys[i].lastChild, l[0] + ' ' + (v === undefined || v === null ? '–' : l[3](v))); });
    if (m.chart.promise) setText(m.keys[m.keys.length - 1].lastChild, 'promise ' + time(store.promise[m.chart.promise]));
    m.at.setAttribute('aria-label', m.chart.name + ': ' + m.keys.map(k => k.textContent).join(', '));
  }
}

export function painted() {
  for (const m of made) { if (m.plot) m.plot.destroy(); m.plot = undefined; }
  update();
}
export function leave() { watch.disconnect(); for (const m of made) if (m.plot) m.plot.destroy(); made = []; }
