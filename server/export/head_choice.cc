#include "server/export/head_choice.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bellwether::server {
namespace {

struct Ranked {
  Head head;
  uint8_t stage = 0;
  float value = -std::numeric_limits<float>::infinity();
};

// Earliest cause first: the first of these that the run reports ranks its heads.
constexpr SignalId kLeading[] = {SignalId::kDriftRatio, SignalId::kKeyLeak, SignalId::kTiedFractionBf16,
                                 SignalId::kLogitMax, SignalId::kWqSigma};

std::vector<Ranked> RankHeads(const RunSnapshot& run) {
  std::vector<Ranked> ranked;
  if (run.heads == nullptr) return ranked;
  const StepSample& sample = *run.heads;
  const Layout& layout = sample.layout();
  std::vector<float> values;
  MatrixShape shape;
  for (const SignalId id : kLeading) {
    const SignalInfo& signal = *FindSignal(id);
    if (DeriveMatrix(sample, signal, &values)) {
      shape = ShapeOf(signal, layout);
      break;
    }
  }
  const bool staged = run.head_stage.size() == static_cast<size_t>(layout.layers) * layout.heads;
  ranked.reserve(static_cast<size_t>(layout.layers) * layout.heads);
  for (int32_t layer = 0; layer < layout.layers; ++layer) {
    for (int32_t head = 0; head < layout.heads; ++head) {
      Ranked r{{layer, head}};
      if (staged) r.stage = run.head_stage[static_cast<size_t>(layer) * layout.heads + head];
      if (!values.empty()) {
        const float value = values[static_cast<size_t>(layer) * shape.heads + head * shape.heads / layout.heads];
        if (!IsNotMeasured(value)) r.value = std::isnan(value) ? std::numeric_limits<float>::infinity() : value;
      }
      ranked.push_back(r);
    }
  }
  return ranked;
}

bool Worse(const Ranked& a, const Ranked& b) {
  if (a.stage != b.stage) return a.stage > b.stage;
  if (a.value != b.value) return a.value > b.value;
  return a.head < b.head;
}

}  // namespace

std::vector<Head> HeadChoice::Choose(const RunSnapshot& run, int64_t now_ns) {
  std::vector<Ranked> ranked = RankHeads(run);
  std::vector<Head> chosen;
  if (options_.all) {
    std::sort(ranked.begin(), ranked.end(), Worse);
    for (const Ranked& r : ranked) chosen.push_back(r.head);
    return chosen;
  }
  const size_t top = std::min(ranked.size(), static_cast<size_t>(options_.heads_top));
  if (top == 0) return chosen;
  std::partial_sort(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(top), ranked.end(), Worse);

  std::map<Head, int64_t>& held = held_until_ns_[run.record.id];
  const Layout& layout = run.heads->layout();
  for (auto it = held.begin(); it != held.end();) {
    const bool gone = it->second <= now_ns || it->first.layer >= layout.layers || it->first.head >= layout.heads;
    it = gone ? held.erase(it) : std::next(it);
  }
  std::set<Head> in_top;
  for (size_t i = 0; i < top; ++i) {
    if (ranked[i].stage == 0 && ranked[i].value == -std::numeric_limits<float>::infinity()) break;
    held[ranked[i].head] = now_ns + options_.hold_ns;
    in_top.insert(ranked[i].head);
    chosen.push_back(ranked[i].head);
  }
  // The rest of the held ones, chosen last first.
  std::vector<std::pair<int64_t, Head>> rest;
  for (const auto& [head, until] : held) {
    if (!in_top.contains(head)) rest.emplace_back(-until, head);
  }
  std::sort(rest.begin(), rest.end());
  for (const auto& [order, head] : rest) {
    if (chosen.size() < static_cast<size_t>(options_.held_max)) {
      chosen.push_back(head);
    } else {
      held.erase(head);
      ++evicted_;
    }
  }
  return chosen;
}

void HeadChoice::Keep(const std::set<RunId>& runs) {
  std::erase_if(held_until_ns_, [&runs](const auto& entry) { return !runs.contains(entry.first); });
}

}  // namespace bellwether::server
