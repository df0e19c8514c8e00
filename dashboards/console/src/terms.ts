// An (i) beside a word: its meaning in two sentences, and the way to the glossary. By mouse, touch and keyboard.
import entries from 'glossary';
import { h } from './dom';
import { inline } from './markdown';

/** What is open, if anything is, and the button that opened it. */
let open: { box: HTMLElement; button: HTMLElement; name: string } | null = null;

function close(givesFocus: boolean): void {
  if (!open) return;
  const { box, button, name } = open;
  open = null;
  box.remove();
  // Drawn anew meanwhile, the button is another element of the same name.
  const now = button.isConnected ? button : document.querySelector<HTMLElement>(`[data-focus="${CSS.escape(name)}"]`);
  if (givesFocus) now?.focus({ preventScroll: true });
}

/** Below the button, or above it where there is no room, and inside the window. */
function place(box: HTMLElement, button: HTMLElement): void {
  const [at, margin] = [button.getBoundingClientRect(), 8];
  const left = Math.min(at.left, document.documentElement.clientWidth - box.offsetWidth - margin);
  const below = at.bottom + 6;
  const isRoom = below + box.offsetHeight <= window.innerHeight - margin;
  box.style.left = `${Math.max(margin, left) + window.scrollX}px`;
  box.style.top = `${(isRoom ? below : Math.max(margin, at.top - box.offsetHeight - 6)) + window.scrollY}px`;
}

function show(button: HTMLElement, name: string, title: string, text: string, anchor: string): void {
  const isSame = open?.name === name;
  close(false);
  if (isSame) return button.focus();
  const more = anchor === '' ? null : h('a', { href: `#/glossary/${anchor}` }, 'Glossary');
  const box = h('div', { class: 'term-box', role: 'dialog', 'aria-label': title, tabindex: -1 },
    h('strong', {}, title), h('p', {}, ...inline(text)),
    h('div', { class: 'buttons' }, more, h('button', { class: 'quiet', onclick: () => close(true) }, 'Close')));
  document.body.append(box);
  open = { box, button, name };
  place(box, button);
  box.focus({ preventScroll: true });
}

/** `place`: where it stands, so that two of the same word on a page are told apart. */
function button(name: string, title: string, text: string, anchor: string): HTMLElement {
  const focus = `term ${name}`;
  return h('button', {
    class: 'term', type: 'button', 'aria-label': `What is “${title}”?`, 'aria-haspopup': 'dialog', 'data-focus': focus,
    onclick: (event) => {
      event.stopPropagation();  // A row or a summary around it stays as it is.
      event.preventDefault();
      show(event.currentTarget as HTMLElement, focus, title, text, anchor);
    },
  });
}

/** Of the glossary. `where` tells apart two of the same word on a page. */
export function term(anchor: string, where = ''): HTMLElement {
  const { title, text } = entries[anchor];
  return button(`${anchor} ${where}`, title, text, anchor);
}

/** With words of its own; `anchor` '' = the glossary has nothing more. */
export function info(title: string, text: string, anchor: string, where = ''): HTMLElement {
  return button(`${title} ${where}`, title, text, anchor);
}

/** All (i) of a group, in their order; not those of a group inside it. */
function ofGroup(group: Element): HTMLElement[] {
  return [...group.querySelectorAll<HTMLElement>('button.term')].filter((each) => each.closest('[data-terms]') === group);
}

/** Makes all (i) in `group` one stop of Tab, the first of them: what can be pressed is not behind each word. */
export function oneStop<T extends Element>(group: T): T {
  group.setAttribute('data-terms', '');
  ofGroup(group).forEach((each, i) => each.setAttribute('tabindex', i === 0 ? '0' : '-1'));
  return group;
}

/** From an (i) to another of its group; null = the key does not lead on. */
function stepFrom(at: HTMLElement, key: string): HTMLElement | null {
  const group = at.closest('[data-terms]');
  const all = group ? ofGroup(group).filter((each) => each.checkVisibility()) : [];
  const i = all.indexOf(at);
  const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: all.length - 1 }[key];
  return to === undefined ? null : all[Math.max(0, Math.min(all.length - 1, to))] ?? null;
}

/** Leads by arrows from one to the next. Closes by Escape, by a press elsewhere, and when another page is shown. */
export function watchTerms(): void {
  document.addEventListener('keydown', (event) => {
    const { target, key, ctrlKey, metaKey, altKey } = event;
    if (!(target instanceof HTMLElement) || !target.matches('button.term') || ctrlKey || metaKey || altKey) return;
    const next = stepFrom(target, key);
    if (!next) return;
    next.focus();
    event.preventDefault();
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && open) {
      close(true);
      event.stopPropagation();
    }
  }, true);
  document.addEventListener('pointerdown', ({ target }) => {
    if (open && target instanceof Node && !open.box.contains(target) && !open.button.contains(target)) close(false);
  });
  addEventListener('hashchange', () => close(false));
  addEventListener('resize', () => close(false));
}
