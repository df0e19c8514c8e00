#include "server/model/false_alarm.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "bellwether/signal_table.h"
#include "server/model/alert_places.h"

namespace bellwether::server {
namespace {

// Rules that judge the run, whatever signals of tensors they show.
constexpr std::string_view kOfTheRun[] = {"loss", "gradient", "learning", "sequences", "silent", "overhead"};

std::string LayerPlace(int32_t layer) { return absl::StrCat("layer ", layer); }

// A cell of an own signal: its name, which has no spaces, and behind a colon what a rule says.
std::string NameOfOwnCell(const Evidence& evidence) {
  if (FindSignal(std::string_view(evidence.signal)) != nullptr || evidence.signal == kDifferingRank) return {};
  std::string name = evidence.text.substr(0, evidence.text.find(": "));
  return name.find(' ') == std::string::npos ? name : std::string();
}

// Experts, and what has a name.
std::set<std::string> RowsOf(const AlertTransition& firing) {
  const AlertPlaces places = PlacesOf(firing.evidence);
  std::set<std::string> rows(places.tensors.begin(), places.tensors.end());
  rows.insert(places.modules.begin(), places.modules.end());
  for (const Head& expert : places.experts)
    rows.insert(absl::StrCat(LayerPlace(expert.layer), " expert ", expert.head));
  for (const Evidence& evidence : firing.evidence) rows.insert(NameOfOwnCell(evidence));
  rows.erase("");
  return rows;
}

std::vector<std::string> NamesOfPlaces(const AlertTransition& firing) {
  if (std::find(std::begin(kOfTheRun), std::end(kOfTheRun), firing.rule) != std::end(kOfTheRun)) return {};
  std::set<std::string> places;
  // Heads say where it is, and what has followed from it may be anywhere.
  if (firing.heads.empty()) places = RowsOf(firing);
  if (places.empty()) {
    for (const Head& head : firing.heads) places.insert(LayerPlace(head.layer));
    if (firing.strongest.layer >= 0) places.insert(LayerPlace(firing.strongest.layer));
  }
  return {places.begin(), places.end()};
}

}  // namespace

Illness IllnessOf(const AlertTransition& firing) {
  Illness illness;
  illness.cause = firing.cause.empty() ? "unknown" : firing.cause;
  if (illness.cause == "unknown") illness.rule = firing.rule;
  illness.places = NamesOfPlaces(firing);
  return illness;
}

bool Covers(const Illness& judged, const Illness& found) {
  return judged.cause == found.cause && judged.rule == found.rule && judged.places.empty() == found.places.empty() &&
         std::includes(judged.places.begin(), judged.places.end(), found.places.begin(), found.places.end());
}

const FalseAlarm* LastSaid(const std::vector<FalseAlarm>& said, const Illness& illness) {
  const auto last =
      std::find_if(said.rbegin(), said.rend(), [&](const FalseAlarm& one) { return Covers(one.illness, illness); });
  return last == said.rend() ? nullptr : &*last;
}

bool Mutes(const FalseAlarm* said, Severity severity) {
  return said != nullptr && !said->undone && severity <= said->severity;
}

}  // namespace bellwether::server
