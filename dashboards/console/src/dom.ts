// Elements without a framework; text is always text, never markup.

type Child = Node | string | null | undefined | false;
type Props = Record<string, string | number | boolean | ((event: Event) => void) | undefined>;

/** An element. Functions become listeners (`onclick`), `true` an empty attribute, `false` none. */
export function h<K extends keyof HTMLElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === 'function') element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value !== undefined) element.setAttribute(name, String(value));
  }
  append(element, children);
  return element;
}

export function append(parent: Node, children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    parent.appendChild(typeof child === 'string' ? document.createTextNode(child) : child);
  }
}

/** Replaces what `parent` holds. */
export function fill(parent: Element, ...children: Child[]): void {
  parent.replaceChildren();
  append(parent, children);
}

/** A table's head; the titles from `right` on stand at the right. A title is a word, or a word and what explains it. */
export function tableHead(titles: (string | [word: string, about: HTMLElement])[], right = titles.length): HTMLElement {
  const cells = titles.map((title, i) =>
    h('th', { scope: 'col', class: i >= right ? 'right' : '' }, ...(typeof title === 'string' ? [title] : title)));
  return h('thead', {}, h('tr', {}, ...cells));
}

/** "Label: text", the label bold; nothing without a text. */
export function labelled(label: string, text: string, kind = 'advice'): HTMLElement | null {
  return text ? h('p', { class: kind }, h('strong', {}, `${label}: `), text) : null;
}

/** Details that stay open or closed as the user left them, however often they are drawn anew. */
export class Openings {
  private readonly chosen = new Map<string, boolean>();

  details(key: string, open: boolean, props: Props, ...children: Child[]): HTMLDetailsElement {
    const element = h('details', { ...props, open: this.chosen.get(key) ?? open }, ...children);
    element.addEventListener('toggle', () => this.chosen.set(key, element.open));
    // That comes later, when it may have been drawn anew, as it was before the click.
    element.addEventListener('click', ({ target }) => {
      if (target instanceof Element && target.closest('summary')?.parentElement === element) this.chosen.set(key, !element.open);
    });
    return element;
  }
}

/** Puts `child` into `place`, unless what stands there is the same already: then focus, selection and readers of screens stay. */
export function replaceIfOther(place: HTMLElement, child: HTMLElement): void {
  if (place.childElementCount === 1 && place.firstElementChild?.isEqualNode(child)) return;
  const focus = focusIn(place);
  fill(place, child);
  focus();
}

/**
 * Remembers what has the focus in `place`; the result gives it back after `place` was drawn anew. Where it is gone, as a
 * button is that was pressed, what held it (data-home) has the focus: at its summary, or itself.
 */
export function focusIn(place: HTMLElement): () => void {
  const element = document.activeElement as HTMLElement | null;
  if (!element || !place.contains(element)) return () => undefined;
  const name = element.dataset['focus'];
  const home = element.closest<HTMLElement>('[data-home]')?.dataset['home'];
  const named = (kind: string, value: string | undefined) =>
    (value ? place.querySelector<HTMLElement>(`[data-${kind}="${CSS.escape(value)}"]`) : null);
  return () => {
    const again = named('home', home);
    const now = place.contains(element) ? element : named('focus', name) ?? again?.querySelector<HTMLElement>(':scope > summary') ?? again;
    now?.focus({ preventScroll: true });
  };
}

/** Waits for the server's answer; `place` shows a refusal, or nothing. Returns why it was refused, or null. */
export async function showRefusal(place: HTMLElement, call: Promise<unknown>): Promise<unknown> {
  try {
    await call;
    place.hidden = true;
    return null;
  } catch (error) {
    place.hidden = false;
    fill(place, `Refused: ${(error as Error).message}`);
    return error;
  }
}

/** Value of a CSS custom property as the theme has it now. */
export function themeColor(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
