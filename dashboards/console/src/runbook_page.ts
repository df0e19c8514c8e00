// A runbook, as the documents have it.
import texts from 'runbooks';
import { h } from './dom';
import { blocks } from './markdown';
import { formatRoute, routeOf } from './route';

export class RunbookPage {
  readonly element: HTMLElement;

  /** `run`: whose name stands in its commands. */
  constructor(name: string, run: string | null) {
    const text = Object.hasOwn(texts, name) ? texts[name] : `# No such runbook\n\nThe page has no runbook of the name ${name}.`;
    const named = run === null ? text : text.replace(/\bRUN\b/g, () => (/^[\w./:-]+$/.test(run) ? run : `'${run.replace(/'/g, "'\\''")}'`));
    const back = run === null ? null : h('p', {}, h('a', { href: formatRoute(routeOf(run)) }, `Back to ${run}`));
    this.element = h('main', { class: 'page runbook' }, ...blocks(named), back);
  }

  async refresh(): Promise<void> {
    // A text that does not change.
  }

  fail(): void {
    // It is there whether the server is or not.
  }
}
