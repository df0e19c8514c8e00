// Bundles the page into a folder: node build.mjs [folder], dist by default.
// The same sources give the same bytes; a test compares dist with a fresh build.
// The runbooks of alerts of runs and the glossary are in it: the page asks nobody else.
import { build } from 'esbuild';
import { copyFileSync, mkdirSync, readFileSync } from 'node:fs';

const out = process.argv[2] ?? 'dist';
mkdirSync(out, { recursive: true });

/** `import texts from 'runbooks'`: name in small letters -> text, of those that src/alerts.ts names. */
const runbooks = {
  name: 'runbooks',
  setup(setup) {
    setup.onResolve({ filter: /^runbooks$/ }, () => ({ path: 'runbooks', namespace: 'runbooks' }));
    setup.onLoad({ filter: /.*/, namespace: 'runbooks' }, () => {
      const names = new Set(readFileSync('src/alerts.ts', 'utf8').match(/Bellwether[A-Z]\w+/g).map((name) => name.toLowerCase()));
      const texts = [...names].sort().map((name) => [name, readFileSync(`../alerts/runbooks/${name}.md`, 'utf8')]);
      return { contents: JSON.stringify(Object.fromEntries(texts)), loader: 'json' };
    });
  },
};

/** `import entries from 'glossary'`: anchor -> title, text and where more is, of docs/glossary.md. */
const glossary = {
  name: 'glossary',
  setup(setup) {
    setup.onResolve({ filter: /^glossary$/ }, () => ({ path: 'glossary', namespace: 'glossary' }));
    setup.onLoad({ filter: /.*/, namespace: 'glossary' }, () => {
      const sections = readFileSync('../../docs/glossary.md', 'utf8').split(/^## /m).slice(1);
      const entries = sections.map((section) => {
        const [title, ...lines] = section.trim().split('\n');
        const [text, more = ''] = lines.join('\n').trim().split(/\n\nMore: /);
        const anchor = title.toLowerCase().replace(/[^\w -]/g, '').replace(/ /g, '-');
        return [anchor, { title, text, more: more.replace(/\.$/, '') }];
      });
      return { contents: JSON.stringify(Object.fromEntries(entries)), loader: 'json' };
    });
  },
};

await build({
  entryPoints: [{ in: 'src/main.ts', out: 'console' }],
  bundle: true,
  minify: true,
  charset: 'utf8',
  legalComments: 'eof',
  target: 'es2021',
  outdir: out,
  logLevel: 'warning',
  plugins: [runbooks, glossary],
});
for (const name of ['index.html', 'favicon.svg']) copyFileSync(`src/${name}`, `${out}/${name}`);
