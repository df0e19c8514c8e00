// For how long an alert is silenced: notifications stop, the alert stays.
import { num } from './api';
import { h } from './dom';
import { duration } from './format';
import type { Alert } from './wire';

const spans = [[0, 'Silence for…'], [3600, '1 hour'], [28800, '8 hours'], [86400, '1 day'], [604800, '1 week']] as const;

/** Words while it is silenced; null = it is not. */
export function silencedWords(alert: Alert): string | null {
  const left = num(alert.silenced_until_unix_ns) / 1e9 - Date.now() / 1000;
  return left > 0 ? `silenced for another ${duration(left)}` : null;
}

/** A list of spans, or how long it is silenced still. */
export function silencer(alert: Alert, label: string, silence: (seconds: number) => void): HTMLElement {
  const words = silencedWords(alert);
  if (words !== null) return h('span', { class: 'muted' }, words);
  const chosen = () => {
    const seconds = Number(picker.value);
    picker.value = '0';  // Until it is done: a name may be asked for first, and not be given.
    if (seconds > 0) silence(seconds);
  };
  const picker = h('select', { 'aria-label': label, 'data-focus': label, onchange: chosen },
    ...spans.map(([seconds, name]) => h('option', { value: seconds }, name)));
  return picker;
}
