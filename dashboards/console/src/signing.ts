// Under whose name something is done: asked for once, before what it signs, and kept by this browser.
import { h } from './dom';
import { sayWho, whoName } from './who';

export class Signing {
  /** The question. It stands before what asks, so that readers of screens and the eye meet it first. */
  readonly element = h('div', { class: 'asking', hidden: true });

  /** `id`: of the field; a page may have several. */
  constructor(private readonly id: string) {}

  /** Does it at once where the name is known, else when it is given. `what`: in words, on the button. */
  sign(what: string, act: () => void): void {
    if (whoName() !== '') return act();
    const from = document.activeElement as HTMLElement | null;
    const name = h('input', { id: this.id, type: 'text', maxlength: 64, required: true, autocomplete: 'name' });
    const close = () => {
      this.element.hidden = true;
      // Drawn anew meanwhile, what asked is another element of the same name.
      const focus = from?.dataset['focus'];
      const now = from?.isConnected || !focus ? from : document.querySelector<HTMLElement>(`[data-focus="${CSS.escape(focus)}"]`);
      now?.focus();
    };
    const submit = (event: Event) => {
      event.preventDefault();
      if (name.value.trim() === '') return;
      sayWho(name.value);
      close();
      act();
    };
    this.element.replaceChildren(h('form', {
      class: 'buttons', onsubmit: submit, onkeydown: (event) => (event as KeyboardEvent).key === 'Escape' && close(),
    },
    h('label', { for: this.id }, 'Say who you are first: the audit keeps it.'), name,
    h('button', { type: 'submit', class: 'primary' }, what),
    h('button', { type: 'button', onclick: close }, 'Cancel')));
    this.element.hidden = false;
    name.focus();
  }
}
