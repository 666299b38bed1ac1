// A fleet for the test: `xpyd up` with two workers of each role, and clients that stream from it.
import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

export async function start(binary, port) {
  const dir = mkdtempSync(join(tmpdir(), 'xpyd-dashboard-')), data = join(dir, 'data'), config = join(dir, 'up.yaml');
  writeFileSync(config, 'planner:\n  mode: advise\n  ttft: 500ms\n  tpot: 50ms\n');
  const child = spawn(binary, ['up', '--prefill', '2', '--decode', '2', '--listen', `127.0.0.1:${port}`, '--admin', `127.0.0.1:${port + 1}`, '--data', data, '--config', config, '--kv-host-memory', '32MiB'], { stdio: ['ignore', 'pipe', 'pipe'] });
  const ended = new Promise(done => child.on('exit', done));
  let log = '';
  const ready = new Promise((done, fail) => {
    const hear = b => { log += b; if (/^ready /m.test(log)) done(); };
    child.stdout.on('data', hear);
    child.stderr.on('data', hear);
    ended.then(() => fail(new Error('xpyd up ended: ' + log)));
    setTimeout(() => fail(new Error('xpyd up is not ready after five minutes: ' + log)), 300000).unref();
  });
  await ready;
  const token = name => readFileSync(join(data, name), 'utf8').trim();
  const f = { public: `http://127.0.0.1:${port}`, admin: `http://127.0.0.1:${port + 1}`, token: token('admin-token'), reads: token('admin-token-ro'), child,
    async api(path, method = 'GET', body) { return (await fetch(f.admin + path, { method, body, headers: { Authorization: 'Bearer ' + f.token } })).json(); },
    async stop(signal = 'SIGTERM') { child.kill(signal); await ended; if (signal === 'SIGTERM') rmSync(dir, { recursive: true, force: true }); },
    clean() { rmSync(dir, { recursive: true, force: true }); } };
  return f;
}

const beginnings = ['Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog.', 'One day a big dragon came to the village and all the people were afraid of him, but Tom was not.', 'The sun was warm and the birds sang. Ben and his mother went to the lake to look for a red boat.'];

// clients keeps n streams open until its end is called, with a pause between a client's requests.
export function clients(fleet, n, pause = 150) {
  let on = true;
  const one = async i => {
    for (let k = 0; on; k++) {
      try {
        const r = await fetch(fleet.public + '/v1/completions', { method: 'POST', body: JSON.stringify({ prompt: beginnings[(i + k) % beginnings.length] + (k % 3 ? '' : ` It was day ${k}.`), max_tokens: 60 + 25 * ((i + k) % 8), temperature: 0.9, stream: true }) });
        for await (const _ of r.body);
      } catch { /* the router is away; the page is what is tested */ }
      await new Promise(done => setTimeout(done, pause));
    }
  };
  const all = Array.from({ length: n }, (_, i) => one(i));
  return async () => { on = false; await Promise.all(all); };
}
