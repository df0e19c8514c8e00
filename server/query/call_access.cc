#include "server/query/call_access.h"

#include <map>

namespace bellwether::server {

CallRule RuleOf(std::string_view method) {
  static const auto* const rules = new std::map<std::string_view, CallRule>{
      {"ListRuns", {Role::kRead, false}},       {"GetRun", {Role::kRead, false}},
      {"GetSeries", {Role::kRead, false}},      {"GetMatrix", {Role::kRead, false}},
      {"TopHeads", {Role::kRead, false}},       {"CompareRuns", {Role::kRead, false}},
      {"ListBaselines", {Role::kRead, false}},  {"GetBaseline", {Role::kRead, false}},
      {"ListAlerts", {Role::kRead, false}},     {"GetAlert", {Role::kRead, false}},
      {"WatchAlerts", {Role::kRead, false}},    {"WatchRun", {Role::kRead, false}},
      {"AcknowledgeAlert", {Role::kAct, true}}, {"SilenceAlert", {Role::kAct, true}},
      {"Annotate", {Role::kAct, true}},         {"ListEvents", {Role::kRead, false}},
      {"ListActions", {Role::kRead, false}},    {"ProposeAction", {Role::kAct, true}},
      {"ApproveAction", {Role::kAct, true}},    {"RejectAction", {Role::kAct, true}},
      {"UndoAction", {Role::kAct, true}},       {"GetPolicy", {Role::kRead, false}},
      {"SetPolicy", {Role::kAdmin, true}},      {"ImportRun", {Role::kWrite, true}},
      {"ExportRun", {Role::kRead, true}},       {"GetServerInfo", {Role::kRead, false}},
  };
  const auto found = rules->find(method);
  return found == rules->end() ? CallRule{} : found->second;
}

absl::Status CheckCall(const QueryEngine& engine, const Grant* grant, const char* method,
                       std::initializer_list<std::string_view> runs) {
  if (grant == nullptr) return absl::OkStatus();
  const Role role = RuleOf(method).role;
  absl::Status status = grant->Check(role);
  for (const std::string_view asked : runs) {
    if (asked.empty() || !status.ok()) continue;
    // A uuid stands for the name of its run; of a run that is not here only the
    // words count, so that the answer tells nothing.
    const RunSnapshotPtr run = engine.stores().runs->Find(asked);
    if (!grant->Covers(run == nullptr ? asked : std::string_view(run->record.description.name))) {
      status = grant->Refuse(role, asked);
    }
  }
  std::string_view first;
  for (const std::string_view asked : runs) {
    if (first.empty()) first = asked;
  }
  if (!status.ok()) grant->Note(method, first, status, true);
  return status;
}

}  // namespace bellwether::server
