// The address is the state: a link shows what its sender saw.

export interface Route {
  run: string | null;
  signal: string | null;
  layer: number | null;
  head: number | null;
  step: number | null;
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
}

/** #/run/NAME?signal=...&layer=...&head=...&step=... ; everything else is the list of runs. */
export function parseRoute(hash: string): Route {
  const match = /^#\/run\/([^?]+)(?:\?(.*))?$/.exec(hash);
  if (!match) return { run: null, signal: null, layer: null, head: null, step: null };
  const query = new URLSearchParams(match[2] ?? '');
  let run = match[1];
  try {
    run = decodeURIComponent(run);
  } catch {
    // A stray % names a run that does not exist, which the page will say.
  }
  return { run, signal: query.get('signal'), layer: whole(query.get('layer')), head: whole(query.get('head')), step: whole(query.get('step')) };
}

export function formatRoute(route: Route): string {
  if (route.run === null) return '#/';
  const query = new URLSearchParams();
  if (route.signal !== null) query.set('signal', route.signal);
  for (const key of ['layer', 'head', 'step'] as const) {
    const value = route[key];
    if (value !== null) query.set(key, String(value));
  }
  const text = query.toString();
  return `#/run/${encodeURIComponent(route.run)}${text ? `?${text}` : ''}`;
}
