// For how long an alert is silenced: notifications stop, the alert stays.
import { num } from './api';
import { type Openings, h } from './dom';
import { duration } from './format';
import type { Alert } from './wire';

const spans = [[3600, '1 hour'], [28800, '8 hours'], [86400, '1 day'], [604800, '1 week']] as const;

/** Words while it is silenced; null = it is not. */
export function silencedWords(alert: Alert): string | null {
  const left = num(alert.silenced_until_unix_ns) / 1e9 - Date.now() / 1000;
  return left > 0 ? `silenced for another ${duration(left)}` : null;
}

/** A menu of spans, or how long it is silenced still. */
export function silencer(alert: Alert, mayAct: boolean, openings: Openings, silence: (seconds: number) => void): HTMLElement | null {
  const name = `silence ${alert.last.key}`;
  const words = silencedWords(alert);
  if (words !== null) return h('span', { class: 'muted' }, words);
  if (!mayAct) return null;
  const close = () => {
    menu.open = false;
    opener.focus();
  };
  const opener = h('summary', { 'data-focus': name }, 'Silence for…');
  const menu = openings.details(name, false, {
    class: 'spans', onkeydown: (event) => (event as KeyboardEvent).key === 'Escape' && close(),
  }, opener, ...spans.map(([seconds, span]) => h('button', {
    'data-focus': `${name} ${seconds}`, 'aria-label': `Silence for ${span}`, onclick: () => {
      close();  // Also where it is not done: a name may be asked for first, and not be given.
      silence(seconds);
    },
  }, span)));
  return menu;
}
