// Reads a JSON list of Kubernetes objects and prints, as JSON, what is wrong with each: a list of findings.
//
// The schemas of kubernetes-models say nothing about fields that they do not know, as an API server only
// warns of them: a misspelt probe would be no probe.  Their validators read every field that they know, so
// what nobody has read is unknown.
import { text } from 'node:stream/consumers';

// `value` as it is; `unread` holds the paths below it that nobody has asked for yet.
function watched(value, path, unread) {
  if (typeof value !== 'object' || value === null) return value;
  if (!Array.isArray(value)) Object.keys(value).forEach((key) => unread.add(`${path}.${key}`));
  const children = new Map();
  return new Proxy(value, {
    get(target, key) {
      if (typeof key === 'symbol') return target[key];
      const below = `${path}.${key}`;
      unread.delete(below);
      if (!children.has(key)) children.set(key, watched(target[key], below, unread));
      return children.get(key);
    },
  });
}

async function findings(object) {
  const { apiVersion, kind, ...rest } = object;
  const home = apiVersion.startsWith('monitoring.coreos.com/') ? '@kubernetes-models/prometheus-operator' : 'kubernetes-models';
  const Model = (await import(`${home}/${apiVersion}/${kind}`))[kind];
  const model = new Model({});
  const unread = new Set();
  for (const [key, value] of Object.entries(rest)) model[key] = watched(value, key, unread);
  try {
    model.validate();
  } catch (error) {
    return [error.message];
  }
  return [...unread].map((path) => `${path} is not known`);
}

const objects = JSON.parse(await text(process.stdin));
process.stdout.write(JSON.stringify(await Promise.all(objects.map(findings))));
