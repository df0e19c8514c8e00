// Who looks at the page, as far as the server knows, and what the page offers him: what he may not do is not
// there to be clicked, and why is said once a panel. The server refuses it all the same.
import type { Caller, ServerInfo } from './wire';

/** Until the server has told, as one that asks nobody: everything is offered. */
export let caller: Caller = { name: '', may_act: true, may_admin: true };

/** Takes what the server told; whether that is something else than before. */
export function learn(info: ServerInfo): boolean {
  const before = JSON.stringify(caller);
  caller = info.caller ?? caller;
  return JSON.stringify(caller) !== before;
}

/** Who, with his roles: "alice (reads)". "" = nobody in particular. */
export function callerWords(): string {
  const roles = caller.may_admin ? 'may do everything' : caller.may_act ? 'reads and acts' : 'reads';
  return caller.name === '' ? '' : `${caller.name} (${roles})`;
}

/** Why there are no buttons; "" where there are. */
export function whyNot(what: string): string {
  if (caller.may_act) return '';
  return `${caller.name === '' ? 'Who asks here' : `You are ${caller.name}, who`} may read. To ${what} takes the role act.`;
}
