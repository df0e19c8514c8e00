// Goal: Gram matrices of every size and kind, in one batch, each give the signals that they
// would give alone; pairs meet or are given up; and a device that fails in the middle of a
// run, or has no cuSOLVER, changes nothing.
// Method: matrices with known spectra; the library of tests/support/fake_gpu_bank.cc.

#include "server/detect/spectra.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// n x n, with these values on the diagonal, then ones.
ShippedGram Diagonal(int32_t n, std::vector<float> first, Head where = {0, 0}, GramOf of = GramOf::kQuery) {
  auto upper = std::make_shared<std::vector<float>>();
  for (int32_t i = 0; i < n; ++i) {
    for (int32_t j = i; j < n; ++j) {
      const float diagonal = static_cast<size_t>(i) < first.size() ? first[static_cast<size_t>(i)] : 1;
      upper->push_back(i == j ? diagonal : 0);
    }
  }
  return {1, 20, where, of, n, upper};
}

GramTask Task(const ShippedGram& gram) { return {7, gram, {}}; }

float ValueOf(const GramAnswer& answer, SignalId signal) {
  for (size_t i = 0; i < answer.count; ++i) {
    if (answer.values[i].signal == signal) return answer.values[i].value;
  }
  return -1;
}

// Of many sizes, with what cannot be computed in between.
std::vector<GramTask> MixedTasks() {
  std::vector<GramTask> tasks;
  for (const int32_t n : {8, 1, 64, 8, 3, 64, 128}) {
    tasks.push_back(Task(Diagonal(n, {static_cast<float>(n * n)}, {static_cast<int32_t>(tasks.size()), 0})));
  }
  tasks.push_back(Task(Diagonal(8, {kNan}, {7, 0})));
  tasks.push_back(Task(Diagonal(8, {-4}, {8, 0})));
  tasks.push_back(Task(Diagonal(8, {0, 0, 0, 0, 0, 0, 0, 0}, {9, 0})));
  tasks.push_back({7, Diagonal(8, {}, {10, 0}, GramOf::kIncrementA), Diagonal(8, {}, {10, 0}, GramOf::kIncrementB)});
  return tasks;
}

void ExpectRight(const std::vector<GramAnswer>& answers) {
  ASSERT_EQ(answers.size(), 11u);
  for (int32_t i = 0; i < 11; ++i) EXPECT_EQ(answers[static_cast<size_t>(i)].where, (Head{i, 0}));
  EXPECT_EQ(ValueOf(answers[0], SignalId::kGramSigma), 8);
  EXPECT_EQ(ValueOf(answers[1], SignalId::kGramTop2Ratio), 0) << "there is no second one";
  EXPECT_EQ(ValueOf(answers[2], SignalId::kGramTop2Ratio), 1 / 64.0f);
  EXPECT_NEAR(ValueOf(answers[6], SignalId::kGramStableRank), 1 + 127.0 / 128 / 128, 1e-4);
  EXPECT_EQ(answers[7].outcome, GramAnswer::Outcome::kNonfinite);
  EXPECT_TRUE(std::isnan(ValueOf(answers[7], SignalId::kGramEffectiveRank)));
  EXPECT_EQ(answers[8].outcome, GramAnswer::Outcome::kNotAGram);
  EXPECT_EQ(answers[8].count, 0);
  EXPECT_EQ(ValueOf(answers[9], SignalId::kGramSigma), 0);
  EXPECT_TRUE(answers[10].increment);
  EXPECT_NEAR(ValueOf(answers[10], SignalId::kGramIncrementRank), 8, 1e-3);
}

TEST(SpectraTest, BatchedSpectraEqualSingleOnes) {
  const std::vector<GramTask> tasks = MixedTasks();
  const std::vector<GramAnswer> together = SolveGrams(tasks, CpuSpectraBank());
  ExpectRight(together);
  for (size_t i = 0; i < tasks.size(); ++i) {
    const std::vector<GramAnswer> alone = SolveGrams({&tasks[i], 1}, CpuSpectraBank());
    ASSERT_EQ(alone.size(), 1u);
    ASSERT_EQ(alone[0].count, together[i].count);
    for (size_t v = 0; v < alone[0].count; ++v) {
      const float a = alone[0].values[v].value, b = together[i].values[v].value;
      EXPECT_TRUE(a == b || (std::isnan(a) && std::isnan(b))) << a << " and " << b;
    }
  }
  EXPECT_TRUE(SolveGrams({}, CpuSpectraBank()).empty());
}

class GpuSpectraTest : public ::testing::Test {
 protected:
  void TearDown() override {
    unsetenv("BELLWETHER_FAKE_BANK_SPECTRA");
    unsetenv("BELLWETHER_FAKE_BANK_ABI");
  }
  std::unique_ptr<SpectraBank> Open(const char* gpu = "on") {
    return OpenGpuSpectra({.gpu = gpu, .library = BELLWETHER_FAKE_BANK}, [this](const std::string& why) {
      ++failures_;
      why_ = why;
    });
  }
  int failures_ = 0;
  std::string why_;
};

TEST_F(GpuSpectraTest, GpuSpectraEqualTheCpus) {
  const auto bank = Open();
  ASSERT_NE(bank, nullptr);
  ExpectRight(SolveGrams(MixedTasks(), bank.get()));
  EXPECT_STREQ(bank->backend(), "cuda");
  EXPECT_EQ(failures_, 0);
}

TEST_F(GpuSpectraTest, FailureMidBatchLosesNoMatrixAndIsReportedOnce) {
  setenv("BELLWETHER_FAKE_BANK_SPECTRA", "7", 1);  // A batch of the mix takes five: one for each size.
  const auto bank = Open();
  ASSERT_NE(bank, nullptr);
  for (int i = 0; i < 4; ++i) {
    ExpectRight(SolveGrams(MixedTasks(), bank.get()));
    EXPECT_STREQ(bank->backend(), i == 0 ? "cuda" : "cpu");
  }
  EXPECT_EQ(failures_, 1);
  EXPECT_THAT(why_, HasSubstr("lost its cuSOLVER"));
}

TEST_F(GpuSpectraTest, GpuSpectraAreUnavailableWhenOffOrUnusable) {
  setenv("BELLWETHER_FAKE_BANK_SPECTRA", "-1", 1);
  EXPECT_EQ(Open(), nullptr);
  unsetenv("BELLWETHER_FAKE_BANK_SPECTRA");
  EXPECT_EQ(Open("off"), nullptr);
  setenv("BELLWETHER_FAKE_BANK_ABI", "7", 1);
  EXPECT_EQ(Open(), nullptr);
  EXPECT_EQ(OpenGpuSpectra({.gpu = "on", .library = "/no/such.so"}, [](const std::string&) {}), nullptr);
}

TEST(GramAssemblerTest, HalvesMeetInEitherOrder) {
  GramAssembler desk({});
  GramTask task;
  const ShippedGram a = Diagonal(4, {}, {1, 2}, GramOf::kIncrementA), b = Diagonal(4, {}, {1, 2}, GramOf::kIncrementB);
  EXPECT_EQ(desk.Take(b, &task), GramAssembler::Outcome::kHeld);
  EXPECT_EQ(desk.Take(Diagonal(4, {}, {1, 2}), &task), GramAssembler::Outcome::kTask) << "of W_Q alone";
  EXPECT_FALSE(task.increment());
  EXPECT_EQ(desk.Take(b, &task), GramAssembler::Outcome::kRepeated);
  EXPECT_EQ(desk.Take(a, &task), GramAssembler::Outcome::kTask);
  EXPECT_EQ(task.gram.of, GramOf::kIncrementA);
  EXPECT_EQ(task.second.of, GramOf::kIncrementB);
  EXPECT_EQ(desk.Take(a, &task), GramAssembler::Outcome::kRepeated) << "its pair was used";
  EXPECT_EQ(desk.Close(1, 20), 0u);
}

TEST(GramAssemblerTest, UnpairedHalfIsDroppedWhenItsStepCloses) {
  GramAssembler desk({});
  GramTask task;
  ShippedGram later = Diagonal(4, {}, {0, 0}, GramOf::kIncrementA);
  EXPECT_EQ(desk.Take(later, &task), GramAssembler::Outcome::kHeld);
  later.step = 40;
  EXPECT_EQ(desk.Take(later, &task), GramAssembler::Outcome::kHeld);
  EXPECT_EQ(desk.Close(1, 39), 1u);
  EXPECT_EQ(desk.Close(2, 0), 1u) << "of an older attempt";
}

TEST(GramAssemblerTest, MemoryAndNumberAreBounded) {
  GramAssembler desk({.grams_per_step_max = 3, .held_bytes_max = 2 * 10 * sizeof(float)});
  GramTask task;
  const auto half = [](int32_t head) { return Diagonal(4, {}, {0, head}, GramOf::kIncrementA); };
  std::vector<GramAssembler::Outcome> outcomes;
  for (int32_t head = 0; head < 3; ++head) outcomes.push_back(desk.Take(half(head), &task));
  EXPECT_THAT(outcomes, ElementsAre(GramAssembler::Outcome::kHeld, GramAssembler::Outcome::kHeld,
                                    GramAssembler::Outcome::kRefused));
  EXPECT_EQ(desk.Take(Diagonal(4, {}), &task), GramAssembler::Outcome::kRefused) << "the fourth of its step";
  EXPECT_EQ(desk.Close(1, 20), 2u);
  EXPECT_EQ(desk.Take(half(0), &task), GramAssembler::Outcome::kHeld) << "there is room again";
  EXPECT_EQ(desk.Take(Diagonal(6, {}, {0, 0}, GramOf::kIncrementB), &task), GramAssembler::Outcome::kRefused)
      << "halves of two sizes";
}

}  // namespace
}  // namespace bellwether::server
