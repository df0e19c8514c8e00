// transform: what Grafana's own code makes of a table panel's instant query.
//
//   node transform.mjs < {"transformations": [...], "result": [...]}
//
// `result` is the vector of Prometheus' HTTP API. Out comes the table, rows of
// cells below the names of the columns, as one line of JSON. What maps and pages
// need of @grafana/data is not installed (overrides in package.json).
import { createRequire } from 'node:module';
import { text } from 'node:stream/consumers';

globalThis.window = new EventTarget(); // The package listens there for a browser's storage.
const grafana = createRequire(import.meta.url)('@grafana/data');
const { transformations, result } = JSON.parse(await text(process.stdin));

// One is there twice, under its old name too.
const known = new Set(Object.values(grafana.standardTransformers));
grafana.standardTransformersRegistry.setInit(() => [...known].map((transformation) => ({ id: transformation.id, name: transformation.name, transformation })));

// As the data source lays out format: table: time, labels by name as texts, value.
const labels = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))].sort();
const field = (name, type, values) => ({ name, type, config: {}, values });
const frame = {
  refId: 'A',
  length: result.length,
  fields: [
    field('Time', 'time', result.map(({ value }) => value[0] * 1000)),
    ...labels.map((label) => field(label, 'string', result.map(({ metric }) => metric[label]))),
    field('Value', 'number', result.map(({ value }) => Number(value[1]))),
  ],
};
grafana.transformDataFrame(transformations, [frame]).subscribe(([table]) => {
  const rows = Array.from({ length: table.length }, (_, row) => table.fields.map(({ values }) => values[row]));
  process.stdout.write(`${JSON.stringify([table.fields.map(({ name }) => name), ...rows])}\n`);
});
