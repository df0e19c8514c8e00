#include "server/act/action_engine.h"

#include <cmath>
#include <utility>

#include "server/act/engine_state.h"
#include "server/detect/archive.h"

namespace bellwether::server {
namespace {

constexpr uint32_t kNoRulesMagic = 0x32414742;         // "BGA2": when rules changed was not kept.
constexpr uint32_t kNoMarksMagic = 0x33414742;         // "BGA3": nor false alarms.
constexpr uint32_t kNoneDisallowedMagic = 0x34414742;  // "BGA4": nor what the job did not allow.
constexpr uint32_t kStateMagic = 0x35414742;           // "BGA5"
constexpr double kStepSecondsShare = 0.05;             // Of a new value in the smoothed one.

}  // namespace

template <class A>
void ActionEngine::State::Visit(A& a) {
  a(run.attempt), a(run.world), a(run.reporters);
  a(run.attention.centred), a(run.attention.softcap), a(run.attention.qk_norm), a(run.attention.kernel);
  std::vector<RankAbilities> all;
  for (const auto& [number, rank] : ranks) all.push_back(rank);
  VisitList(a, all, 1 << 16,
            [&](RankAbilities& rank) { a(rank.rank), a(rank.attempt), a(rank.kinds_mask), a(rank.ranks_agree); });
  if constexpr (A::kReading) {
    ranks.clear();
    for (const RankAbilities& rank : all) ranks[rank.rank] = rank;
  }
  VisitList(a, actions, 2 * kActionsMax, [&](Tracked& tracked) { a(tracked); });
  VisitList(a, cases, kCasesMax, [&](AlertCase& one) { a(one); });
  a(next_number), a(policy_actions), a(last_trial_step), a(step_seconds), a(stepped), a(due_version);
  a(watching), a(watch);
}

template <class A>
void ActionEngine::State::VisitFalseAlarms(A& a) {
  VisitList(a, said, kFalseAlarmsMax, [&](FalseAlarm& one) { VisitFalseAlarm(a, one); });
  for (AlertCase& one : cases) {
    VisitIllness(a, one.illness);
    a(one.is_judged);
  }
}

template <class A>
void ActionEngine::State::VisitNotAllowed(A& a) {
  for (Tracked& tracked : actions) a(tracked.action.not_allowed);
}

ActionEngine::ActionEngine(const RunDescription& run, PolicyPtr policy)
    : state_(std::make_unique<State>(run, std::move(policy))) {}
ActionEngine::~ActionEngine() = default;

void ActionEngine::OnHello(const RunDescription& run, const RankAbilities& rank, const Now& now,
                           std::vector<Action>* changed) {
  State& s = *state_;
  if (rank.attempt < s.run.attempt) return;  // A straggler of an older attempt.
  const bool again = rank.attempt > s.run.attempt;
  const Layout layout = s.run.layout;
  s.run = run;
  s.run.attempt = rank.attempt;
  s.run.layout = layout;  // The store refuses a run that changes its layout.
  if (again) s.Restart(rank.attempt, now, changed);
  s.ranks[rank.rank] = rank;
  ++s.due_version;
  s.AddressAll(now, changed);
  s.SayNotAllowed(now, changed);
  s.Decide(now, changed);
}

void ActionEngine::OnTransitions(const std::vector<AlertTransition>& transitions, const Now& now,
                                 std::vector<Action>* changed) {
  for (const AlertTransition& transition : transitions) state_->Follow(transition, now, changed);
  if (!transitions.empty()) state_->Decide(now, changed);
}

void ActionEngine::OnStep(const StepSample& sample, const Now& now, std::vector<Action>* changed) {
  State& s = *state_;
  const float seconds = sample.scalar(SignalId::kStepSeconds);
  if (std::isfinite(seconds) && seconds > 0) {
    s.step_seconds = s.step_seconds == 0 ? seconds : s.step_seconds + kStepSecondsShare * (seconds - s.step_seconds);
  }
  if (!s.stepped && sample.attempt == s.run.attempt) {
    s.stepped = true;
    s.AddressAll(now, changed);
  }
  s.Watch(sample);
  s.Decide(now, changed);
}

void ActionEngine::OnResult(const RankResult& result, const Now& now, std::vector<Action>* changed) {
  if (Tracked* const tracked = state_->Find(result.id); tracked != nullptr) {
    state_->Answer(tracked, result, now, changed);
  }
  state_->Decide(now, changed);
}

void ActionEngine::OnEvent(const RunEvent& event, const Now& now, std::vector<Action>* changed) {
  State& s = *state_;
  if (event.kind == EventKind::kCentringOn) s.run.attention.centred = true;
  if (event.kind == EventKind::kCentringOff) s.run.attention.centred = false;
  if (event.kind == EventKind::kAttentionMode) s.run.attention.kernel = event.text;
  s.Decide(now, changed);
}

void ActionEngine::OnFalseAlarm(const FalseAlarm& said, const Now& now, std::vector<Action>* changed) {
  State& s = *state_;
  if (AlertCase* const of = s.FindCase(said.key); of != nullptr && of->illness.cause.empty()) {
    of->illness = said.illness;
  }
  // Nobody asks any more what was said before of the same.
  std::erase_if(s.said, [&](const FalseAlarm& before) { return Covers(said.illness, before.illness); });
  if (s.said.size() >= kFalseAlarmsMax) s.said.erase(s.said.begin());
  s.said.push_back(said);
  s.EndFalse(now, changed);
  s.Decide(now, changed);
}

bool ActionEngine::IsFalseAlarm(const std::string& alert_key) const {
  const AlertCase* const of = state_->FindCase(alert_key);
  return of != nullptr && of->is_judged;
}

void ActionEngine::OnRules(const Now& now) { state_->rules_step = now.step; }

void ActionEngine::OnSent(const std::string& id, const Now& now, std::vector<Action>* changed) {
  Tracked* const tracked = state_->Find(id);
  if (tracked != nullptr && tracked->action.state == ActionState::kApproved && !tracked->recipients.empty()) {
    state_->Move(tracked, ActionState::kSent, "server", "handed to the trainer", now, changed);
  }
  state_->Decide(now, changed);
}

void ActionEngine::SetEnded(bool ended, const Now& now, std::vector<Action>* changed) {
  State& s = *state_;
  s.ended = ended;
  if (!ended) return;
  // Where the run goes on they are made again.
  s.EndProposals([](const Action&) { return true; }, "the run has ended", /*by_chance=*/true, now, changed);
}

void ActionEngine::SetPolicy(PolicyPtr policy, const std::string& by, const Now& now, std::vector<Action>* changed) {
  State& s = *state_;
  s.policy = std::move(policy);
  if (s.policy->mode == PolicyMode::kObserve) {
    for (size_t i = 0; i < s.actions.size(); ++i) {
      Tracked& tracked = s.actions[i];
      if (!tracked.by_policy || tracked.action.state != ActionState::kProposed) continue;
      s.Fail(&tracked, ActionState::kExpired, by, "the policy observes now", false, now, changed);
    }
  }
  s.Decide(now, changed);
}

absl::Status ActionEngine::OnRequest(const ActionRequest& request, const Now& now, std::vector<Action>* changed) {
  State& s = *state_;
  s.Expire(now, changed);  // What has run out cannot be approved any more.
  const absl::Status status = s.Request(request, now, changed);
  s.Decide(now, changed);
  return status;
}

std::vector<Action> ActionEngine::Due(uint32_t rank) const {
  std::vector<Action> due;
  for (const Tracked& tracked : state_->actions) {
    if (tracked.on_its_way() && tracked.IsFor(rank) && !tracked.HasAnswered(rank)) due.push_back(tracked.action);
  }
  return due;
}

uint64_t ActionEngine::due_version() const { return state_->due_version; }
const PolicyPtr& ActionEngine::policy() const { return state_->policy; }

std::vector<Action> ActionEngine::actions() const {
  std::vector<Action> all;
  for (const Tracked& tracked : state_->actions) all.push_back(tracked.action);
  return all;
}

std::string ActionEngine::Save() const {
  std::string out;
  StateWriter writer(&out);
  writer(kStateMagic);
  std::string text = state_->policy->text;
  writer(text);
  state_->Visit(writer);
  writer(state_->rules_step);
  state_->VisitFalseAlarms(writer);
  state_->VisitNotAllowed(writer);
  return out;
}

bool ActionEngine::Restore(std::string_view saved) {
  const RunDescription run = state_->run;
  const PolicyPtr policy = state_->policy;
  auto fresh = std::make_unique<State>(run, policy);
  StateReader reader(saved);
  uint32_t magic = 0;
  std::string text;
  reader(magic);
  const bool has_marks = magic == kStateMagic || magic == kNoneDisallowedMagic;
  const bool known = has_marks || magic == kNoMarksMagic || magic == kNoRulesMagic;
  if (known) {
    reader(text);
    fresh->Visit(reader);
  }
  if (magic != kNoRulesMagic) reader(fresh->rules_step);
  if (has_marks) fresh->VisitFalseAlarms(reader);
  if (magic == kStateMagic) fresh->VisitNotAllowed(reader);
  bool whole = known && reader.at_end() && fresh->watch.Consistent();
  for (const Tracked& tracked : fresh->actions) whole = whole && FindActionKind(tracked.action.kind) != nullptr;
  if (!whole) {
    state_ = std::make_unique<State>(run, policy);
    return false;
  }
  if (text != policy->text) {
    if (auto parsed = ParsePolicy(text, "saved policy"); parsed.ok()) fresh->policy = *std::move(parsed);
  }
  state_ = std::move(fresh);
  return true;
}

}  // namespace bellwether::server
