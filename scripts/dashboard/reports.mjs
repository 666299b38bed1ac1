// Makes the pages of `xpyd bench` and `bench compare`, and looks at them in the browser: widths, themes, axe.
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';

const run = promisify(execFile);

export async function reports(binary, url, open, wellFormed) {
  const dir = mkdtempSync(join(tmpdir(), 'xpyd-reports-')), at = name => join(dir, name);
  try {
    for (const name of ['a', 'b']) {
      await run(binary, ['bench', '--url', url, '--endpoint', 'completions', '--input', '20', '--output', '8', '--concurrency', '1,2,3', '--requests', '30', '--slo', 'ttft=200ms,itl=50ms', '--progress', 'off', '--json', at(name + '.json'), '--html', at(name + '.html')]);
    }
    await run(binary, ['bench', 'compare', at('a.json'), at('b.json'), '--html', at('compare.html')]);
    for (const file of ['a.html', 'compare.html']) {
      for (const [width, theme] of [[1280, 'light'], [360, 'dark'], [768, 'dark'], [2560, 'light']]) {
        const page = await open(width, theme);
        await page.goto('file://' + at(file));
        for (const closed of await page.locator('summary').all()) await closed.click();
        await wellFormed(page, `${file} at ${width}`);
        const shown = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
        const before = await shown();
        await page.check('#other');
        assert.notEqual(await shown(), before, `${file}: the theme does not change`);
        const halves = await page.evaluate(() => [...document.querySelectorAll('svg')].filter(s => / in flight$/.test(s.getAttribute('aria-label'))).flatMap(s => [...s.querySelectorAll('text[text-anchor=middle]')]).filter(t => /^[0-9]*[.][0-9]+$/.test(t.textContent)).length);
        assert.equal(halves, 0, `${file}: half a request in flight`);
        if (process.env.REPORTS) await page.screenshot({ path: join(process.env.REPORTS, `${file}-${width}.png`), fullPage: true });
        await page.context().close();
      }
    }
  } finally {
    rmSync(dir, { recursive: true, force: true });
  }
}
