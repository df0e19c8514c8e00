// Bundles the page into a folder: node build.mjs [folder], dist by default.
// The same sources give the same bytes; a test compares dist with a fresh build.
import { build } from 'esbuild';
import { copyFileSync, mkdirSync } from 'node:fs';

const out = process.argv[2] ?? 'dist';
mkdirSync(out, { recursive: true });
await build({
  entryPoints: [{ in: 'src/main.ts', out: 'console' }],
  bundle: true,
  minify: true,
  charset: 'utf8',
  legalComments: 'eof',
  target: 'es2021',
  outdir: out,
  logLevel: 'warning',
});
for (const name of ['index.html', 'favicon.svg']) copyFileSync(`src/${name}`, `${out}/${name}`);
