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

  for (size_t i = 0; i < top; ++i) {
    if (ranked[i].stage == 0 && ranked[i].value == -std::numeric_limits<float>::infinity()) break;
    chosen.push_back(ranked[i].head);
  }
  const Layout& layout = run.heads->layout();
  return held_.Hold(run.record.id, chosen, now_ns,
                    [&layout](const Head& head) { return head.layer >= layout.layers || head.head >= layout.heads; });
}

}  // namespace bellwether::server
