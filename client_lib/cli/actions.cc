// action list, get, propose, approve, reject, undo.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

// The names of action_kinds.h, which this side must not include.
const std::vector<std::pair<std::string, v1::ActionKind>>& Kinds() {
  static const auto* const kinds =
      new std::vector<std::pair<std::string, v1::ActionKind>>{{"attention.mode", v1::ACTION_KIND_ATTENTION_MODE},
                                                              {"attention.center_k", v1::ACTION_KIND_CENTER_K},
                                                              {"qk.clip", v1::ACTION_KIND_QK_CLIP},
                                                              {"lr.scale", v1::ACTION_KIND_LR_SCALE},
                                                              {"checkpoint.now", v1::ACTION_KIND_CHECKPOINT_NOW},
                                                              {"batch.skip", v1::ACTION_KIND_BATCH_SKIP},
                                                              {"sampling.deepen", v1::ACTION_KIND_SAMPLING_DEEPEN},
                                                              {"stop", v1::ACTION_KIND_STOP},
                                                              {"rollback.suggest", v1::ACTION_KIND_ROLLBACK_SUGGEST}};
  return *kinds;
}

std::string StateText(v1::ActionState state) {
  switch (state) {
    case v1::ACTION_STATE_PROPOSED:
      return "proposed";
    case v1::ACTION_STATE_APPROVED:
      return "approved";
    case v1::ACTION_STATE_SENT:
      return "sent";
    case v1::ACTION_STATE_APPLIED:
      return "applied";
    case v1::ACTION_STATE_REFUSED:
      return "refused";
    case v1::ACTION_STATE_EXPIRED:
      return "expired";
    case v1::ACTION_STATE_HELPED:
      return "helped";
    case v1::ACTION_STATE_DID_NOT_HELP:
      return "did not help";
    case v1::ACTION_STATE_KEPT:
      return "kept";
    case v1::ACTION_STATE_UNDONE:
      return "undone";
    case v1::ACTION_STATE_ESCALATED:
      return "escalated";
    default:
      return "-";
  }
}

int Colour(v1::ActionState state) {
  return state == v1::ACTION_STATE_PROPOSED                                              ? 214
         : state == v1::ACTION_STATE_DID_NOT_HELP || state == v1::ACTION_STATE_ESCALATED ? 196
                                                                                         : -1;
}

std::string ScopeText(const v1::ActionScope& scope) {
  std::string text;
  for (const uint32_t layer : scope.layers()) text += (text.empty() ? "" : ", ") + ("L" + std::to_string(layer));
  for (const v1::LayerHead& head : scope.heads()) {
    text +=
        (text.empty() ? "" : ", ") + HeadText(static_cast<int32_t>(head.layer()), static_cast<int32_t>(head.head()));
  }
  return text.empty() ? "all" : text;
}

// What is to be done, with its one parameter.
std::string WhatText(const v1::Action& action) {
  const std::string what = ActionKindName(action.kind());
  if (!action.mode().empty()) return what + " " + action.mode();
  if (action.kind() == v1::ACTION_KIND_CENTER_K) return what + (action.value() == 0 ? " off" : "");
  return action.value() == 0 ? what : what + " " + Number(action.value());
}

std::string LastReason(const v1::Action& action) {
  return action.history().empty() ? "" : action.history(action.history_size() - 1).reason();
}

ExitCode PrintAction(Cli* cli, const v1::Action& action) {
  Table table = ActionTable();
  table.rows.push_back(ActionRow(action));
  Print(cli->output, table, action);
  return kOk;
}

struct ListActionsOptions {
  std::string run;
  bool waiting = false;
};

ExitCode ListActions(Cli* cli, const ListActionsOptions& options) {
  v1::ListActionsRequest request;
  request.set_run(options.run);
  return CallAndPrint<v1::ListActionsRequest, v1::ListActionsResponse>(
      cli, &v1::Query::Stub::ListActions, request, [cli, &options](const v1::ListActionsResponse& response) {
        Section actions{.title = "actions", .table = ActionTable()};
        v1::ListActionsResponse shown;
        for (const v1::Action& action : response.actions()) {
          if (options.waiting && action.state() != v1::ACTION_STATE_PROPOSED) continue;
          actions.table.rows.push_back(ActionRow(action));
          *shown.add_actions() = action;
        }
        if (!options.waiting) *shown.mutable_audit() = response.audit();
        if (shown.audit().empty()) {
          Print(cli->output, actions.table, shown);
          return kOk;
        }
        Section audit{.title = "refused requests and changes of policy"};
        audit.table.columns = {"TIME", "BY", "WHAT", "ACTION", "STEP", "REFUSED", "DETAIL"};
        audit.table.texts = {"REFUSED", "DETAIL"};
        for (const v1::AuditEntry& entry : shown.audit()) {
          const bool policy = entry.what() == "set_policy";
          audit.table.rows.push_back(
              {Time(entry.time_unix_ns()), entry.by(), entry.what(), entry.action_id(), Integer(entry.step()),
               entry.refused().empty() ? "-" : entry.refused(),
               policy ? std::to_string(entry.detail().size()) + " bytes of YAML; see -o json" : entry.detail()});
        }
        Print(cli->output, {actions, audit}, shown);
        return kOk;
      });
}

struct GetActionOptions {
  std::string run, id;
};

ExitCode GetAction(Cli* cli, const GetActionOptions& options) {
  v1::ListActionsRequest request;
  request.set_run(options.run);
  return CallAndPrint<v1::ListActionsRequest, v1::ListActionsResponse>(
      cli, &v1::Query::Stub::ListActions, request, [cli, &options](const v1::ListActionsResponse& response) {
        for (const v1::Action& action : response.actions()) {
          if (action.id() != options.id) continue;
          Section facts;
          facts.table = {.columns = {"FIELD", "VALUE"},
                         .rows = {{"id", action.id()},
                                  {"what", WhatText(action)},
                                  {"scope", ScopeText(action.scope())},
                                  {"state", Cell(StateText(action.state()), Colour(action.state()))},
                                  {"not_allowed", action.not_allowed()},
                                  {"attempt", std::to_string(action.attempt())},
                                  {"apply_at_step",
                                   action.apply_at_step() == 0 ? "the next boundary" : Integer(action.apply_at_step())},
                                  {"expires", Time(action.expires_unix_ns())},
                                  {"expected_effect", action.expected_effect()},
                                  {"cost", action.cost()},
                                  {"asked_by", action.asked_by()},
                                  {"alert_key", action.alert_key()},
                                  {"undoes", action.undoes()}}};
          Section history{.title = "history"};
          history.table.columns = {"TIME", "STATE", "STEP", "BY", "REASON"};
          for (const v1::ActionChange& change : action.history()) {
            history.table.rows.push_back({Time(change.time_unix_ns()), StateText(change.state()),
                                          Integer(change.step()), change.by(), change.reason()});
          }
          Print(cli->output, {facts, history}, action);
          return kOk;
        }
        Complain("action \"" + options.id + "\": run " + options.run +
                 " has no such action (see bellwether action list " + options.run + ")");
        return kFailed;
      });
}

struct ProposeOptions {
  std::string run;
  v1::ActionKind kind = v1::ACTION_KIND_UNSPECIFIED;
  std::vector<uint32_t> layers;
  std::vector<std::string> heads;
  std::string mode, alert, by = UserName(), reason;
  std::optional<double> value;
  int64_t step = 0, expires_seconds = 0;
  bool approve = false;
};

ExitCode Propose(Cli* cli, const ProposeOptions& options) {
  v1::ProposeActionRequest request;
  request.set_run(options.run);
  request.set_by(options.by);
  request.set_reason(options.reason);
  request.set_approve(options.approve);
  v1::Action* const action = request.mutable_action();
  action->set_kind(options.kind);
  for (const uint32_t layer : options.layers) action->mutable_scope()->add_layers(layer);
  for (const std::string& head : options.heads) {
    unsigned at = 0, number = 0;
    char rest = 0;
    if (std::sscanf(head.c_str(), "%u/%u%c", &at, &number, &rest) != 2) {
      Complain("--head " + head + ": must be LAYER/HEAD, such as 3/5");
      return kUsage;
    }
    v1::LayerHead* const to = action->mutable_scope()->add_heads();
    to->set_layer(at);
    to->set_head(number);
  }
  action->set_mode(options.mode);
  // A proposal to centre keys means on.
  action->set_value(options.value.value_or(options.kind == v1::ACTION_KIND_CENTER_K ? 1 : 0));
  action->set_apply_at_step(options.step);
  action->set_alert_key(options.alert);
  if (options.expires_seconds > 0) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    action->set_expires_unix_ns(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() +
                                options.expires_seconds * 1'000'000'000);
  }
  return CallAndPrint<v1::ProposeActionRequest, v1::Action>(
      cli, &v1::Query::Stub::ProposeAction, request, [cli](const v1::Action& done) { return PrintAction(cli, done); });
}

struct DecideOptions {
  std::string run, id, by = UserName(), reason;
};

template <grpc::Status (v1::Query::Stub::*method)(grpc::ClientContext*, const v1::DecideActionRequest&, v1::Action*)>
ExitCode Decide(Cli* cli, const DecideOptions& options) {
  v1::DecideActionRequest request;
  request.set_run(options.run);
  request.set_id(options.id);
  request.set_by(options.by);
  request.set_reason(options.reason);
  return CallAndPrint<v1::DecideActionRequest, v1::Action>(
      cli, method, request, [cli](const v1::Action& action) { return PrintAction(cli, action); });
}

template <grpc::Status (v1::Query::Stub::*method)(grpc::ClientContext*, const v1::DecideActionRequest&, v1::Action*)>
void AddDecision(Cli* cli, CLI::App* noun, const std::string& name, const std::string& what) {
  CLI::App* command = nullptr;
  DecideOptions* const options = AddCommand<DecideOptions>(
      cli, noun, name, what, "bellwether action " + name + " my-run 6f1b0a2c-3", &Decide<method>, &command);
  command->add_option("run", options->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_option("id", options->id, "the action's id, as `action list` shows it")->required()->type_name("ID");
  command->add_option("--by", options->by, "your name; else $USER, else your login");
  command->add_option("--reason", options->reason, "why; kept in its history");
}

}  // namespace

std::string ActionKindName(v1::ActionKind kind) {
  for (const auto& [name, known] : Kinds()) {
    if (known == kind) return name;
  }
  return "-";
}

std::string ActionText(const v1::Action& action) {
  return WhatText(action) + ", " + ScopeText(action.scope()) + " (" + action.id() + ")";
}

Table ActionTable() {
  return {.columns = {"ID", "STATE", "WHAT", "SCOPE", "STEP", "ASKED BY", "ALERT", "COST", "REASON"},
          .texts = {"COST", "REASON"}};
}

std::vector<Cell> ActionRow(const v1::Action& action) {
  const int64_t step = action.history().empty() ? -1 : action.history(action.history_size() - 1).step();
  return {
      action.id(),
      Cell(StateText(action.state()) + (action.not_allowed().empty() ? "" : ", not allowed"), Colour(action.state())),
      (action.undoes().empty() ? "" : "undo of " + action.undoes() + ": ") + WhatText(action),
      ScopeText(action.scope()),
      Integer(step),
      action.asked_by(),
      action.alert_key(),
      action.cost(),
      LastReason(action)};
}

void AddActions(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "action", "What is done about alerts, and was");
  CLI::App* command = nullptr;

  auto* const list =
      AddCommand<ListActionsOptions>(cli, noun, "list", "A run's actions, refused requests and changes of policy",
                                     "bellwether action list my-run -o json", &ListActions, &command);
  command->add_option("run", list->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_flag("--waiting", list->waiting, "only what waits for approval");
  AddWatch(cli, command);

  auto* const get = AddCommand<GetActionOptions>(cli, noun, "get", "One action with its history",
                                                 "bellwether action get my-run 6f1b0a2c-3", &GetAction, &command);
  command->add_option("run", get->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_option("id", get->id, "the action's id, as `action list` shows it")->required()->type_name("ID");

  auto* const propose = AddCommand<ProposeOptions>(
      cli, noun, "propose", "Ask for an action",
      "bellwether action propose my-run attention.center_k --layer 3 --approve", &Propose, &command);
  command->add_option("run", propose->run, "the run's name or uuid")->required()->type_name("RUN");
  AddChoice<v1::ActionKind>(command, "kind", &propose->kind, Kinds(), "what to do");
  command->get_option("kind")->required();
  command->add_option("--layer", propose->layers, "a layer of its scope; may be repeated (default: the whole model)")
      ->allow_extra_args(false);
  command->add_option("--head", propose->heads, "LAYER/HEAD of its scope; may be repeated")
      ->allow_extra_args(false)
      ->type_name("LAYER/HEAD");
  AddChoice<std::string>(
      command, "--mode", &propose->mode,
      {{"fa", "fa"}, {"paper", "paper"}, {"sr", "sr"}, {"hp", "hp"}, {"hpm", "hpm"}, {"sdpa", "sdpa"}},
      "of attention.mode");
  command->add_option("--value", propose->value, "gamma, factor, batches or period; center_k: 1 on (default), 0 off");
  command->add_option("--at-step", propose->step, "apply it at this step (default: the next boundary)");
  command->add_option("--expires", propose->expires_seconds, "seconds until it is too late (default: the policy's)");
  command->add_option("--alert", propose->alert, "key of the alert that it is for")->type_name("KEY");
  command->add_option("--by", propose->by, "your name; else $USER, else your login");
  command->add_option("--reason", propose->reason, "why; kept in its history");
  command->add_flag("--approve", propose->approve, "and approve it at once");

  AddDecision<&v1::Query::Stub::ApproveAction>(cli, noun, "approve", "Let a proposed action happen");
  AddDecision<&v1::Query::Stub::RejectAction>(cli, noun, "reject", "Refuse a proposed action");
  AddDecision<&v1::Query::Stub::UndoAction>(cli, noun, "undo", "Take an applied action back");
}

}  // namespace bellwether::cli
