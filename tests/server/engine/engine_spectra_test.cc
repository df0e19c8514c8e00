// Goal: a trainer's acknowledgements wait for nothing that is made of its Gram matrices, and a
// server that is killed with matrices in its log that nobody has computed makes the same of them
// when it is started again as one that goes on.
// Method: a whole engine on a real log, with a bank that computes only when it is let.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "server/engine/engine.h"
#include "tests/support/crash_copy.h"
#include "tests/support/ingest_trainer.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;

class WaitingBank final : public SpectraBank {
 public:
  void Eigenvalues(int64_t n, int64_t count, double* matrices, double* values) override {
    go.WaitForNotification();
    CpuSpectraBank()->Eigenvalues(n, count, matrices, values);
  }
  const char* backend() const override { return "cpu"; }
  absl::Notification go;
};

class SpectraTrainer final : public IngestTrainer {
 public:
  explicit SpectraTrainer(Engine* engine) { Greet(engine->ingest(), v1::ClientMessage(), /*world=*/1, /*layers=*/1); }
  ~SpectraTrainer() override { session_->Detach(); }

  void OnDurable(uint64_t seq) override {
    absl::MutexLock lock(&mutex_);
    durable_ = std::max(durable_, seq);
  }

  // A step with a matrix of head 1 whose sigma is `sigma`.
  void Step(int64_t step, float sigma) {
    v1::ClientMessage gram;
    v1::Spectrum* spectrum = gram.mutable_spectrum();
    spectrum->set_step(step);
    spectrum->set_head(1);
    spectrum->set_kind(v1::SPECTRUM_KIND_WQ_GRAM);
    spectrum->set_n(2);
    for (const float value : {sigma * sigma, 0.0f, 1.0f}) spectrum->add_upper(value);
    Put(std::move(gram));
    PutLoss(step);
  }
  void AwaitDurable() {
    absl::MutexLock lock(&mutex_);
    const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return durable_ >= seq_; };
    mutex_.Await(absl::Condition(&done));
  }

 private:
  absl::Mutex mutex_;
  uint64_t durable_ ABSL_GUARDED_BY(mutex_) = 0;
};

class EngineSpectraTest : public testing::Test {
 protected:
  std::unique_ptr<Engine> Open(SpectraBank* bank, const std::string& folder) {
    Engine::Options options;
    options.storage_path = folder;
    options.spectra_bank = bank;
    auto engine = Engine::Open(options, &counters_, Clock::System());
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  static std::vector<float> Sigmas(Engine* engine) {
    const RunSnapshotPtr run = engine->runs()->Find("r");
    EXPECT_NE(run, nullptr);
    engine->ingest()->AwaitApplied(run->record.id);
    const auto points = engine->series()->ReadSeries(run->record.id, run->record.description.layout,
                                                     {SignalId::kGramSigma, 0, 1}, 0, 1000, 1000, -1);
    EXPECT_TRUE(points.ok()) << points.status();
    return points.ok() ? points->mean : std::vector<float>();
  }

  TempDirectory directory_;
  Counters counters_;
};

TEST_F(EngineSpectraTest, StepsWaitForSpectraAndAcknowledgementsDoNot) {
  WaitingBank bank;
  const auto engine = Open(&bank, directory_.path());
  {
    SpectraTrainer trainer(engine.get());
    for (int64_t step = 0; step < 5; ++step) trainer.Step(step, 2.0f + static_cast<float>(step));
    trainer.AwaitDurable();  // Would hang.
    EXPECT_EQ(engine->runs()->Find("r")->record.steps_recorded, 0u);
    bank.go.Notify();
  }
  EXPECT_THAT(Sigmas(engine.get()), ElementsAre(2, 3, 4, 5, 6));
}

TEST_F(EngineSpectraTest, UnansweredSpectraAreComputedAfterRestart) {
  WaitingBank bank;
  const TempDirectory killed;
  auto engine = Open(&bank, directory_.path());
  {
    SpectraTrainer trainer(engine.get());
    for (int64_t step = 0; step < 3; ++step) trainer.Step(step, 2.0f + static_cast<float>(step));
    trainer.AwaitDurable();
  }
  // What a server that is killed now leaves behind.
  CrashCopy(directory_.path() + "/wal", killed.path() + "/wal");
  bank.go.Notify();
  const auto restarted = Open(nullptr, killed.path());
  EXPECT_THAT(Sigmas(restarted.get()), ElementsAre(2, 3, 4));
  EXPECT_THAT(Sigmas(engine.get()), ElementsAre(2, 3, 4));
  // One that ends in order, and its successor.
  ASSERT_TRUE(engine->Close().ok());
  engine = nullptr;
  EXPECT_THAT(Sigmas(Open(nullptr, directory_.path()).get()), ElementsAre(2, 3, 4));
  EXPECT_EQ(counters_.counter("bellwether_spectra_total", {{"result", "late"}})->value(), 0);
}

}  // namespace
}  // namespace bellwether::server
