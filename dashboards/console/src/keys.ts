// Keys that are the same on each page, and what they do.
import { h, tableHead } from './dom';

/** True where a key is typed, or chooses in a list, rather than pressed. */
export function isTyped({ target, key, ctrlKey, metaKey, altKey }: KeyboardEvent): boolean {
  const place = target instanceof HTMLElement ? target : null;
  const takesText = place?.matches('textarea, input:not([type=checkbox]):not([type=range])') || (place?.matches('select') && key !== '?');
  return Boolean(takesText) || ctrlKey || metaKey || altKey;
}

/** j and k: from row to row of a list, by the link that each has. Returns whether it was one of them. */
export function stepRows(body: HTMLElement, key: string): boolean {
  if (key !== 'j' && key !== 'k') return false;
  const links = [...body.querySelectorAll<HTMLElement>('a.row')];
  const at = links.findIndex((link) => link.closest('tr')?.contains(document.activeElement));
  const next = at < 0 ? 0 : Math.min(links.length - 1, Math.max(0, at + (key === 'j' ? 1 : -1)));
  links[next]?.focus();
  links[next]?.scrollIntoView({ block: 'nearest' });
  return true;
}

const help: [keys: string, what: string][] = [
  ['j, k', 'the next row of a list, the one before it'], ['Enter', 'open it'], ['a', 'acknowledge the alert of the row'],
  ['d', 'in a run: to what can be done first; Enter presses it'],
  ['Tab', 'everything that can be pressed'],
  ['Arrows, Home, End', 'in a map, from cell to cell; Enter shows the cell. On an (i), to the next one'],
  ['?', 'these keys'],
  ['Escape', 'close what asks'],
];

/** The keys, in a window of their own. */
export function keyHelp(): HTMLDialogElement {
  const rows = help.map(([keys, what]) => h('tr', {}, h('td', {}, h('kbd', {}, keys)), h('td', {}, what)));
  const dialog = h('dialog', { 'aria-labelledby': 'key-help' },
    h('h2', { id: 'key-help' }, 'Keys'), h('table', {}, tableHead(['Key', 'What it does']), h('tbody', {}, ...rows)),
    h('button', { onclick: () => dialog.close() }, 'Close'));
  return dialog;
}
