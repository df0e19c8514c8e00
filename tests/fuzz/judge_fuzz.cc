// Any samples of a run, of any signals and with any values, are judged; a judge that is
// restored from what another one saved goes on as that one does.
//
// The input is a layout and steps: what is done next, then what it needs.  A sample is told
// as signals, each with a seed of its cells, and stands for several steps in a row.

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "server/detect/judge_options.h"
#include "server/detect/run_judge.h"
#include "server/model/row_names.h"
#include "server/model/step_sample.h"
#include "tests/fuzz/fuzz.h"

namespace bellwether::server {
namespace {

constexpr int kRepeatsMax = 48;
constexpr int64_t kStepsMax = 4000;  // Of one input, so that none is slow.

float CellOf(uint32_t* seed, uint32_t kind) {
  *seed = *seed * 1664525 + 1013904223;
  const float noise = static_cast<float>(*seed >> 8) / static_cast<float>(1 << 24);
  switch (kind % 12) {
    case 0:
      return 0;
    case 1:
      return std::numeric_limits<float>::quiet_NaN();
    case 2:
      return std::numeric_limits<float>::infinity();
    case 3:
      return -std::numeric_limits<float>::infinity();
    case 4:
      return NotMeasured();
    case 5:
      return std::numeric_limits<float>::max() * noise;
    case 6:
      return std::numeric_limits<float>::denorm_min();
    case 7:
      return -noise;
    case 8:  // Some cells alone.
      return noise < 0.1F ? std::numeric_limits<float>::quiet_NaN() : 1 + noise;
    case 9:
      return noise < 0.3F ? NotMeasured() : 1e3F * noise;
    default:
      return 1 + 0.01F * noise;
  }
}

Layout LayoutOf(bellwether::FuzzInput* input) {
  Layout layout{.layers = 1 + input->Take<uint8_t>() % 4};
  layout.kv_heads = 1 + input->Take<uint8_t>() % 2;
  layout.heads = layout.kv_heads * (1 + input->Take<uint8_t>() % 3);
  layout.head_dim = input->Take<uint8_t>() % 2 == 0 ? 0 : 64;
  layout.seq_len = input->Take<uint8_t>() % 2 == 0 ? 0 : 1024;
  layout.experts = input->Take<uint8_t>() % 5;
  return layout;
}

bool Same(const std::vector<AlertTransition>& a, const std::vector<AlertTransition>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].key != b[i].key || a[i].k != b[i].k || a[i].state != b[i].state || a[i].severity != b[i].severity ||
        a[i].summary != b[i].summary || a[i].advice != b[i].advice || a[i].evidence.size() != b[i].evidence.size()) {
      return false;
    }
  }
  return true;
}

class Run {
 public:
  explicit Run(bellwether::FuzzInput* input) : input_(*input) {
    run_.layout = LayoutOf(&input_);
    run_.attention.score_dtype = input_.Take<uint8_t>() % 2 == 0 ? "bf16" : "fp16";
    judge_ = std::make_unique<RunJudge>(options_, run_);
  }

  void Play() {
    while (!input_.rest().empty() && steps_ < kStepsMax) {
      switch (input_.Take<uint8_t>() % 16) {
        case 0:
          Restart();
          break;
        case 1:
          Announce();
          break;
        case 2:
          ++run_.attempt;
          Each([this](RunJudge* judge, auto* out) { judge->OnHello(run_, out); });
          break;
        case 3:
          NameRows();
          break;
        case 4: {
          const auto ranks = input_.Take<uint8_t>();
          Each([ranks](RunJudge* judge, auto* out) { judge->OnSilence(ranks, 60, out); });
          break;
        }
        case 5:
          Damage();
          break;
        default:
          Measure();
      }
    }
  }

 private:
  template <typename Call>
  void Each(const Call& call) {
    std::vector<AlertTransition> told, twin_told;
    call(judge_.get(), &told);
    for (const AlertTransition& each : told) FUZZ_CHECK(!each.key.empty() && !each.summary.empty());
    if (twin_ == nullptr) return;
    call(twin_.get(), &twin_told);
    FUZZ_CHECK(Same(told, twin_told));
  }

  void Restart() {
    const std::string state = judge_->Save();
    twin_ = std::make_unique<RunJudge>(options_, run_);
    if (rows_ != nullptr) twin_->SetRows(rows_);
    FUZZ_CHECK(twin_->Restore(state));
    FUZZ_CHECK(twin_->alerts_firing() == judge_->alerts_firing() && twin_->stage() == judge_->stage());
  }

  // A state that is damaged is refused, or is one that can go on.
  void Damage() {
    std::string state = judge_->Save();
    const auto at = input_.Take<uint32_t>() % state.size();
    state[at] = static_cast<char>(state[at] ^ (1 << input_.Take<uint8_t>() % 8));
    if (input_.Take<uint8_t>() % 4 == 0) state.resize(at);
    RunJudge other(options_, run_);
    if (!other.Restore(state)) return;
    StepSample sample;
    sample.Reset(run_.layout);
    sample.attempt = run_.attempt;
    sample.step = step_ + 1;
    std::vector<AlertTransition> told;
    other.Observe(sample, &told);
  }

  void Announce() {
    const RunEvent event{.attempt = run_.attempt,
                         .step = step_,
                         .kind = static_cast<EventKind>(input_.Take<uint8_t>() % 14),
                         .value = input_.Take<float>(),
                         .text = std::string(input_.TakeBytes(4))};
    Each([&event](RunJudge* judge, auto* out) { judge->OnEvent(event, out); });
  }

  void NameRows() {
    auto rows = rows_ == nullptr ? std::make_shared<RunRows>() : std::make_shared<RunRows>(*rows_);
    for (RowNames* const names : {&rows->tensors, &rows->modules}) {
      if (names->size() < 8) names->Add(input_.TakeBytes(1 + input_.Take<uint8_t>() % 24));
    }
    run_.layout.tensors = rows->tensors.size();
    run_.layout.modules = rows->modules.size();
    run_.layout.ranks = std::min(run_.layout.ranks + 1, 8);
    rows_ = rows;
    judge_->SetRows(rows_);
    if (twin_ != nullptr) twin_->SetRows(rows_);
  }

  void Measure() {
    struct Given {
      SignalId id;
      uint32_t kind;
      uint32_t seed;
    };
    std::vector<Given> given;
    for (int left = 1 + input_.Take<uint8_t>() % 12; left > 0; --left) {
      const uint16_t id = input_.Take<uint16_t>() % static_cast<uint16_t>(kSignalIdEnd);
      const SignalInfo* const info = FindSignal(static_cast<SignalId>(id));
      const auto kind = input_.Take<uint8_t>();
      if (info == nullptr || info->derived) continue;
      given.push_back({info->id, kind, input_.Take<uint8_t>()});
    }
    const auto apart = 1 + input_.Take<uint8_t>() % 40;
    const bool complete = input_.Take<uint8_t>() % 8 != 0;
    for (int left = 1 + input_.Take<uint8_t>() % kRepeatsMax; left > 0; --left, ++steps_) {
      StepSample sample;
      sample.Reset(run_.layout);
      sample.attempt = run_.attempt;
      sample.step = step_ += apart;
      sample.ranks = 1;
      sample.complete = complete;
      for (Given& each : given) {
        for (float& cell : sample.Add(each.id)) cell = CellOf(&each.seed, each.kind);
      }
      Each([&sample](RunJudge* judge, auto* out) { judge->Observe(sample, out); });
    }
  }

  bellwether::FuzzInput input_;
  const JudgeOptions options_;
  RunDescription run_;
  std::shared_ptr<const RunRows> rows_;
  std::unique_ptr<RunJudge> judge_, twin_;
  int64_t step_ = 0, steps_ = 0;
};

}  // namespace
}  // namespace bellwether::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bellwether::FuzzInput input(data, size);
  bellwether::server::Run(&input).Play();
  return 0;
}
