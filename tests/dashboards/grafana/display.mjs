// display: the words and colours that Grafana's own code gives a panel's values.
//
//   node display.mjs < {"defaults": {...}, "values": [...]}
//
// `defaults` is the panel's fieldConfig.defaults. Out comes [text, colour] of each value,
// with Grafana's dark theme, as one line of JSON.
import { createRequire } from 'node:module';
import { text } from 'node:stream/consumers';

globalThis.window = new EventTarget(); // The package listens there for a browser's storage.
globalThis.navigator ??= { language: 'en-US', languages: ['en-US'] };  // Times are written as the browser's language has them.
const grafana = createRequire(import.meta.url)('@grafana/data');
const { defaults, values } = JSON.parse(await text(process.stdin));
const theme = grafana.createTheme();
const color = defaults.color ?? { mode: 'thresholds' };
const display = grafana.getDisplayProcessor({ field: { type: 'number', config: { ...defaults, color } }, theme });
const named = new Map(['red', 'dark-red', 'orange', 'green', 'blue', 'text'].map((name) => [theme.visualization.getColorByName(name), name]));
const shown = values.map((value) => {
  const found = display(value);
  return [grafana.formattedValueToString(found), named.get(found.color) ?? found.color];
});
process.stdout.write(`${JSON.stringify(shown)}\n`);
