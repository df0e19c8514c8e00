// What a person may change of a run: its name, and whether it is kept.
import { api } from './api';
import { caller } from './caller';
import { fill, focusIn, h, showRefusal } from './dom';
import { formatRoute, parseRoute } from './route';
import type { Run } from './wire';

export class RunChanges {
  readonly element = h('details', { class: 'changes' });
  private readonly name = h('input', { id: 'run-name', type: 'text', maxLength: 128, autocomplete: 'off', required: true });
  private readonly trouble = h('p', { class: 'state refused', role: 'alert', hidden: true });
  private readonly ways = h('div', { class: 'buttons' });
  private drawn = '';
  private asked = false;  // Whether it may be deleted: the next press does it.
  private run: Run | null = null;

  constructor() {
    const label = h('label', { for: 'run-name' }, 'Name ');
    const form = h('form', { class: 'buttons', onsubmit: (event: Event) => void this.rename(event) },
      label, this.name, h('button', {}, 'Rename'));
    fill(this.element, h('summary', { class: 'muted' }, 'Rename or delete'), form, this.ways, this.trouble);
    this.element.addEventListener('toggle', () => this.ask(false));
  }

  show(run: Run): void {
    this.element.hidden = !caller.may_act;
    const state = `${run.description.name} ${run.ended} ${caller.may_admin}`;
    if (state === this.drawn) return;
    this.drawn = state;
    this.run = run;
    this.name.value = run.description.name;
    this.ask(false);
  }

  private ask(asked: boolean): void {
    const { run } = this;
    if (!run) return;
    this.asked = asked;
    const focus = focusIn(this.ways);
    const words = asked ? `Delete ${run.description.name} for good` : 'Delete this run';
    const press = () => (this.asked ? void this.delete(run.description.name) : this.ask(true));
    fill(this.ways,
      h('button', { 'data-focus': 'delete', disabled: !run.ended || !caller.may_admin, onclick: press }, words),
      asked ? h('button', { onclick: () => this.ask(false) }, 'Keep it') : null,
      h('span', { class: 'muted small' }, this.deletionWords(run)));
    focus();
  }

  private deletionWords(run: Run): string {
    if (!run.ended) return 'A run can be deleted once it has ended.';
    if (!caller.may_admin) return 'To delete a run takes the role admin.';
    return 'Series, alerts and actions go with it. Export it before if it may be wanted.';
  }

  private async rename(event: Event): Promise<void> {
    event.preventDefault();
    const before = this.run?.description.name;
    const name = this.name.value.trim();
    if (before === undefined || name === before) return;
    await showRefusal(this.trouble, api.rename(before, name).then(() => {
      location.hash = formatRoute({ ...parseRoute(location.hash), run: name });
    }));
  }

  private async delete(name: string): Promise<void> {
    await showRefusal(this.trouble, api.deleteRun(name).then(() => {
      location.hash = '#/';
    }));
  }
}
