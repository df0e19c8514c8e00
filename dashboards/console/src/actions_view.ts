// What was done about the run's alerts, what waits for a person, and on whose word.
import { actionTitle, expiryWords, plain, scopeOf, stateOf } from './action_words';
import { ApiError, Decision, api, num } from './api';
import { caller, whyNot } from './caller';
import { Openings, fill, h, labelled, showRefusal, tableHead } from './dom';
import { ago, counted, integer } from './format';
import { oneStop, term } from './terms';
import { onWho, sayWho, whoName } from './who';
import type { Action, ActionChange, AuditEntry, Policy } from './wire';

// What a person can take back: the rest has happened.
const undoable = new Set(['ATTENTION_MODE', 'CENTER_K', 'LR_SCALE', 'SAMPLING_DEEPEN']);
const policies: Record<string, string> = {
  observe: 'Policy: observe. Nothing is done unless a person asks for it.',
  propose: 'Policy: propose. What an alert calls for waits here for a person.',
  enforce: 'Policy: enforce. What an alert calls for is done at once.',
};
const shownMax = 50;
const moods: Record<string, string> = {
  proposed: 'sev-warning', approved: 'sev-info', sent: 'sev-info', applied: 'sev-info', helped: 'sev-resolved', kept: 'sev-resolved',
  refused: 'sev-critical', expired: 'stage-ended', 'did not help': 'sev-critical', undone: 'stage-ended', escalated: 'sev-warning',
};

function summary(action: Action): HTMLElement {
  const state = stateOf(action.state);
  return h('summary', {},
    h('span', { class: `badge ${moods[state] ?? ''}` }, state),
    h('span', { class: 'alert-summary' }, `${actionTitle(action)} · ${scopeOf(action)}`),
    h('span', { class: 'muted small' }, action.id));
}

function changeItem(change: ActionChange): HTMLElement {
  const reason = change.reason ? `: ${change.reason}` : '';
  return h('li', {},
    h('strong', {}, stateOf(change.state)), ` at step ${integer(num(change.step))} by ${change.by}${reason} `,
    h('span', { class: 'muted small' }, ago(num(change.time_unix_ns))));
}

function auditRow(entry: AuditEntry): HTMLElement {
  return h('tr', {},
    h('td', {}, ago(num(entry.time_unix_ns))),
    h('td', {}, entry.by),
    h('td', {}, `${entry.what.replace(/_/g, ' ')} ${entry.action_id}`),
    h('td', {}, entry.refused ? `refused: ${entry.refused}` : 'done'));
}

/** The newest first, as many as are shown. */
function newest<T>(all: T[]): T[] {
  return [...all].reverse().slice(0, shownMax);
}

export class ActionsView {
  readonly element = h('section', { class: 'panel alerts', 'aria-label': 'Actions', hidden: true });
  private readonly name = h('input', {
    id: 'who', type: 'text', maxlength: 64, value: whoName(), autocomplete: 'name', onchange: () => sayWho(this.name.value),
  });
  private readonly as = h('span', {}, h('label', { for: 'who', class: 'muted small' }, 'Decide as '), this.name);
  private readonly why = h('p', { class: 'muted', hidden: true });
  private readonly trouble = h('p', { class: 'state error', role: 'alert', hidden: true });
  private readonly policy = h('span');
  private readonly list = h('div');
  private readonly audit = h('div');
  private readonly openings = new Openings();

  constructor(private readonly changed: () => void) {
    const head = h('div', { class: 'panel-head' }, h('h2', {}, 'Actions', term('action', 'panel')), this.as);
    const policy = h('p', { class: 'muted' }, this.policy, term('policy', 'panel'),
      ' What an action has changed is judged in a trial.', term('trial', 'panel'));
    this.element.append(oneStop(h('div', {}, head, policy)), this.why, this.trouble, this.list, this.audit);
    onWho(() => (this.name.value = whoName()));
  }

  draw(run: string, ended: boolean, actions: Action[], audit: AuditEntry[], policy: Policy): void {
    this.element.hidden = false;
    // A caller that the server knows by name is not asked for one.
    this.as.hidden = caller.name !== '' || !caller.may_act;
    this.why.textContent = whyNot('approve, reject or undo');
    this.why.hidden = this.why.textContent === '';
    this.policy.textContent = policies[plain(policy.mode, 'MODE_').toLowerCase()] ?? '';
    fill(this.list,
      actions.length === 0 ? h('p', { class: 'state' }, 'Nothing was done so far.') : null,
      ...newest(actions).map((action) => this.card(run, ended, action)));
    fill(this.audit, audit.length === 0 ? null : this.auditDetails(audit));
  }

  private auditDetails(audit: AuditEntry[]): HTMLElement {
    const table = h('table', {}, tableHead(['When', 'Who', 'What', 'Result']), h('tbody', {}, ...newest(audit).map(auditRow)));
    return this.openings.details('audit', false, {},
      h('summary', {}, `Audit: ${counted(audit.length, 'refused request or change of policy', 'refused requests and changes of policy')}`),
      h('div', { class: 'scroll', role: 'group', tabindex: 0, 'aria-label': 'Audit' }, table));
  }

  private card(run: string, ended: boolean, action: Action): HTMLElement {
    // A run that has ended acts no more.
    const waits = action.state === 'ACTION_STATE_PROPOSED' && !ended;
    return this.openings.details(`${action.id} ${waits}`, waits, { class: `alert ${waits ? 'warning' : ''}` },
      summary(action),
      labelled('Expected', action.expected_effect),
      labelled('Cost', action.cost),
      ended ? null : labelled('Waits', expiryWords(action)),
      labelled('Cannot be approved', action.not_allowed),
      action.alert_key ? h('p', { class: 'muted small' }, `For alert ${action.alert_key}`) : null,
      h('ol', { class: 'history' }, ...action.history.map(changeItem)),
      h('div', { class: 'buttons' }, ...this.decisions(action, ended).map((verb) => this.button(verb, run, action))));
  }

  /** What the caller may decide about the action now. */
  private decisions(action: Action, ended: boolean): Decision[] {
    if (ended || !caller.may_act) return [];
    const state = stateOf(action.state);
    if (state === 'proposed') return action.not_allowed ? ['Reject'] : ['Approve', 'Reject'];
    const holds = ['applied', 'helped', 'kept'].includes(state);
    return holds && undoable.has(plain(action.kind, 'ACTION_KIND_')) && !action.undoes ? ['Undo'] : [];
  }

  private button(verb: Decision, run: string, action: Action): HTMLElement {
    const label = `${verb} ${actionTitle(action)}, ${scopeOf(action)}`;
    return h('button', { 'aria-label': label, onclick: () => void this.decide(verb, run, action) }, verb);
  }

  private async decide(verb: Decision, run: string, action: Action): Promise<void> {
    const by = caller.name || this.name.value.trim();
    this.trouble.hidden = by !== '';
    if (by === '') {
      fill(this.trouble, 'Say who you are first: the audit keeps it.');
      this.name.focus();
      return;
    }
    const refusal = await showRefusal(this.trouble, api.decide(verb, run, action.id, by));
    if (refusal instanceof ApiError && refusal.status === 403 && caller.name === '') {
      this.name.focus();  // Another one may decide.
      this.name.select();
    }
    this.changed();
  }
}
