// So much of Markdown as runbooks and the glossary are written in.
import entries from 'glossary';
import texts from 'runbooks';
import { h, tableHead } from './dom';

/** Where a link of a document leads inside the page; null = elsewhere, so that only its words are kept. */
function placeOf(target: string): string | null {
  const [, runbook] = /(?:^|\/)(bellwether[a-z]+)\.md$/.exec(target) ?? [];
  if (runbook !== undefined && Object.hasOwn(texts, runbook)) return `#/runbook/${runbook}`;
  const [, term] = /^(?:.*glossary\.md)?#([\w-]+)$/.exec(target) ?? [];
  return term !== undefined && Object.hasOwn(entries, term) ? `#/glossary/${term}` : null;
}

function link(text: string, target: string): string | HTMLElement {
  const place = placeOf(target);
  return place === null ? text : h('a', { href: place }, text);
}

/** `code`, **bold** and links. */
export function inline(text: string): (string | HTMLElement)[] {
  return text.split(/(`[^`]+`|\*\*.+?\*\*|\[[^\]]+\]\([^)]*\))/).filter((part) => part !== '').map((part) => {
    if (part.startsWith('`')) return h('code', {}, part.slice(1, -1));
    const [, words, target] = /^\[([^\]]+)\]\(([^)]*)\)$/.exec(part) ?? [];
    if (words !== undefined) return link(words, target);
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
export function blocks(text: string): HTMLElement[] {
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
