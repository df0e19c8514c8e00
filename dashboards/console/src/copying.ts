// A line to paste, with a button that copies it.
import { h } from './dom';

/** Without TLS on another machine the browser gives no clipboard: what is marked is copied then. */
async function copy(text: string, from: HTMLElement): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(from);
    return document.execCommand('copy');
  }
}

export function pasteLine(text: string): HTMLElement {
  const code = h('code', {}, text);
  const button = h('button', { 'aria-label': `Copy: ${text}` }, 'Copy');
  button.addEventListener('click', () => void copy(text, code).then((done) => {
    button.textContent = done ? 'Copied' : 'Marked: copy it by Ctrl+C';
    setTimeout(() => (button.textContent = 'Copy'), 2000);
  }));
  return h('div', { class: 'paste' }, h('pre', { tabindex: 0 }, code), button);
}
