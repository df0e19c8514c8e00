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

// After a full window and half of the next, nothing saved: what a run that is saved every 30 s
// and sends once a second has.
int64_t Measure(const Layout& layout, const std::vector<SignalId>& signals) {
  const TempDirectory directory;
  ReloadableRules rules{JudgeOptions()};
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
  record.description.reporters = 1;
  const int64_t before = BytesInUse();
  const std::unique_ptr<LiveRun> loaded = *LiveRun::Load(parts, record);
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
  std::mt19937 random(1);
  std::normal_distribution<float> noise(1.0f, 1e-3f);  // Healthy, and with all mantissas.
  for (int step = 0; step < 48; ++step) {
    RankFrame frame;
    frame.step = step;
    for (const SignalId signal : signals) {
      const MatrixShape shape = ShapeOf(*FindSignal(signal), layout);
      frame.blocks.push_back({signal, 0, shape.layers, 0, shape.heads, frame.values.size()});
      for (int64_t i = 0; i < shape.size(); ++i) frame.values.push_back(noise(random));
    }
    run.Apply({log(), 1, 0, 1, 1, {static_cast<uint64_t>(step) + 1, std::move(frame)}}, 1);
    run.Publish();
  }
  return BytesInUse() - before;
}

TEST(RunMemoryTest, CountedRunMemoryMatchesMeasuredMemory) {
#if defined(ABSL_HAVE_ADDRESS_SANITIZER) || defined(ABSL_HAVE_THREAD_SANITIZER)
  GTEST_SKIP() << "a sanitizer's memory is its own";
#endif
  Measure({1, 1, 1, 64, 0}, FirstSignals(26));  // What is made once in a process.
  struct Case {
    Layout layout;
    int signals;
  };
  for (const Case& c : {Case{{12, 12, 12, 64, 0}, 26}, Case{{32, 32, 32, 128, 0}, 4}, Case{{32, 32, 8, 128, 0}, 26},
                        Case{{128, 128, 16, 128, 0}, 6}, Case{{4, 512, 64, 128, 0}, 12}}) {
    const std::vector<SignalId> signals = FirstSignals(c.signals);
    const int64_t measured = Measure(c.layout, signals), counted = RunMemoryBytes(c.layout, signals);
    // The first alert of all has the database take a megabyte.
    EXPECT_LE(measured, counted + 5 * kMib / 4) << c.layout.layers << " x " << c.layout.heads << ", " << c.signals;
    EXPECT_GE(measured, counted / 2) << c.layout.layers << " x " << c.layout.heads << ", " << c.signals;
  }
}

class RunAdmissionTest : public testing::Test {
 protected:
  std::unique_ptr<RunAdmission> Make(int64_t bytes_for_runs, size_t runs = 1000) {
    return *RunAdmission::Create(
        {.runs_live_max = runs, .memory_max = 100 * kMib + bytes_for_runs, .own_bytes = 100 * kMib}, &counters_);
  }
  void AddRun(uint64_t steps, const std::vector<SignalId>& signals, bool ended = false, int64_t silent_ns = 0) {
    auto run = std::make_shared<RunSnapshot>();
    run->record.description.layout = kLayout;
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
