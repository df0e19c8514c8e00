#include "server/query/call_access.h"

#include <map>
#include <utility>

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
      {"MarkFalseAlarm", {Role::kAct, true}},   {"Annotate", {Role::kAct, true}},
      {"ListEvents", {Role::kRead, false}},     {"ListActions", {Role::kRead, false}},
      {"ProposeAction", {Role::kAct, true}},    {"ApproveAction", {Role::kAct, true}},
      {"RejectAction", {Role::kAct, true}},     {"UndoAction", {Role::kAct, true}},
      {"GetPolicy", {Role::kRead, false}},      {"SetPolicy", {Role::kAdmin, true}},
      {"ImportRun", {Role::kWrite, true}},      {"ExportRun", {Role::kRead, true}},
      {"DeleteRun", {Role::kAdmin, true}},      {"RenameRun", {Role::kAct, true}},
      {"GetServerInfo", {Role::kRead, false}},
  };
  const auto found = rules->find(method);
  return found == rules->end() ? CallRule{} : found->second;
}

namespace {

// As CheckCall(), about runs as they were asked for and, where it is known, by name.
struct AskedRun {
  std::string_view asked, name;
};

absl::Status CheckRuns(const Grant& grant, const char* method, std::initializer_list<AskedRun> runs) {
  const Role role = RuleOf(method).role;
  absl::Status status = grant.Check(role);
  std::string_view first;
  for (const AskedRun& run : runs) {
    if (run.asked.empty()) continue;
    if (first.empty()) first = run.asked;
    // Of a run that is not here only the words count, so that the answer tells nothing.
    if (status.ok() && !grant.Covers(run.name.empty() ? run.asked : run.name)) status = grant.Refuse(role, run.asked);
  }
  if (!status.ok()) grant.Note(method, first, status, true);
  return status;
}

// A uuid stands for the name of its run.
std::string NameHere(const QueryEngine& engine, const std::string& asked) {
  const RunSnapshotPtr run = asked.empty() ? nullptr : engine.stores().runs->Find(asked);
  return run == nullptr ? "" : run->record.description.name;
}

}  // namespace

absl::Status CheckCall(const QueryEngine& engine, const Grant* grant, const char* method, const std::string& run) {
  if (grant == nullptr) return absl::OkStatus();
  return CheckRuns(*grant, method, {{run, NameHere(engine, run)}});
}

absl::StatusOr<CallPlaces> PlaceCall(const QueryEngine& engine, const Grant* grant, const char* method,
                                     const std::string& run, const std::string& other, int64_t deadline_monotonic_ns) {
  CallPlaces places;
  if (grant == nullptr) return places;
  if (!grant->passed_on()) places.router = engine.stores().router;
  absl::Status found;
  // Who may not even ask makes nobody look.
  const bool may_ask = places.router != nullptr && grant->May(RuleOf(method).role);
  for (const auto& [name, place] : {std::pair(&run, &places.run), std::pair(&other, &places.other)}) {
    if (!may_ask || name->empty() || !found.ok()) continue;
    absl::StatusOr<RunRouter::Location> at = places.router->Find(*name, deadline_monotonic_ns);
    if (at.ok()) {
      *place = *std::move(at);
    } else {
      found = at.status();
    }
  }
  if (places.router == nullptr) {
    places.run.name = NameHere(engine, run);
    places.other.name = NameHere(engine, other);
  }
  const absl::Status allowed = CheckRuns(*grant, method, {{run, places.run.name}, {other, places.other.name}});
  if (!allowed.ok()) return allowed;
  if (!found.ok()) return found;
  return places;
}

}  // namespace bellwether::server
