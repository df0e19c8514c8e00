// The address is the state: a link shows what its sender saw.

export type PageName = 'runs' | 'run' | 'alerts' | 'status' | 'runbook' | 'glossary';

export interface Route {
  page: PageName;
  run: string | null;
  signal: string | null;
  layer: number | null;
  head: number | null;
  /** Name of the tensor or module that is shown instead of a head. */
  row: string | null;
  step: number | null;
  /** The steps that charts show; both null = those of the illness; from 0 on without an end = all. */
  from: number | null;
  to: number | null;
  /** Name of the run that is drawn beside it. */
  beside: string | null;
  /** Key of the alert that is shown open. */
  alert: string | null;
  /** Of a page that is not of a run: what stands behind its name, and behind the question mark. */
  of: string;
  query: string;
}

const nowhere = {
  run: null, signal: null, layer: null, head: null, row: null, step: null, from: null, to: null,
  beside: null, alert: null, of: '', query: '',
};

/** The address of a run, of nothing special in it. */
export function routeOf(run: string): Route {
  return { ...nowhere, page: 'run', run };
}

function whole(text: string | null): number | null {
  return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
}

/**
 * #/run/NAME?signal=...&layer=...&head=...&row=...&step=...&from=...&to=...&beside=...&alert=...,
 * #/alerts?firing=0&unacknowledged=1&severity=..., #/status, #/runbook/NAME?run=...,
 * #/glossary/TERM; else the list of
 * runs, #/?name=...&firing=1&sort=...&down=1.
 */
export function parseRoute(hash: string): Route {
  const match = /^#\/run\/([^?]+)(?:\?(.*))?$/.exec(hash);
  if (!match) {
    const [, name, of, rest] = /^#\/(?:(alerts|status|runbook|glossary)(?:\/([^?]*))?)?(?:\?(.*))?$/.exec(hash) ?? [];
    return { ...nowhere, page: name === undefined ? 'runs' : name as PageName, of: of ?? '', query: rest ?? '' };
  }
  const query = new URLSearchParams(match[2] ?? '');
  let run = match[1];
  try {
    run = decodeURIComponent(run);
  } catch {
    // A stray % names a run that does not exist, which the page will say.
  }
  return {
    page: 'run', run, signal: query.get('signal'),
    layer: whole(query.get('layer')), head: whole(query.get('head')), step: whole(query.get('step')),
    from: whole(query.get('from')), to: whole(query.get('to')),
    row: query.get('row'), beside: query.get('beside'), alert: query.get('alert'), of: '', query: '',
  };
}

export function formatRoute(route: Route): string {
  if (route.run === null) {
    const path = [route.page === 'runs' ? '' : route.page, route.of].filter((part) => part !== '').join('/');
    return `#/${path}${route.query ? `?${route.query}` : ''}`;
  }
  const query = new URLSearchParams();
  if (route.signal !== null) query.set('signal', route.signal);
  for (const key of ['layer', 'head', 'step', 'from', 'to'] as const) {
    const value = route[key];
    if (value !== null) query.set(key, String(value));
  }
  for (const key of ['row', 'beside', 'alert'] as const) {
    const value = route[key];
    if (value !== null) query.set(key, value);
  }
  const text = query.toString();
  return `#/run/${encodeURIComponent(route.run)}${text ? `?${text}` : ''}`;
}
