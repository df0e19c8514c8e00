// Who is handed an action, and what the answers mean.

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/act/engine_state.h"
#include "server/model/alert_words.h"

namespace bellwether::server {

std::string ActionEngine::State::WhyNot(ActionKind kind) const {
  const ActionKindInfo& info = *FindActionKind(kind);
  if (ranks.empty()) return "no rank of this attempt has said what it can apply";
  const auto can = [&](const RankAbilities& rank) {
    return (rank.kinds_mask >> static_cast<uint32_t>(kind) & 1u) != 0;
  };
  const auto refusal = [&](uint32_t rank) {
    return absl::StrCat("rank ", rank, " did not allow ", info.name, " or cannot apply it: attach(allow={\"", info.name,
                        "\"})");
  };
  const RankAbilities& lowest = ranks.begin()->second;
  if (lowest.ranks_agree || run.world <= 1) return can(lowest) ? "" : refusal(lowest.rank);
  if (kind == ActionKind::kSamplingDeepen) {
    const bool any = std::any_of(ranks.begin(), ranks.end(), [&](const auto& rank) { return can(rank.second); });
    return any ? "" : refusal(lowest.rank);
  }
  if (run.reporters < run.world) {
    return absl::StrCat(run.reporters, " of ", run.world,
                        " ranks report and they have no process group to agree by: the others would go on without it");
  }
  for (const auto& [number, rank] : ranks) {
    if (!can(rank)) return refusal(number);
  }
  if (!info.holds && run.world > 1) {
    return absl::StrCat(info.name, " cannot be undone: ", run.world,
                        " ranks without a process group could be left with it applied in part");
  }
  return "";
}

bool ActionEngine::State::AbilitiesKnown() const {
  if (ranks.empty()) return false;
  const RankAbilities& lowest = ranks.begin()->second;
  return ranks.size() >= run.reporters || (lowest.rank == 0 && lowest.ranks_agree);
}

std::optional<std::string> ActionEngine::State::NotAllowed(const Action& action) const {
  // Advice is for people, and what was applied may be taken back.
  if (action.kind == ActionKind::kRollbackSuggest || !action.undoes.empty()) return "";
  if (!AbilitiesKnown()) return std::nullopt;
  return Clipped(WhyNot(action.kind), kReasonBytesMax);
}

void ActionEngine::State::SayNotAllowed(const Now& now, Changed* changed) {
  for (Tracked& tracked : actions) {
    if (tracked.action.state != ActionState::kProposed) continue;
    const std::optional<std::string> why = NotAllowed(tracked.action);
    if (!why.has_value() || *why == tracked.action.not_allowed) continue;
    const std::string reason = why->empty() ? "the trainer can apply it now" : *why;
    Move(&tracked, ActionState::kProposed, kServerName, reason, now, changed);
  }
}

int64_t ActionEngine::State::margin_steps() const {
  // Five seconds, and some steps for what is on its way to being closed.
  if (!(step_seconds > 0)) return 100;
  return std::clamp<int64_t>(static_cast<int64_t>(std::ceil(5 / step_seconds)), 8, 5000);
}

void ActionEngine::State::Address(Tracked* tracked, const Now& now, Changed* changed) {
  if (!tracked->on_its_way() || !tracked->recipients.empty()) return;
  if (!AbilitiesKnown()) return;  // Until they have said hello, or it expires.
  const RankAbilities& lowest = ranks.begin()->second;
  Action& action = tracked->action;
  if (const std::string why = WhyNot(action.kind); !why.empty()) {
    return Fail(tracked, ActionState::kRefused, "server", why, false, now, changed);
  }
  std::vector<uint32_t> recipients;
  if (lowest.ranks_agree || run.world <= 1) {
    recipients = {lowest.rank};
  } else {
    for (const auto& [number, rank] : ranks) {
      const bool can = (rank.kinds_mask >> static_cast<uint32_t>(action.kind) & 1u) != 0;
      const std::vector<uint32_t>& only = tracked->only_ranks;
      const bool wanted = only.empty() || std::find(only.begin(), only.end(), number) != only.end();
      if (can && wanted) recipients.push_back(number);
    }
  }
  const bool one_step_for_all = recipients.size() > 1;
  // The newest step may be one of the attempt before, and these ranks elsewhere.
  if (one_step_for_all && !tracked->step_given && !stepped) return;
  action.attempt = run.attempt;
  tracked->recipients = std::move(recipients);
  if (!tracked->step_given) action.apply_at_step = one_step_for_all ? now.step + margin_steps() : 0;
  ++due_version;
  changed->push_back(action);
}

void ActionEngine::State::AddressAll(const Now& now, Changed* changed) {
  // By index: one that is refused may add an undo.
  for (size_t i = 0; i < actions.size(); ++i) Address(&actions[i], now, changed);
}

void ActionEngine::State::Answer(Tracked* tracked, const RankResult& result, const Now& now, Changed* changed) {
  if (result.attempt != run.attempt || !tracked->IsFor(result.rank) || tracked->HasAnswered(result.rank)) return;
  tracked->answers.push_back(
      {.rank = result.rank, .applied = result.applied, .step = result.step, .reason = result.reason});
  ++due_version;
  if (tracked->action.state == ActionState::kApproved) {  // Its answer was faster than the note of its sending.
    Move(tracked, ActionState::kSent, "server", "handed to the trainer", now, changed);
  }
  if (tracked->on_its_way()) {
    if (tracked->answers.size() == tracked->recipients.size()) Settle(tracked, now, changed);
    return;
  }
  // It had been given up, and was applied all the same.
  const bool given_up =
      tracked->action.state == ActionState::kExpired || tracked->action.state == ActionState::kRefused;
  if (!given_up || !result.applied || tracked->is_undo()) return;
  const std::string by = absl::StrCat("rank ", result.rank);
  if (tracked->recipients.size() == 1 && Busy() == nullptr) {
    return Applied(tracked, result.step, by, "answered after it had been given up", now, changed);
  }
  Move(tracked, tracked->action.state, by, absl::StrCat("was applied there at step ", result.step, " all the same"),
       now, changed);
  if (!tracked->info().holds) return;
  Tracked* const undo = MakeUndo(tracked, "server", "it had been given up", now, changed);
  if (undo == nullptr) return;
  undo->only_ranks = {result.rank};
  Approve(undo, "server", "what was given up must not stay", now, changed);
}

void ActionEngine::State::Settle(Tracked* tracked, const Now& now, Changed* changed) {
  std::vector<uint32_t> applied;
  std::vector<uint32_t> rest;
  std::string why;
  std::string who = "server";
  bool one_step = true;
  int64_t step = -1;
  for (const Tracked::Answer& answer : tracked->answers) {
    if (answer.applied) {
      if (!applied.empty() && answer.step != step) one_step = false;
      step = std::max(step, answer.step);
      applied.push_back(answer.rank);
    } else {
      rest.push_back(answer.rank);
      if (why.empty()) {
        who = absl::StrCat("rank ", answer.rank);
        why = answer.reason.empty() ? "refused without a reason" : answer.reason;
      }
    }
  }
  for (const uint32_t rank : tracked->recipients) {
    if (tracked->HasAnswered(rank)) continue;
    rest.push_back(rank);
    if (why.empty()) why = absl::StrCat("no answer from rank ", rank);
  }
  if (rest.empty() && (one_step || tracked->is_undo())) {
    std::string reason = absl::StrCat("at step ", step);
    if (applied.size() > 1) absl::StrAppend(&reason, " on ", applied.size(), " ranks");
    return Applied(tracked, step, applied.size() == 1 ? absl::StrCat("rank ", applied[0]) : "server", reason, now,
                   changed);
  }
  const bool by_chance = why.find("late") != std::string::npos || why.find("no answer") != std::string::npos ||
                         why.find("expired") != std::string::npos || rest.empty();
  if (applied.empty()) {
    const bool silent = tracked->answers.empty();
    return Fail(tracked, silent ? ActionState::kExpired : ActionState::kRefused, who, why, by_chance, now, changed);
  }
  if (tracked->is_undo()) {
    // The rest once more; what it undoes is in force there still.
    Tracked* const of = Find(tracked->action.undoes);
    Move(tracked, ActionState::kRefused, who, absl::StrCat("partial: ", why), now, changed);
    if (of == nullptr) return;
    if (tracked->undo_tries + 1 >= kUndoTriesMax) {
      return Escalate(of, absl::StrCat("undone in part only: ", why), now, changed);
    }
    Tracked* const again = MakeUndo(of, tracked->action.asked_by, "the ranks that did not undo it", now, changed);
    if (again == nullptr) return;
    again->undo_tries = tracked->undo_tries + 1;
    again->only_ranks = rest;
    return Approve(again, "server", "an undo was partial", now, changed);
  }
  if (why.empty()) why = "ranks applied it at different steps";
  Fail(tracked, ActionState::kRefused, who, absl::StrCat("partial: ", why), by_chance, now, changed);
  if (!tracked->info().holds) return;  // WhyNot() hands such to one rank alone.
  Tracked* const undo = MakeUndo(tracked, "server", "it was applied in part", now, changed);
  if (undo == nullptr) return;
  undo->only_ranks = applied;
  Approve(undo, "server", "all ranks or none", now, changed);
}

void ActionEngine::State::Restart(uint32_t attempt, const Now& now, Changed* changed) {
  ranks.clear();
  stepped = false;
  watch.Forget();
  ++due_version;
  const std::string began = absl::StrCat("attempt ", attempt, " began without it");
  for (size_t i = 0; i < actions.size(); ++i) {
    Tracked& tracked = actions[i];
    if (!tracked.is_undo() || !tracked.on_its_way()) continue;
    Tracked* const of = Find(tracked.action.undoes);
    const bool failed = of != nullptr && of->action.state == ActionState::kDidNotHelp;
    if (of != nullptr && of->in_force) {
      of->in_force = false;
      of->on_trial = false;
      Move(of, ActionState::kUndone, "server", began, now, changed);
      AlertCase* const alert = FindCase(of->action.alert_key);
      if (failed && of->by_policy && alert != nullptr) alert->owed = alert->owed_by_verdict = true;
    }
    Move(&tracked, ActionState::kRefused, "server", "the trainer restarted: nothing is left to undo", now, changed);
  }
  for (size_t i = 0; i < actions.size(); ++i) {
    Tracked& tracked = actions[i];
    const bool in_force = tracked.in_force;
    if (!tracked.on_its_way() && !in_force && !tracked.on_trial) continue;
    const bool holds = tracked.info().holds;
    tracked.recipients.clear();
    tracked.answers.clear();
    if (!tracked.step_given) tracked.action.apply_at_step = 0;
    if (tracked.action.state == ActionState::kApproved) {
      tracked.action.attempt = attempt;
    } else if (tracked.action.state == ActionState::kSent) {
      tracked.action.attempt = attempt;
      if (!tracked.expires_given) {
        tracked.action.expires_unix_ns = now.time_unix_ns + policy->time_to_live_s * kSecondNanos;
      }
      if (!holds) {
        Fail(&tracked, ActionState::kRefused, "server", "the trainer restarted", true, now, changed);
      } else {
        Move(&tracked, ActionState::kSent, "server",
             absl::StrCat("the trainer restarted without an answer: attempt ", attempt, " is handed it"), now, changed);
      }
    } else if (!in_force) {
      // Of a clip nobody knows whether the checkpoint has it.
      tracked.on_trial = false;
      Move(&tracked, ActionState::kKept, "server", "the trainer restarted during its trial", now, changed);
    } else if (policy->mode == PolicyMode::kObserve && !tracked.person_approved) {
      tracked.in_force = false;
      tracked.on_trial = false;
      Move(&tracked, ActionState::kUndone, "server", began + ", and the policy observes", now, changed);
    } else {
      tracked.resume = tracked.on_trial ? ActionState::kApplied : tracked.action.state;
      tracked.restoring = true;
      tracked.on_trial = false;
      tracked.action.attempt = attempt;
      tracked.action.apply_at_step = 0;
      tracked.step_given = false;
      tracked.expires_given = false;
      tracked.action.expires_unix_ns = now.time_unix_ns + policy->time_to_live_s * kSecondNanos;
      Move(&tracked, ActionState::kSent, "server", began + ": it is handed again", now, changed);
    }
  }
}

}  // namespace bellwether::server
