// Under whose name something is done: asked for once, before what it signs, and kept by this browser.
import { ApiError } from './api';
import { caller } from './caller';
import { fill, h } from './dom';
import { sayWho, whoName } from './who';

const asks = 'Say who you are first: the audit keeps it.';

/** What asked has the keyboard again; drawn anew meanwhile, it is another element of the same name. */
function giveBack(from: HTMLElement | null): void {
  const focus = from?.dataset['focus'];
  const now = from?.isConnected || !focus ? from : document.querySelector<HTMLElement>(`[data-focus="${CSS.escape(focus)}"]`);
  now?.focus();
}

export class Signing {
  /** The question, and a refusal. It stands before what asks, so that readers of screens and the eye meet it first. */
  readonly element = h('div', { class: 'asking', hidden: true });

  /** `id`: of the field; a page may have several. `done`: after each answer of the server. */
  constructor(private readonly id: string, private readonly done: () => void) {}

  /** Does it at once where the name is known, else when it is given. `what`: in words, on the button. */
  sign(what: string, call: () => Promise<unknown>): void {
    if (whoName() === '') this.ask(asks, what, () => void this.try(what, call));
    else void this.try(what, call);
  }

  /** Something that asks more before it calls. */
  named(what: string, act: () => void): void {
    if (whoName() === '') this.ask(asks, what, act);
    else act();
  }

  /** "as kim", which asks for another name; null where the server knows it, or none was given. */
  shown(): HTMLElement | null {
    if (caller.name !== '' || !caller.may_act || whoName() === '') return null;
    const ask = () => this.ask('Under which name?', 'Use this name', this.done);
    return h('button', { class: 'as', 'data-focus': `as ${this.id}`, 'aria-label': `As ${whoName()}: change the name`, onclick: ask },
      `as ${whoName()}`);
  }

  /** A refusal is told where the name was asked for; what a name was refused may be tried under another. */
  async try(what: string, call: () => Promise<unknown>): Promise<void> {
    try {
      await call();
      this.element.hidden = true;
    } catch (error) {
      const words = `Refused: ${(error as Error).message}`;
      const isOfName = error instanceof ApiError && error.status === 403 && caller.name === '';
      if (isOfName) this.ask(words, what, () => void this.try(what, call));
      else this.say(words);
    }
    this.done();
  }

  private say(words: string): void {
    const close = h('button', { type: 'button', onclick: () => (this.element.hidden = true) }, 'Close');
    fill(this.element, h('div', { class: 'buttons' }, h('span', { class: 'error', role: 'alert' }, words), close));
    this.element.hidden = false;
    this.element.scrollIntoView({ block: 'nearest' });
  }

  private ask(why: string, what: string, act: () => void): void {
    const from = document.activeElement as HTMLElement | null;
    const name = h('input', {
      id: this.id, type: 'text', maxlength: 64, required: true, autocomplete: 'name', value: whoName(),
    });
    const close = () => {
      this.element.hidden = true;
      giveBack(from);
    };
    const submit = (event: Event) => {
      event.preventDefault();
      if (name.value.trim() === '') return;
      sayWho(name.value);
      close();
      act();
    };
    const isRefusal = why.startsWith('Refused');
    fill(this.element, h('form', {
      class: 'buttons', onsubmit: submit, onkeydown: (event) => (event as KeyboardEvent).key === 'Escape' && close(),
    },
    isRefusal ? h('span', { class: 'error', role: 'alert' }, why) : null,
    h('label', { for: this.id }, isRefusal ? 'Another name' : why), name,
    h('button', { type: 'submit', class: 'primary' }, what),
    h('button', { type: 'button', onclick: close }, 'Cancel')));
    this.element.hidden = false;
    name.focus();
    name.select();
  }
}
