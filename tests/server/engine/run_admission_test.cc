// Goal: what a run takes of memory is known well enough to say no in time, and who is refused
// hears why.
// Method: real runs that take steps as a shard would, their memory as the C library counts it.

#include "server/engine/run_admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/base/config.h"
#include "server/engine/live_run.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;

constexpr int64_t kMib = 1 << 20;

int64_t BytesInUse() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

std::vector<SignalId> FirstSignals(int count) {
  std::vector<SignalId> signals;
  for (int i = 1; i <= count; ++i) signals.push_back(static_cast<SignalId>(i));
  return signals;
}

// After some windows that were saved before they were full, as of a run that sends a sample a
// second and is saved every 30 s.
int64_t Measure(const Layout& layout, const std::vector<SignalId>& signals) {
  constexpr int kSteps = 76, kStepsSaved = 30;
  const TempDirectory directory;
  ReloadableRules rules{JudgeOptions()};
  ReloadablePolicy policy;
  RunTable table;
  Counters counters;
  FakeClock clock;
  const auto wal = *Wal::Open({.directory = directory.path() + "/wal"}, [](Lsn) {});
  const auto database = *Database::Open({.directory = directory.path() + "/db"});
  SeriesStore::Options options;
  options.window_bytes_max = 0;  // That budget is counted by itself.
  const auto series = SeriesStore::Create(options, database.get());
  AlertStore alerts(database.get());
  EXPECT_TRUE(alerts.Load().ok());
  const LiveRunParts parts = {.rules = &rules,
                              .policy = &policy,
                              .database = database.get(),
                              .series = series.get(),
                              .alerts = &alerts,
                              .table = &table,
                              .wal = wal.get(),
                              .counters = &counters,
                              .clock = &clock};
  RunRecord record;
  record.id = 1;
  record.description.name = "run";
  record.description.layout = layout;
  record.description.layout.tensors = 0;  // Until they have names.
  record.description.reporters = 1;
  std::unique_ptr<LiveRun> loaded = *LiveRun::Load(parts, record);
  LiveRun& run = *loaded;
  const auto log = [&] {  // An alert waits until its cause is durable.
    WalRecord message;
    message.kind = WalKind::kMessage;
    message.run = 1;
    message.payload = "not read here";
    return *wal->Append(std::move(message));
  };
  HelloMessage hello;
  hello.run = record.description;
  run.Apply({log(), 1, 0, 1, 1, {0, hello}}, 1);
  uint64_t seq = 0;
  if (layout.tensors > 0) {
    NamesMessage names{.granularity = Granularity::kTensor};
    for (int32_t i = 0; i < layout.tensors; ++i) {
      names.names.push_back("model.layers." + std::to_string(i / 300) + ".mlp.experts." + std::to_string(i % 300) +
                            ".up_proj.weight");
    }
    run.Apply({log(), 1, 0, 1, 1, {++seq, std::move(names)}}, 1);
  }
  std::mt19937 random(1);
  std::normal_distribution<float> noise(1.0f, 1e-3f);  // Healthy, and with all mantissas.
  for (int step = 0; step < kSteps; ++step) {
    RankFrame frame;
    frame.step = step;
    for (const SignalId signal : signals) {
      const MatrixShape shape = ShapeOf(*FindSignal(signal), layout);
      frame.blocks.push_back({signal, 0, shape.layers, 0, shape.heads, frame.values.size()});
      for (int64_t i = 0; i < shape.size(); ++i) frame.values.push_back(noise(random));
    }
    run.Apply({log(), 1, 0, 1, 1, {++seq, std::move(frame)}}, 1);
    run.Publish();
    if (step % kStepsSaved == kStepsSaved - 1) {
      EXPECT_TRUE(run.Save().ok());
    }
  }
  series->Drain();
  // What it gives back: the database keeps what was saved, and that is not the run's.
  const int64_t with = BytesInUse();
  loaded.reset();
  series->Forget(1);
  table.Remove(1);
  return with - BytesInUse();
}

TEST(RunMemoryTest, CountedRunMemoryIsTheMeasuredOneWithinATenth) {
#if defined(ABSL_HAVE_ADDRESS_SANITIZER) || defined(ABSL_HAVE_THREAD_SANITIZER)
  GTEST_SKIP() << "a sanitizer's memory is its own";
#endif
  constexpr int kTensors = 10'000;
  Measure({1, 1, 1, 64, 0}, FirstSignals(26));  // What is made once in a process.
  struct Case {
    Layout layout;
    int signals;
    std::vector<SignalId> of_tensors = {};
  };
  using enum SignalId;
  const std::vector<SignalId> sampled = {kTensorElements,  kTensorGradSumsq, kTensorGradMax,     kTensorGradNonfinite,
                                         kTensorGradZeros, kTensorMoved,     kTensorWeightSumsq, kTensorLagSum};
  for (const Case& c :
       {Case{{12, 12, 12, 64, 0}, 26}, Case{{32, 32, 32, 128, 0}, 4}, Case{{32, 32, 8, 128, 0}, 26},
        Case{{128, 128, 16, 128, 0}, 6}, Case{{4, 512, 64, 128, 0}, 12},
        Case{{.layers = 32, .heads = 32, .kv_heads = 8, .tensors = kTensors}, 4, sampled},
        Case{{.layers = 4, .heads = 4, .kv_heads = 4, .tensors = kTensors}, 4, {kTensorGradMax, kTensorMoved}},
        Case{{.layers = 4, .heads = 4, .kv_heads = 4, .tensors = kTensors}, 4, {kTensorGradSumsq}},
        Case{{.layers = 4, .heads = 4, .kv_heads = 4, .tensors = kTensors},
             4,
             {kTensorElements, kTensorGradSumsq, kTensorChangeSumsq, kTensorChangeWeightSumsq, kTensorLagSum}}}) {
    std::vector<SignalId> signals = FirstSignals(c.signals);
    signals.insert(signals.end(), c.of_tensors.begin(), c.of_tensors.end());
    const int64_t measured = Measure(c.layout, signals), counted = RunMemoryBytes(c.layout, signals);
    EXPECT_NEAR(static_cast<double>(measured), static_cast<double>(counted),
                static_cast<double>(counted / 10 + kMib / 4))
        << c.layout.layers << " x " << c.layout.heads << ", " << c.layout.tensors << " tensors, " << c.signals;
  }
}

class RunAdmissionTest : public testing::Test {
 protected:
  std::unique_ptr<RunAdmission> Make(int64_t bytes_for_runs, size_t runs = 1000) {
    return *RunAdmission::Create(
        {.runs_live_max = runs, .memory_max = 100 * kMib + bytes_for_runs, .own_bytes = 100 * kMib}, &counters_);
  }
  void AddRun(uint64_t steps, const std::vector<SignalId>& signals, bool ended = false, int64_t silent_ns = 0,
              int32_t tensors = 0) {
    auto run = std::make_shared<RunSnapshot>();
    run->record.id = runs_.size() + 1;
    run->record.description.layout = kLayout;
    run->record.description.layout.tensors = tensors;
    run->record.steps_recorded = steps;
    run->record.signals = signals;
    run->record.ended = ended;
    run->record.started_unix_ns = run->record.last_report_unix_ns = kNow - silent_ns;
    runs_.push_back(std::move(run));
  }
  double Refused(const std::string& limit) {
    return counters_.counter("bellwether_ingest_limit_refused_total", {{"limit", limit}})->value();
  }

  static constexpr Layout kLayout{32, 32, 8, 128, 0};
  static constexpr int64_t kNow = 1'000'000'000'000'000'000;
  Counters counters_;
  std::vector<RunSnapshotPtr> runs_;
};

TEST_F(RunAdmissionTest, RunsBeyondTheMemoryAreRefusedWithNumbers) {
  const auto admission = Make(3 * RunMemoryBytesMax(kLayout));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(admission->Admit(kLayout, runs_, kNow).ok());
    AddRun(0, {});
  }
  const absl::Status refused = admission->Admit(kLayout, runs_, kNow);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              testing::AllOf(HasSubstr("32 layers x 32 heads"), HasSubstr("limits.memory_max"), HasSubstr("3 live")));
  EXPECT_EQ(Refused("memory"), 1);
  EXPECT_EQ(Refused("runs"), 0);
}

TEST_F(RunAdmissionTest, KnownRunIsCountedByItsSignals) {
  const auto admission = Make(2 * RunMemoryBytesMax(kLayout));
  AddRun(3, FirstSignals(4));
  AddRun(63, {SignalId::kLoss});
  EXPECT_FALSE(admission->Admit(kLayout, runs_, kNow).ok()) << "they may still send more";
  runs_.clear();
  AddRun(4, FirstSignals(4));
  AddRun(64, FirstSignals(4));
  EXPECT_TRUE(admission->Admit(kLayout, runs_, kNow).ok());
  admission->Show(runs_, kNow);
  EXPECT_EQ(counters_.gauge("bellwether_runs_memory_bytes")->value(),
            static_cast<double>(2 * RunMemoryBytes(kLayout, FirstSignals(4))));
}

TEST_F(RunAdmissionTest, RunThatDiedEarlyReleasesItsReservation) {
  const auto admission = Make(RunMemoryBytesMax(kLayout) + RunMemoryBytes(kLayout, FirstSignals(4)));
  AddRun(1, FirstSignals(4), false, 500'000'000'000);
  EXPECT_FALSE(admission->Admit(kLayout, runs_, kNow).ok());
  runs_.clear();
  AddRun(1, FirstSignals(4), false, 700'000'000'000);
  EXPECT_TRUE(admission->Admit(kLayout, runs_, kNow).ok());
}

TEST_F(RunAdmissionTest, TensorsBeyondTheMemoryAreRefusedWithNumbers) {
  constexpr int32_t kTensors = 1000;
  Layout more = kLayout;
  more.tensors = kTensors;
  const int64_t each = RunMemoryBytesMax(more) - RunMemoryBytesMax(kLayout);
  const auto admission = Make(3 * RunMemoryBytes(kLayout, FirstSignals(4)) + 2 * each);
  for (int i = 0; i < 3; ++i) AddRun(64, FirstSignals(4));
  EXPECT_TRUE(admission->AdmitRows(runs_[0]->record, more, runs_, kNow).ok());
  EXPECT_TRUE(admission->AdmitRows(runs_[0]->record, more, runs_, kNow).ok()) << "another rank names the same";
  EXPECT_TRUE(admission->AdmitRows(runs_[1]->record, more, runs_, kNow).ok());
  const absl::Status refused = admission->AdmitRows(runs_[2]->record, more, runs_, kNow);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              testing::AllOf(HasSubstr("1000 named rows"), HasSubstr("limits.memory_max"), HasSubstr("3 live")));
  EXPECT_EQ(Refused("memory"), 1);
  admission->Show(runs_, kNow);
  EXPECT_EQ(counters_.gauge("bellwether_runs_memory_bytes")->value(),
            static_cast<double>(3 * RunMemoryBytes(kLayout, FirstSignals(4)) + 2 * each));
}

TEST_F(RunAdmissionTest, KnownRunIsCountedByWhatItSendsOfTensors) {
  const auto admission = Make(RunMemoryBytesMax(kLayout));
  AddRun(64, {SignalId::kRows, SignalId::kTensorGradMax}, false, 0, 1000);
  admission->Show(runs_, kNow);
  EXPECT_EQ(counters_.gauge("bellwether_runs_memory_bytes")->value(),
            static_cast<double>(RunMemoryBytes(runs_.back()->record.description.layout, runs_.back()->record.signals)));
}

TEST_F(RunAdmissionTest, RunThatCanNeverFitIsToldSo) {
  const auto admission = Make(RunMemoryBytesMax(kLayout) - 1);
  EXPECT_THAT(std::string(admission->Admit(kLayout, runs_, kNow).message()), HasSubstr("for all runs"));
}

TEST_F(RunAdmissionTest, SignalsOfANewerServerAreLeftOut) {
  EXPECT_EQ(RunMemoryBytes(kLayout, std::vector{SignalId::kRows, static_cast<SignalId>(63)}),
            RunMemoryBytes(kLayout, std::vector{SignalId::kRows}));
}

TEST_F(RunAdmissionTest, EndedRunsTakeNoPlace) {
  const auto admission = Make(RunMemoryBytesMax(kLayout), 1);
  AddRun(0, {}, true);
  EXPECT_TRUE(admission->Admit(kLayout, runs_, kNow).ok());
}

TEST_F(RunAdmissionTest, NumberOfLiveRunsIsLimited) {
  const auto admission = Make(1000 * RunMemoryBytesMax(kLayout), 1);
  AddRun(0, {});
  EXPECT_THAT(std::string(admission->Admit(kLayout, runs_, kNow).message()), HasSubstr("limits.runs_live_max"));
  EXPECT_EQ(Refused("runs"), 1);
}

TEST_F(RunAdmissionTest, AMemoryThatTheServerAloneTakesIsRefused) {
  const auto made = RunAdmission::Create({.memory_max = 100 * kMib, .own_bytes = 100 * kMib}, &counters_);
  EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(made.status().message()),
              HasSubstr("limits.memory_max is 104857600: must be more than 104857600"));
}

TEST_F(RunAdmissionTest, DefaultLimitsAdmitARun) {
  const auto admission = *RunAdmission::Create({}, &counters_);
  EXPECT_TRUE(admission->Admit(kLayout, runs_, kNow).ok());
}

}  // namespace
}  // namespace bellwether::server
