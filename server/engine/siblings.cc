#include "server/engine/siblings.h"

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bellwether/signal_table.h"

namespace bellwether::server {
namespace {

std::string Sentence(const Evidence& evidence) {
  const SiblingBand& band = evidence.siblings;
  std::string text = absl::StrFormat("%s %.4g", evidence.signal, evidence.value);
  if (evidence.where.layer >= 0) absl::StrAppend(&text, " in layer ", evidence.where.layer);
  if (evidence.where.head >= 0) absl::StrAppend(&text, " head ", evidence.where.head);
  absl::StrAppend(&text, "; ", band.runs, " earlier healthy ", band.runs == 1 ? "run" : "runs",
                  " of this architecture, kernel and dtype had a median of ");
  const bool low = evidence.value < band.p50;
  absl::StrAppendFormat(&text, "%.4g at steps %d to %d, %s %.4g in 1 %% and never %s %.4g", band.p50, band.step_begin,
                        band.step_end - 1, low ? "below" : "above", low ? band.p01 : band.p99, low ? "below" : "above",
                        low ? band.min : band.max);
  return text;
}

}  // namespace

void AddSiblings(const Baselines& baselines, const RunDescription& run, const RunRows* rows,
                 AlertTransition* transition) {
  if (transition->evidence.empty()) return;
  const std::string kind = KindOf(run);
  std::map<std::string, SiblingBand> found;  // Heads share their signal's.
  for (Evidence& evidence : transition->evidence) {
    const SignalInfo* const signal = FindSignal(std::string_view(evidence.signal));
    const OwnSignal* const own = signal == nullptr && rows != nullptr ? rows->FindOwn(evidence.signal) : nullptr;
    if (signal == nullptr && own == nullptr) continue;
    const auto [entry, is_new] = found.try_emplace(evidence.signal);
    if (is_new) {
      entry->second = own == nullptr
                          ? baselines.Find(kind, transition->run, signal->id, transition->step)
                          : baselines.Find(kind, transition->run, MatrixOf(*own), transition->step, own->name);
    }
    evidence.siblings = entry->second;
    if (evidence.siblings.runs > 0 && transition->siblings.empty()) transition->siblings = Sentence(evidence);
  }
}

}  // namespace bellwether::server
