// All words of the glossary; the one that was asked for comes into view and has the focus.
import entries from 'glossary';
import { h } from './dom';
import { inline } from './markdown';

export class GlossaryPage {
  readonly element: HTMLElement;
  private readonly missing = h('p', { class: 'state', hidden: true });

  /** `term`: its anchor; '' = none. */
  constructor(private term: string) {
    const entry = ([anchor, { title, text, more }]: [string, { title: string; text: string; more: string }]) => [
      h('dt', { id: `term-${anchor}`, tabindex: -1 }, title),
      h('dd', {}, h('p', {}, ...inline(text)),
        more === '' ? null : h('p', { class: 'muted small' }, 'More in the documents: ', ...inline(more))),
    ];
    this.element = h('main', { class: 'page runbook' },
      h('h1', {}, 'Glossary'), this.missing, h('dl', { class: 'glossary' }, ...Object.entries(entries).flatMap(entry)));
  }

  /** The address changed. */
  navigate(term: string): void {
    this.term = term;
    this.show();
  }

  /** Once it is in the document. */
  show(): void {
    const isKnown = Object.hasOwn(entries, this.term);
    this.missing.hidden = this.term === '' || isKnown;
    this.missing.textContent = `The glossary has no word “${this.term}”.`;
    if (!isKnown) return;
    const title = this.element.querySelector<HTMLElement>(`#term-${CSS.escape(this.term)}`);
    title?.scrollIntoView({ block: 'start' });
    title?.focus({ preventScroll: true });
  }

  async refresh(): Promise<void> {
    // A text that does not change.
  }

  fail(): void {
    // It is there whether the server is or not.
  }
}
