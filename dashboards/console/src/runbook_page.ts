// A runbook, as the documents have it: so much of Markdown as runbooks are written in.
import texts from 'runbooks';
import { h, tableHead } from './dom';
import { formatRoute, routeOf } from './route';

/** `code`, **bold** and links, of which the words are kept: documents lie elsewhere. */
function inline(text: string): (string | HTMLElement)[] {
  const words = text.replace(/\[([^\]]+)\]\([^)]*\)/g, '$1');
  return words.split(/(`[^`]+`|\*\*.+?\*\*)/).filter((part) => part !== '').map((part) => {
    if (part.startsWith('`')) return h('code', {}, part.slice(1, -1));
    return part.startsWith('**') ? h('strong', {}, ...inline(part.slice(2, -2))) : part;
  });
}

function table(lines: string[]): HTMLElement {
  const cells = (line: string) => line.replace(/^\||\|\s*$/g, '').split(' | ').map((cell) => cell.trim());
  const rows = lines.slice(2).map((line) => h('tr', {}, ...cells(line).map((cell) => h('td', {}, ...inline(cell)))));
  return h('div', { class: 'scroll', role: 'group', tabindex: 0, 'aria-label': 'Table' },
    h('table', {}, tableHead(cells(lines[0])), h('tbody', {}, ...rows)));
}

function block(lines: string[]): HTMLElement {
  const [first] = lines;
  if (first.startsWith('```')) {
    return h('pre', { tabindex: 0 }, h('code', {}, lines.slice(1, lines[lines.length - 1] === '```' ? -1 : undefined).join('\n')));
  }
  if (first.startsWith('|')) return table(lines);
  if (/^([-*]|\d+\.) /.test(first)) {
    const items = lines.join('\n').split(/^(?:[-*]|\d+\.) /m).slice(1);
    return h(/^\d/.test(first) ? 'ol' : 'ul', {}, ...items.map((item) => h('li', {}, ...inline(item.replace(/\s+/g, ' ')))));
  }
  return h('p', {}, ...inline(lines.join(' ')));
}

/** Its blocks: a heading, a fence, a table, a list or a paragraph each. */
function blocks(text: string): HTMLElement[] {
  const found: HTMLElement[] = [];
  let held: string[] = [];
  const close = () => {
    if (held.length > 0) found.push(block(held));
    held = [];
  };
  const kind = (line: string) => (line.startsWith('|') ? '|' : /^([-*]|\d+\.) /.test(line) ? '-' : /^\s/.test(line) ? '' : 'p');
  for (const line of text.split('\n')) {
    const inFence = held[0]?.startsWith('```') ?? false;
    const heading = inFence ? null : /^(#+) (.*)$/.exec(line);
    if (heading) {
      close();
      found.push(h(heading[1].length === 1 ? 'h1' : 'h2', {}, heading[2]));
    } else if (inFence) {
      held.push(line);
      if (line === '```') close();
    } else if (line.trim() === '') {
      close();
    } else {
      if (line.startsWith('```') || (held.length > 0 && kind(line) !== '' && kind(line) !== kind(held[0]))) close();
      held.push(line);
    }
  }
  close();
  return found;
}

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
