// Actions in words: the same in the verdict, in the list and in the audit.
import { num } from './api';
import { clock, duration, integer, number } from './format';
import type { Action, ActionChange } from './wire';

/** As notifications call them (a test compares). */
const words: Record<string, string> = {
  ATTENTION_MODE: 'switch the attention mode', CENTER_K: 'centre the keys', QK_CLIP: 'clip W_Q and W_K',
  LR_SCALE: 'scale the learning rate',
  CHECKPOINT_NOW: 'save a checkpoint', BATCH_SKIP: 'skip batches', SAMPLING_DEEPEN: 'sample more often', STOP: 'stop the training',
  ROLLBACK_SUGGEST: 'go back to a checkpoint',
};

/** A name of the wire without its prefix. */
export function plain(name: string, prefix: string): string {
  return name.replace(prefix, '');
}

export function stateOf(state: string): string {
  return plain(state, 'ACTION_STATE_').toLowerCase().replace(/_/g, ' ');
}

/** "centre the keys", "take back: switch the attention mode to hp". */
export function actionTitle(action: Action): string {
  const kind = plain(action.kind, 'ACTION_KIND_');
  const value = num(action.value);
  let how = value !== 0 ? ` (${number(value)})` : '';
  if (kind === 'ATTENTION_MODE') how = ` to ${action.mode}`;
  if (kind === 'ROLLBACK_SUGGEST') how = ' (advice)';
  if (kind === 'CENTER_K') how = value === 0 ? ' no more' : '';
  return `${action.undoes ? 'take back: ' : ''}${words[kind] ?? kind}${how}`;
}

export function scopeOf(action: Action): string {
  const heads = action.scope?.heads ?? [];
  const layers = action.scope?.layers ?? [];
  if (heads.length > 0) return heads.map((c) => `L${c.layer} H${c.head}`).join(', ');
  return layers.length > 0 ? `layer ${layers.join(', ')}` : 'all layers';
}

/** "expires in 55 min, at 21:40", of what waits; '' where it does not. */
export function expiryWords(action: Action): string {
  const at = num(action.expires_unix_ns) / 1e6;
  if (stateOf(action.state) !== 'proposed' || at <= Date.now()) return '';
  return `expires in ${duration((at - Date.now()) / 1000)}, at ${clock(at)}`;
}

export function isApplied(change: ActionChange): boolean {
  return change.state === 'ACTION_STATE_APPLIED';
}

/** What waits for a person about an alert: what was proposed for it, else what was proposed for none. */
export function waiting(actions: Action[], key: string): Action | undefined {
  const proposed = actions.filter((action) => action.state === 'ACTION_STATE_PROPOSED');
  return proposed.find((action) => action.alert_key === key) ?? proposed.find((action) => action.alert_key === '');
}

/** Why what is proposed cannot be approved; '' = it can. */
export function notAllowedWords(action: Action): string {
  return action.not_allowed ? `Cannot be approved: ${actionTitle(action)}, ${scopeOf(action)}: ${action.not_allowed}.` : '';
}

function newestIn(states: string[], actions: Action[], key: string): Action | undefined {
  const isOf = ({ state, alert_key }: Action) => states.includes(stateOf(state)) && (alert_key === key || alert_key === '');
  return actions.filter(isOf).pop();
}

/** The newest action about an alert that a person or the policy approved and that the trainer has not answered. */
export function underWay(actions: Action[], key: string): Action | undefined {
  return newestIn(['approved', 'sent'], actions, key);
}

/** "Approved by kim, 01:09: centre the keys, layer 1. The trainer applies it between two steps." */
export function underWayWords(action: Action): string {
  const approved = action.history.find((change) => stateOf(change.state) === 'approved');
  const who = approved?.by ? ` by ${approved.by}` : '';
  const when = approved ? `, ${clock(num(approved.time_unix_ns) / 1e6)}` : '';
  const isSent = stateOf(action.state) === 'sent';
  const waits = isSent ? 'The trainer has it, and answers after its next step.' : 'The trainer is handed it next.';
  return `Approved${who}${when}: ${actionTitle(action)}, ${scopeOf(action)}. ${waits}`;
}

/** "centre the keys (layer 1): applied at step 3,720", of what was done last about an alert that began at a step; null = nothing was. */
export function repairWords(actions: Action[], key: string, begin: number): string | null {
  const isOf = ({ alert_key, history }: Action) =>
    history.some((change) => isApplied(change) && (alert_key === key || (alert_key === '' && num(change.step) >= begin)));
  const done = actions.filter(isOf);
  const last = done[done.length - 1];
  if (!last) return null;
  const change = last.history[last.history.length - 1];
  return `${actionTitle(last)} (${scopeOf(last)}): ${stateOf(change.state)} at step ${integer(num(change.step))}`;
}
